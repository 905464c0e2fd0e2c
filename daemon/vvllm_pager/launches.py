"""What each round of a host-driven step is given, worked out on the device: nothing waits for the router's ids.

Shapes depend on the batch's size and on the number of rounds alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vvllm_pager.batch import Batch
from vvllm_pager.block_rounds import aligned_in_order, in_rounds
from vvllm_pager.blocks import Blocks, aligned, aligned_by_chance
from vvllm_pager.marlin_blocks import Cuts
from vvllm_pager.rounds import Launch
from vvllm_shared.residency import Wave
from vvllm_shared.residency.page_table import Ints


@dataclass(frozen=True)
class Round:
    """What is loaded and launched."""

    places: torch.Tensor
    """int32, where the bundles to load are in the lanes."""
    load_slots: torch.Tensor
    """int32, and their slots."""
    launch: Launch
    """Blocks that other rounds compute have no rows: nothing is written for them."""


Upload = Callable[[Sequence[Ints]], list[torch.Tensor]]
"""Brings int32 arrays to the device."""


def launches(
    waves: Sequence[Wave], places: Ints, batch: Batch, experts: int, size: int, cuts: Cuts, upload: Upload
) -> list[Round]:
    """Prepare a step.

    Args:
        places: of all bundles to load, in order.
        experts: E of the layer.
        size: rows of a block; 0 for a kernel without.
        cuts: which blocks may be left out, where there are blocks.
        upload: called once.
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
    *loads, rounds, slots = upload(arrays)
    slots = slots.view(len(waves), experts + 1)
    pairs = list(zip(loads[: len(waves)], loads[len(waves) :], strict=True))
    if not size:
        by_pair = slots[:, _nobody_last(batch, experts)]
        given = [Launch(slots=mine.contiguous()) for mine in by_pair]
    else:
        given = [Launch(blocks=mine) for mine in _blocks(batch, experts, size, cuts, rounds, slots)]
    return [Round(*load, launch) for load, launch in zip(pairs, given, strict=True)]


def _nobody_last(batch: Batch, experts: int) -> torch.Tensor:
    """int64 [T, k], the experts; E where a pair is nobody's."""
    ids = torch.where(batch.ids < 0, experts, batch.ids).long()
    return ids if batch.padding is None else ids.masked_fill(batch.padding[:, None], experts)


def _blocks(
    batch: Batch, experts: int, size: int, cuts: Cuts, round_of: torch.Tensor, slot_of: torch.Tensor
) -> list[Blocks]:
    pairs = batch.ids.numel()
    if aligned_by_chance(pairs, experts):
        whole = aligned_in_order(size, batch.ids, experts)
    else:
        # Here the order of rows does not change from run to run, and is stock's to say; nothing is left out.
        whole, cuts = aligned(size, batch.ids, experts), Cuts.all(-(-(pairs + experts * (size - 1)) // size))
    return in_rounds(whole, pairs, experts, cuts, round_of, slot_of)
