"""The slots of one layer and its page table, both on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vvllm_pager.bundle import BundleLayout, Part, rows_as_bytes
from vvllm_pager.device_table import DeviceTable
from vvllm_shared.residency.page_table import Ints

TILE_BYTES = 32 << 10
"""What one program of *fill* copies at a time."""
_POISON = 0xFF
"""A byte that makes NaN of bf16, fp16, fp32 and both fp8 formats."""


class SlotPool:
    """S slots for the bundles of one layer: the very tensors that vLLM's kernel reads.

    Args:
        slots: the kernel's per-expert tensors [S, ...], by the names of `layout`.
        store: uint8 [E, record_bytes], the layer's region of the host store.
        layout: where each tensor's row lies in a record.
    """

    def __init__(self, slots: dict[str, torch.Tensor], store: torch.Tensor, layout: BundleLayout) -> None:
        self.layout = layout
        self.store = store
        """As given."""
        self._rows = [(rows_as_bytes(slots[part.name]), part) for part in layout.parts]
        first = self._rows[0][0]
        self.table = DeviceTable(len(store), len(first), first.device)
        self.store_words = store.view(torch.int64)
        """[E, words of a record], for *fill*."""
        self.tiles = torch.tensor(
            [tile for rows, part in self._rows for tile in _tiles(rows, part)], device=first.device
        )
        """For *fill*: int64 [tiles, 5], see there."""

    def load(self, experts: Ints, slots: Ints) -> None:
        """Copy bundles into slots, on the CPU backend. The table is the caller's to keep."""
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            for rows, part in self._rows:
                record = self.store[expert, part.offset : part.offset + part.nbytes]
                rows[slot].copy_(record, non_blocking=True)

    def poison(self) -> None:
        """Fill every slot with NaN. Only while nothing is resident."""
        for rows, _ in self._rows:
            fill_with_nan(rows)


def fill_with_nan(tensor: torch.Tensor) -> None:
    """Poison a tensor of any dtype, in place."""
    rows_as_bytes(tensor).fill_(_POISON)


def _tiles(rows: torch.Tensor, part: Part) -> Iterator[tuple[int, int, int, int, int]]:
    """One part of a record in pieces that a program of *fill* copies at a time.

    Args:
        rows: uint8 [S, bytes of a row], the part's slots.
        part: where it lies in a record.
    """
    for at in range(0, part.nbytes, TILE_BYTES):
        address, stride, offset = rows.data_ptr() + at, rows.stride(0), part.offset + at
        nbytes = min(TILE_BYTES, part.nbytes - at)
        wide = all(number % 16 == 0 for number in (address, stride, offset, nbytes))
        yield address, stride, offset, nbytes, int(wide)
