"""What each round of a host-driven step is given: worked out on the host, and sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vvllm_pager.batch import Batch
from vvllm_pager.blocks import Blocks, aligned, aligned_by_chance, block_experts, rows_in_order
from vvllm_pager.marlin_blocks import Cuts
from vvllm_shared.residency import EMPTY, Plan
from vvllm_shared.residency.page_table import Bools, Ints


@dataclass(frozen=True)
class Launch:
    """One round, on the device."""

    places: torch.Tensor
    """int32, where the bundles to load are in the lanes."""
    load_slots: torch.Tensor
    """int32, and their slots."""
    slots: torch.Tensor | None = None
    """int32 [T, k], each pair's slot, -1 for those of other rounds; for a kernel without blocks."""
    mine: torch.Tensor | None = None
    """int64 [n], the pairs of this round; as `slots`."""
    blocks: Blocks | None = None
    """For a kernel with blocks. Those that other rounds compute have no rows: nothing is written for them."""


@dataclass(frozen=True)
class Launches:
    """All rounds of a step."""

    rounds: list[Launch]
    nobody: torch.Tensor
    """int64, the pairs that no round computes."""


def launches(plan: Plan, places: Ints, batch: Batch, experts: int, size: int, cuts: Cuts | None) -> Launches:
    """Prepare a step.

    Args:
        places: of all bundles to load, in order.
        size: rows of a block; 0 for a kernel without.
        cuts: which blocks may be left out, where there are blocks.
    """
    upload = _Upload()
    round_of = np.full(experts + 1, len(plan.waves), np.int32)
    for number, wave in enumerate(plan.waves):
        round_of[wave.experts] = number
    planned = batch.planned.reshape(-1)
    nobody = upload.add(np.flatnonzero(planned < 0))
    ends = np.cumsum([len(wave.load_experts) for wave in plan.waves])
    loads = [
        (upload.add(part), upload.add(wave.load_slots))
        for part, wave in zip(np.split(places, ends[:-1]), plan.waves, strict=True)
    ]
    slot_of = [wave.slot_of(experts) for wave in plan.waves]
    if cuts is not None:
        kernels = _with_blocks(upload, batch, experts, size, cuts, round_of, slot_of)
    else:
        kernels = _without_blocks(upload, planned, round_of[planned], slot_of)
    parts = list(kernels)
    sent = upload.send(batch.x.device)
    # Where the order of rows within an expert does not change from run to run, it is stock's to say.
    by_expert = None
    if cuts is not None and not aligned_by_chance(batch.ids.numel(), experts):
        by_expert = aligned(size, batch.ids, experts)
    rounds = []
    for (where, slots), numbers in zip(loads, parts, strict=True):
        given = [sent[number] for number in numbers]
        if cuts is None:
            by_pair = given[0].view(batch.ids.shape)
            rounds.append(Launch(sent[where], sent[slots], by_pair, given[1].long()))
        else:
            rounds.append(
                Launch(sent[where], sent[slots], blocks=_blocks(size, batch.ids.numel(), given, by_expert))
            )
    return Launches(rounds, sent[nobody].long())


def _without_blocks(
    upload: _Upload, planned: Ints, round_of_pair: Ints, slot_of: list[Ints]
) -> Iterator[tuple[int, ...]]:
    for number, slots in enumerate(slot_of):
        yield upload.add(slots[planned]), upload.add(np.flatnonzero(round_of_pair == number))


def _with_blocks(
    upload: _Upload,
    batch: Batch,
    experts: int,
    size: int,
    cuts: Cuts,
    round_of: Ints,
    slot_of: list[Ints],
) -> Iterator[tuple[int, ...]]:
    """Rows, or where stock lays them itself which blocks have any; owners; how many rows."""
    rows: Ints | None = None
    if aligned_by_chance(batch.ids.numel(), experts):
        owner, rows = rows_in_order(size, batch.routed, experts)
    else:
        owner = block_experts(size, batch.routed, experts)
    for number, slots in enumerate(slot_of):
        mine: Bools = round_of[owner] == number
        kept = cuts.keep(mine) if rows is not None else np.arange(len(owner), dtype=np.int32)
        own = mine[kept]
        given = own if rows is None else np.where(own[:, None], rows[kept], batch.ids.numel())
        owners = np.where(own, slots[owner[kept]], max(int(slots.max(initial=EMPTY)), 0))
        filled = np.array([len(kept) * size])
        yield upload.add(given.reshape(-1)), upload.add(owners), upload.add(filled)


def _blocks(size: int, pairs: int, given: list[torch.Tensor], by_expert: Blocks | None) -> Blocks:
    rows, owners, filled = given
    if by_expert is not None:
        laid = by_expert.pairs[: len(owners) * size].view(-1, size)
        rows = torch.where(rows.view(-1, 1) != 0, laid, pairs).flatten()
    return Blocks(size, rows, owners, filled)


_ALIGN = 4
"""Words: the kernels load four at a time."""


class _Upload:
    """Arrays that travel together, as int32."""

    def __init__(self) -> None:
        self._arrays: list[Ints] = []

    def add(self, array: np.ndarray) -> int:
        """Returns its number."""
        self._arrays.append(array.astype(np.int32, copy=False))
        return len(self._arrays) - 1

    def send(self, device: torch.device) -> list[torch.Tensor]:
        """Queue the copy; each array on the device."""
        lengths = [len(array) for array in self._arrays]
        starts = np.cumsum([0] + [-(-length // _ALIGN) * _ALIGN for length in lengths]).tolist()
        pinned = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        words = pinned.numpy()
        for start, array in zip(starts[:-1], self._arrays, strict=True):
            words[start : start + len(array)] = array
        sent = pinned.to(device, non_blocking=True)
        return [sent[start : start + length] for start, length in zip(starts[:-1], lengths, strict=True)]
