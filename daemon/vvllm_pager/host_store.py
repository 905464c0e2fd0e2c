"""The complete copy of all experts in host RAM: one mapping, immutable once loaded, registered with CUDA."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import torch

from vvllm_shared.errors import BusyError

_PIECE = 2 << 30
"""Bytes registered at a time, about: few large pieces (measured: 0.05 s per GiB)."""


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class HostStore:
    """An anonymous mapping with a region of records for each layer.

    Args:
        regions: (records, bytes of a record) of each layer. Pages cost memory when they are first written.

    Raises:
        BusyError: the kernel does not give so much address space or memory.
    """

    def __init__(self, regions: Sequence[tuple[int, int]]) -> None:
        self._shapes = list(regions)
        # Registrations cannot share a page, and the copy engine takes no record across two of them (a kernel
        # would): regions begin on pages, and pieces end where regions do.
        self._starts = [0]
        for records, record_bytes in self._shapes:
            self._starts.append(self._starts[-1] + _whole_pages(records * record_bytes))
        try:
            self._map = mmap.mmap(-1, max(self.nbytes, mmap.PAGESIZE))
        except OSError as error:
            raise BusyError(
                f"The host expert store needs {self.nbytes / 2**30:.2f} GiB of RAM and the system refuses: {error}.",
                "Free memory, or raise the memory limit of this process or container.",
            ) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._registered: list[int] = []
        # Before the mapping goes: CUDA would take its address range for registered when the next one gets it.
        self._unregister = weakref.finalize(self, _unregister, self._registered)

    @property
    def nbytes(self) -> int:
        """Size of the whole store."""
        return self._starts[-1]

    def region(self, layer: int) -> torch.Tensor:
        """The records of a layer: uint8 [records, record_bytes]."""
        records, record_bytes = self._shapes[layer]
        start = self._starts[layer]
        return self._bytes[start : start + records * record_bytes].view(records, record_bytes)

    def pin(self) -> None:
        """Register the store with CUDA, so that copies to the device run asynchronously and at full speed.

        Raises:
            BusyError: CUDA cannot pin that much.
        """
        cudart = torch.cuda.cudart()
        start = 0
        for end in self._starts[1:]:
            if end - start < _PIECE and end != self.nbytes:
                continue
            address = self._bytes.data_ptr() + start
            code = int(cudart.cudaHostRegister(address, end - start, 0))
            if code != 0:
                self._unregister()
                raise BusyError(
                    f"CUDA could not pin the host expert store: {start / 2**30:.1f} of "
                    f"{self.nbytes / 2**30:.1f} GiB were registered, then error {code}.",
                    "Check `ulimit -l` (under systemd LimitMEMLOCK=infinity) and free RAM; WSL2 pins but a part.",
                )
            self._registered.append(address)
            start = end


def _unregister(addresses: list[int]) -> None:
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())
