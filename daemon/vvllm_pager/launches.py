"""What each round of a host-driven step is given, worked out on the device: nothing waits for the router's ids.

Shapes depend on the batch's size and on the number of rounds alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vvllm_pager.batch import Batch
from vvllm_pager.blocks import Blocks, aligned, aligned_by_chance, aligned_in_order
from vvllm_pager.marlin_blocks import Cuts
from vvllm_shared.residency import Wave
from vvllm_shared.residency.page_table import Ints


@dataclass(frozen=True)
class Launch:
    """One round."""

    places: torch.Tensor
    """int32, where the bundles to load are in the lanes."""
    load_slots: torch.Tensor
    """int32, and their slots."""
    slots: torch.Tensor | None = None
    """int32 [T, k], each pair's slot, -1 for those of other rounds and nobody's; for a kernel without blocks."""
    blocks: Blocks | None = None
    """For a kernel with blocks. Those that other rounds compute have no rows: nothing is written for them."""


def launches(
    waves: Sequence[Wave], places: Ints, batch: Batch, experts: int, size: int, cuts: Cuts
) -> list[Launch]:
    """Prepare a step.

    Args:
        places: of all bundles to load, in order.
        experts: E of the layer.
        size: rows of a block; 0 for a kernel without.
        cuts: which blocks may be left out, where there are blocks.
    """
    # One more for ids of -1 and for blocks behind the last one.
    round_of = np.full(experts + 1, len(waves), np.int32)
    for number, wave in enumerate(waves):
        round_of[wave.experts] = number
    slot_of = np.stack([wave.slot_of(experts) for wave in waves])
    ends = np.cumsum([len(wave.load_experts) for wave in waves])
    arrays = [
        *np.split(places, ends[:-1]),
        *(wave.load_slots for wave in waves),
        round_of,
        slot_of.reshape(-1),
    ]
    *loads, rounds, slots = _upload(arrays, batch.x.device)
    slots = slots.view(len(waves), experts + 1)
    pairs = list(zip(loads[: len(waves)], loads[len(waves) :], strict=True))
    if not size:
        by_pair = slots[:, _nobody_last(batch, experts)]
        return [Launch(*load, slots=mine.contiguous()) for load, mine in zip(pairs, by_pair, strict=True)]
    blocks = _blocks(batch, experts, size, cuts, rounds, slots)
    return [Launch(*load, blocks=mine) for load, mine in zip(pairs, blocks, strict=True)]


def _upload(arrays: list[Ints], device: torch.device) -> list[torch.Tensor]:
    """All of them in one copy."""
    lengths = [len(array) for array in arrays]
    pinned = torch.empty(sum(lengths), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=pinned.numpy())
    return list(pinned.to(device, non_blocking=True).split(lengths))


def _nobody_last(batch: Batch, experts: int) -> torch.Tensor:
    """int64 [T, k], the experts; E where a pair is nobody's."""
    ids = torch.where(batch.ids < 0, experts, batch.ids).long()
    return ids if batch.padding is None else ids.masked_fill(batch.padding[:, None], experts)


def _blocks(
    batch: Batch, experts: int, size: int, cuts: Cuts, round_of: torch.Tensor, slot_of: torch.Tensor
) -> list[Blocks]:
    """The blocks of each round.

    Args:
        round_of: [E + 1]. slot_of: [R, E + 1].
    """
    pairs = batch.ids.numel()
    if aligned_by_chance(pairs, experts):
        whole = aligned_in_order(size, batch.ids, experts)
    else:
        # Here the order of rows does not change from run to run, and is stock's to say; nothing is left out.
        whole, cuts = aligned(size, batch.ids, experts), Cuts.all(-(-(pairs + experts * (size - 1)) // size))
    count = len(whole.pairs) // size
    used = whole.filled.long() // size
    owner = torch.where(torch.arange(count, device=used.device) < used, whole.owners[:count].long(), experts)
    rounds = torch.arange(len(slot_of), device=used.device)[:, None]
    mine = round_of[owner][None] == rounds
    kept = cuts.keep(mine, used)
    # Those that are kept move to the front of their round's; the others go to one more, behind the end.
    to = torch.where(kept, kept.cumsum(1) - 1, count)
    rows = torch.where(mine[:, :, None], whole.pairs[: count * size].view(1, count, size), pairs)
    laid = rows.new_full((len(slot_of), count + 1, size), pairs)
    laid.scatter_(1, to[:, :, None].expand(-1, -1, size), rows)
    # What has no rows computes on any slot that holds something.
    anywhere = slot_of.amax(1, keepdim=True).clamp(min=0)
    owners = slot_of.new_zeros(len(slot_of), count + 1)
    owners.scatter_(1, to, torch.where(mine, slot_of[:, owner], anywhere))
    filled = (kept.sum(1, keepdim=True) * size).int()
    return [
        Blocks(size, laid[number].flatten(), owners[number], filled[number]) for number in range(len(slot_of))
    ]
