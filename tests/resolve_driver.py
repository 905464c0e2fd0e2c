"""Drives *resolve* and *fill* step by step beside the planner of `vvllm_shared.residency`, on any device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vvllm_pager import device_resolver
from vvllm_pager.blocks import Blocks
from vvllm_pager.device_resolver import DeviceResolver, Scratch
from vvllm_pager.device_table import DeviceTable
from vvllm_pager.ring import Ring, RingReader
from vvllm_shared.residency import PageTable, Weights, plan_step

_GUARD = -7
_BEHIND = 64
"""Words behind a kernel's output that nothing may write."""
Ids = np.ndarray[Any, np.dtype[np.int32]]


class _GuardedBlocks:
    """`Blocks`, of which the memory goes on behind what the kernel has."""

    def __init__(self) -> None:
        self._guards: list[torch.Tensor] = []

    def empty(self, size: int, pairs: int, experts: int, device: torch.device) -> Blocks:
        def guarded(tensor: torch.Tensor) -> torch.Tensor:
            memory = torch.full((len(tensor) + _BEHIND,), _GUARD, dtype=torch.int32, device=device)
            self._guards.append(memory[len(tensor) :])
            return memory[: len(tensor)]

        made = Blocks.empty(size, pairs, experts, device)
        return Blocks(size, guarded(made.pairs), guarded(made.owners), guarded(made.filled))

    def check(self) -> None:
        assert all((guard == _GUARD).all() for guard in self._guards), "written past what the kernel has"


class Beside:
    """A device table that the pager keeps by *resolve*, and a host's that `plan_step` keeps, of the same layer."""

    def __init__(
        self,
        experts: int,
        slots: int,
        weights: Weights,
        bias: list[float] | None = None,
        device: str = "cpu",
        warps: int | None = None,
    ) -> None:
        self.experts, self.slots, self.weights, self.warps = experts, slots, weights, warps
        self.device = torch.device(device)
        self.table = DeviceTable(experts, slots, self.device)
        self.planned = PageTable.empty(experts, slots)
        self.advise(bias)
        self.scratch = Scratch(experts, slots, self.device)
        self.scratch.ring = Ring(self.device, entries=8, ids=64)
        self.reader = RingReader(self.scratch.ring.words.numpy())
        pool = SimpleNamespace(table=self.table)
        layer: Any = SimpleNamespace(pool=pool, experts=experts, slots=slots, index=3)
        unused: Any = None
        self._resolver = DeviceResolver(layer, unused, unused, self.scratch)

    def advise(self, bias: list[float] | None) -> None:
        """Replace the bias of both."""
        self.table.advise(self.weights, bias)
        self.planned.bias[:] = 0.0 if bias is None else bias

    @property
    def misses(self) -> int:
        """Of the last round."""
        return int(self.scratch.misses)

    def resolve(
        self,
        ids: Ids,
        padding: np.ndarray | None,
        number: int,
        rounds: int,
        block: int = 0,
        live: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """One round; returns slots [N], and with `block` the blocks' pairs, owners and filled."""
        guarded = _GuardedBlocks()
        one_warp = {None: device_resolver._ONE_WARP, 1: 1 << 20}.get(self.warps, 0)
        mask = None if padding is None else torch.from_numpy(padding).to(self.device)
        on_device = torch.from_numpy(ids).to(self.device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_resolver, "Blocks", guarded)
            patch.setattr(device_resolver, "_ONE_WARP", one_warp)
            slots, blocks = self._resolver._resolve(on_device, mask, number, rounds, block, live, 0)
        guarded.check()
        found = (blocks.pairs, blocks.owners, blocks.filled) if blocks else ()
        return (slots.flatten().cpu(), *(tensor.cpu() for tensor in found))

    def read(self) -> None:
        """Bring the device's table to `table.host`."""
        self.table.read()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, ids: Ids, padding: np.ndarray | None = None, block: int = 0) -> None:
        """One step on both, with everything that must agree asserted."""
        valid = ids.copy()
        if padding is not None:
            valid[padding] = -1
        plan = plan_step(valid, self.planned, self.weights, pair_waves_above=0)
        rounds = -(-min(ids.size, self.experts) // self.slots)
        for number in range(rounds):
            slots, *blocks = self.resolve(ids, padding, number, rounds, block)
            count = self.misses
            wave = plan.waves[number] if number < len(plan.waves) else None
            expected = np.full(ids.size, -1)
            if wave is None:
                assert count == 0
            else:
                assert self.scratch.miss_experts[:count].tolist() == wave.load_experts.tolist()
                assert self.scratch.miss_slots[:count].tolist() == wave.load_slots.tolist()
                expected = wave.slot_of(self.experts)[valid.reshape(-1)]
            assert slots.tolist() == expected.tolist()
            if block:
                self._check_blocks(ids.reshape(-1), slots.numpy(), block, *(b.numpy() for b in blocks))
        self._check_table()

    def _check_blocks(self, ids: Ids, slots: Ids, block: int, pairs: Ids, owners: Ids, filled: Ids) -> None:
        """As stock's alignment for all experts; -1 is nobody's, whatever the mask says."""
        if not (slots >= 0).any():
            assert filled[0] == 0
            return
        at = 0
        for expert in range(self.experts):
            mine = np.flatnonzero(ids == expert)
            for start in range(0, len(mine), block):
                row = np.sort(pairs[at * block : (at + 1) * block])
                assert set(row[row < len(ids)]) <= set(mine)
                placed = slots[mine]
                if (placed >= 0).any():
                    assert owners[at] == placed.max()
                else:
                    assert owners[at] in slots[slots >= 0]
                at += 1
                assert (row < len(ids)).sum() == min(block, len(mine) - start)
        assert filled[0] == at * block
        assert sorted(p for p in pairs[: at * block] if p < len(ids)) == np.flatnonzero(ids >= 0).tolist()

    def _check_table(self) -> None:
        self.read()
        mine, theirs = self.table.host, self.planned
        for name in ("slot_of", "expert_in", "last_used", "heat", "clock"):
            assert np.allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-12), name
        mine.check()


def random_step(rng: np.random.Generator, experts: int, top_k: int, tokens: int) -> tuple[Ids, np.ndarray]:
    """Ids [tokens, k] with some -1, and a mask of padding rows."""
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.05] = -1
    return ids, rng.random(tokens) < 0.2
