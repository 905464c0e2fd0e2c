"""Drives *resolve* and *fill* step by step beside the planner of `vvllm_shared.residency`, on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton

from vvllm_pager.device_kernels import resolve
from vvllm_pager.device_resolver import starts_early
from vvllm_pager.device_table import DeviceTable
from vvllm_pager.kernel import Blocks
from vvllm_pager.ring import Ring, RingReader
from vvllm_shared.residency import PageTable, Weights, plan_step

_GUARD = -7
Ids = np.ndarray[Any, np.dtype[np.int32]]


class Beside:
    """A device table that *resolve* keeps, and a host's that `plan_step` keeps, of the same layer."""

    def __init__(
        self,
        experts: int,
        slots: int,
        weights: Weights,
        bias: list[float] | None = None,
        device: str = "cpu",
        warps: int = 1,
    ) -> None:
        self.experts, self.slots, self.weights = experts, slots, weights
        self.device, self.warps = torch.device(device), warps
        self.early = starts_early(self.device)
        self.table = DeviceTable(experts, slots, self.device)
        self.table.advise(weights, bias)
        self.planned = PageTable.empty(experts, slots)
        self.planned.bias[:] = 0.0 if bias is None else bias
        self.ring = Ring(self.device, entries=8, ids=64)
        self.reader = RingReader(self.ring.words.numpy())
        self.misses = self.words(1)
        self.miss_experts, self.miss_slots = self.words(slots), self.words(slots)
        self.scratch = self.words(experts), self.words(slots), self.words(2 * experts)

    def words(self, count: int, value: int = 0) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=self.device)

    def resolve(
        self, ids: Ids, padding: np.ndarray | None, number: int, rounds: int, block: int = 0, live: int = 1
    ) -> tuple[torch.Tensor, ...]:
        """One round; returns slots [N], and with `block` the blocks' pairs, owners and filled."""
        table = self.table.device
        count = ids.size
        out = self.words(count, -7)
        blocks, room = self._room(count, block)
        mask = torch.from_numpy(padding).to(self.device).view(torch.uint8) if padding is not None else out
        resolve[(1,)](
            torch.from_numpy(ids.reshape(-1)).to(self.device),
            mask,
            table["last_used"].view(torch.int64),
            *(table[n] for n in ("heat", "bias", "weights", "clock", "counted", "slot_of", "expert_in")),
            *self.scratch,
            *(self.miss_experts, self.miss_slots, self.misses),
            *(out, *blocks),
            *(self.ring.words, self.ring.head),
            *(count, ids.shape[1], number, live, 3, 0),
            E=self.experts,
            S=self.slots,
            EP=triton.next_power_of_2(self.experts),
            SP=triton.next_power_of_2(self.slots),
            NP=triton.next_power_of_2(count),
            ROUNDS=rounds,
            MASKED=padding is not None,
            BLOCK=block,
            ENTRIES=self.ring.entries,
            RING_IDS=self.ring.ids,
            EARLY=self.early,
            launch_pdl=self.early,
            num_warps=self.warps,
        )
        for memory, used in zip(blocks, room, strict=True):
            assert (memory[used:] == _GUARD).all(), "written past what the kernel has"
        return (out.cpu(), *(memory[:used].cpu() for memory, used in zip(blocks, room, strict=True)))

    def _room(self, pairs: int, block: int) -> tuple[list[torch.Tensor], list[int]]:
        """Blocks as large as the pager makes them, each with a guard behind it."""
        blocks = Blocks.empty(max(block, 1), pairs, self.experts, self.device)
        room = [len(memory) for memory in (blocks.pairs, blocks.owners, blocks.filled)]
        return [self.words(size + 64, _GUARD) for size in room], room

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
            count = int(self.misses)
            wave = plan.waves[number] if number < len(plan.waves) else None
            expected = np.full(ids.size, -1)
            if wave is None:
                assert count == 0
            else:
                assert self.miss_experts[:count].tolist() == wave.load_experts.tolist()
                assert self.miss_slots[:count].tolist() == wave.load_slots.tolist()
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
