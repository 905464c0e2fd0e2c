"""The page table of one layer in device memory, which two resolvers share in the order of the compute stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vvllm_shared.board import PHASES
from vvllm_shared.residency import EMPTY, PageTable, Weights

COUNTS = ("hits", "misses", "waves")
"""What *resolve* counts for each phase: distinct experts that were in a slot, that were not, rounds beyond a
step's first."""

_TORCH = {"f8": torch.float64, "i8": torch.int64, "i4": torch.int32}


class DeviceTable:
    """The page table in device memory, with the host's working copy beside it.

    The device's bytes are the truth. A device-driven step changes them where they are; a host-driven step reads
    them, plans, and writes them back. On the CPU backend both are the same memory.

    Attributes:
        host: the working copy; valid between the synchronisation after `read` and the next device-driven step.
        device: each field's tensor on the device, by name: those of `PageTable`, `weights` [3] and `counted`
            int64 [phases, counts].
    """

    def __init__(self, experts: int, slots: int, device: torch.device) -> None:
        fields = {
            "last_used": ("f8", experts),
            "heat": ("f8", experts),
            "bias": ("f8", experts),  # advice: side by side with the weights
            "weights": ("f8", 3),
            "clock": ("f8", 1),
            "counted": ("i8", len(PHASES) * len(COUNTS)),
            "slot_of": ("i4", experts),
            "expert_in": ("i4", slots),
        }
        size = sum(np.dtype(kind).itemsize * count for kind, count in fields.values())
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = (
            self._host if device.type == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)
        )
        self.device: dict[str, torch.Tensor] = {}
        views, offset, starts = {}, 0, {}
        for name, (kind, count) in fields.items():
            views[name] = np.frombuffer(self._host.numpy(), np.dtype(kind), count, offset)
            starts[name], end = offset, offset + views[name].nbytes
            self.device[name] = self._device[offset:end].view(_TORCH[kind])
            offset = end
        self._advice = self._device[starts["bias"] : starts["clock"]].view(torch.float64)
        names = ("slot_of", "expert_in", "last_used", "heat", "bias", "clock")
        self.host = PageTable(*(views[name] for name in names))
        self._weights = views["weights"]
        start = Weights()
        self._weights[:] = start.heat, start.age, start.heat_decay
        self.host.slot_of.fill(EMPTY)
        self.host.expert_in.fill(EMPTY)
        self.write()

    @property
    def weights(self) -> Weights:
        """The victim formula's weights in `host`."""
        heat, age, decay = self._weights
        return Weights(heat, age, decay)

    def read(self) -> None:
        """Start to bring the device's table into `host`; valid after the caller's next synchronisation."""
        if self._device is not self._host:
            self._host.copy_(self._device, non_blocking=True)

    def write(self) -> None:
        """Start to make `host` the device's table. `host` must stay as it is until the next `read`."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def advise(self, weights: Weights, bias: Sequence[float] | None) -> None:
        """Replace the victim formula's weights and bias [E] on the device; None is zeros. Between steps only.

        Waits for nothing: a wait for the running step would leave the device idle before the next one.
        """
        biases = [0.0] * len(self.host.bias) if bias is None else bias
        told = [*biases, weights.heat, weights.age, weights.heat_decay]
        self._advice.copy_(torch.tensor(told, dtype=torch.float64), non_blocking=True)

    def forget_contents(self) -> None:
        """Nothing is resident, in `host` and, behind what is queued, on the device: a step failed in its middle."""
        self.host.slot_of.fill(EMPTY)
        self.host.expert_in.fill(EMPTY)
        for name in ("slot_of", "expert_in"):
            self.device[name].fill_(EMPTY)

    def forget_statistics(self) -> None:
        """As if nothing had been used yet, in `host`: what is resident stays."""
        self.host.last_used.fill(0)
        self.host.heat.fill(0)
        self.host.clock.fill(0)
