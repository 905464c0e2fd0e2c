"""The complete copy of all experts in host RAM: one mapping, immutable once loaded, registered with CUDA."""

from __future__ import annotations

import mmap
import weakref

import torch

from vvllm_shared.errors import BusyError

_PIECE = 2 << 30
"""Bytes registered at a time: few large pieces (measured: 0.05 s per GiB; a record may straddle two)."""


class HostStore:
    """An anonymous mapping that hands out regions of records, layer by layer.

    Args:
        nbytes: size of the whole store. Pages cost memory when they are first written.

    Raises:
        BusyError: the kernel does not give so much address space or memory.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1))
        except OSError as error:
            raise BusyError(
                f"The host expert store needs {nbytes / 2**30:.2f} GiB of RAM and the system refuses: {error}.",
                "Free memory, or raise the memory limit of this process or container.",
            ) from error
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        self._registered: list[int] = []
        # Before the mapping goes: CUDA would take its address range for registered when the next one gets it.
        self._unregister = weakref.finalize(self, _unregister, self._registered)

    @property
    def nbytes(self) -> int:
        """Size of the whole store."""
        return len(self._bytes)

    def take(self, records: int, record_bytes: int) -> torch.Tensor:
        """The next free region as uint8 [records, record_bytes]."""
        start, end = self._used, self._used + records * record_bytes
        assert end <= self.nbytes, f"host store of {self.nbytes} bytes: {end} wanted"  # noqa: S101
        self._used = end
        return self._bytes[start:end].view(records, record_bytes)

    def pin(self) -> None:
        """Register the store with CUDA, so that copies to the device run asynchronously and at full speed.

        Raises:
            BusyError: CUDA cannot pin that much.
        """
        cudart = torch.cuda.cudart()
        for start in range(0, self.nbytes, _PIECE):
            length = min(_PIECE, self.nbytes - start)
            address = self._bytes.data_ptr() + start
            code = int(cudart.cudaHostRegister(address, length, 0))
            if code != 0:
                self._unregister()
                raise BusyError(
                    f"CUDA could not pin the host expert store: {start / 2**30:.1f} of "
                    f"{self.nbytes / 2**30:.1f} GiB were registered, then error {code}.",
                    "Check `ulimit -l` (under systemd LimitMEMLOCK=infinity) and free RAM; WSL2 pins but a part.",
                )
            self._registered.append(address)


def _unregister(addresses: list[int]) -> None:
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())
