"""The slots of one layer and its page table, both on the device."""

from __future__ import annotations

import numpy as np
import torch

from vvllm_pager.bundle import BundleLayout, rows_as_bytes
from vvllm_shared.residency import PageTable
from vvllm_shared.residency.page_table import Ints

_POISON = 0xFF
"""A byte that makes NaN of bf16, fp16, fp32 and both fp8 formats."""


class DeviceTable:
    """The page table in device memory, with the host's working copy beside it.

    The device's bytes are the truth. A host-driven step reads them, plans, and writes them back, all in the order
    of the compute stream. On the CPU backend both are the same memory.
    """

    def __init__(self, experts: int, slots: int, device: torch.device) -> None:
        fields = [("f8", experts)] * 3 + [("i4", experts), ("i4", slots)]
        size = sum(np.dtype(kind).itemsize * count for kind, count in fields)
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = (
            self._host if device.type == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)
        )
        views, offset = [], 0
        for kind, count in fields:
            views.append(np.frombuffer(self._host.numpy(), np.dtype(kind), count, offset))
            offset += views[-1].nbytes
        last_used, heat, bias, slot_of, expert_in = views
        self.host = PageTable(slot_of, expert_in, last_used, heat, bias)
        slot_of.fill(-1)
        expert_in.fill(-1)
        self.write()

    def read(self) -> None:
        """Start to bring the device's table into `host`; valid after the caller's next synchronisation."""
        if self._device is not self._host:
            self._host.copy_(self._device, non_blocking=True)

    def write(self) -> None:
        """Start to make `host` the device's table. `host` must stay as it is until the next `read`."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def set_bias(self, bias: list[float]) -> None:
        """Replace the policy's bias [E]. Between steps only."""
        if self._device is not self._host:
            self.read()
            torch.cuda.current_stream(self._device.device).synchronize()
        self.host.bias[:] = bias
        self.write()


class SlotPool:
    """S slots for the bundles of one layer: the very tensors that vLLM's kernel reads.

    Args:
        slots: the kernel's per-expert tensors [S, ...], by the names of `layout`.
        store: uint8 [E, record_bytes], the layer's region of the host store.
        layout: where each tensor's row lies in a record.
    """

    def __init__(self, slots: dict[str, torch.Tensor], store: torch.Tensor, layout: BundleLayout) -> None:
        self.layout = layout
        self._store = store
        self._rows = [(rows_as_bytes(slots[part.name]), part) for part in layout.parts]
        first = self._rows[0][0]
        self.table = DeviceTable(len(store), len(first), first.device)

    def load(self, experts: Ints, slots: Ints) -> None:
        """Copy bundles into slots, in the order of the compute stream. The table is the caller's to keep."""
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            for rows, part in self._rows:
                record = self._store[expert, part.offset : part.offset + part.nbytes]
                rows[slot].copy_(record, non_blocking=True)

    def poison(self) -> None:
        """Fill every slot with NaN. Only while nothing is resident."""
        for rows, _ in self._rows:
            rows.fill_(_POISON)
