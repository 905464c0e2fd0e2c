"""A batch's pairs in blocks by expert, as a kernel that takes blocks wants them, and the same on slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size


@dataclass(frozen=True)
class Blocks:
    """A batch's pairs sorted by expert, as vLLM's `moe_align_block_size` lays them for all E experts, or some of these
    blocks."""

    size: int
    """Rows of a block."""
    pairs: torch.Tensor
    """int32, the pairs by block; T * k fills a block up."""
    owners: torch.Tensor
    """int32, each block's expert, or the slot of it."""
    filled: torch.Tensor
    """int32 [1], how much of `pairs` is filled; 0 computes nothing."""

    @classmethod
    def empty(cls, size: int, pairs: int, experts: int, device: torch.device) -> Blocks:
        """Room for `pairs` pairs, as much as vLLM takes (moe_align_block_size.py:140)."""
        length = pairs + experts * (size - 1)
        if pairs < experts:
            length = min(pairs * size, length)
        kind = {"dtype": torch.int32, "device": device}
        return cls(
            size,
            torch.empty(length, **kind),
            torch.empty(-(-length // size), **kind),
            torch.empty(1, **kind),
        )


def aligned(size: int, ids: torch.Tensor, experts: int) -> Blocks:
    """The blocks of a batch by expert, as stock aligns it."""
    pairs, owners, filled = moe_align_block_size(ids, size, experts, None, ignore_invalid_experts=True)
    return Blocks(size, pairs, owners, filled)


def aligned_by_chance(pairs: int, experts: int) -> bool:
    """Whether stock's operator ranks an expert's rows by atomic additions, so that which block a row is in changes from
    run to run (moe_align_sum_kernels.cu)."""
    return pairs >= 1024 or experts > 64


def aligned_in_order(size: int, ids: torch.Tensor, experts: int) -> Blocks:
    """As `aligned`, and the rows of an expert are in the order of the batch: the same blocks in every run."""
    pairs = ids.numel()
    flat = ids.flatten().long()
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = flat.argsort(stable=True)
    of_row = flat[order]
    counts = flat.new_zeros(experts + 1)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (counts[:experts] + size - 1) // size
    ends = blocks.cumsum(0)
    empty = Blocks.empty(size, pairs, experts, ids.device)
    # What is nobody's goes behind the end.
    first = torch.cat([(ends - blocks) * size, ends.new_full((1,), len(empty.pairs))])
    place = torch.arange(pairs, device=ids.device) - (counts.cumsum(0) - counts)[of_row] + first[of_row]
    laid = torch.full((len(empty.pairs) + pairs,), pairs, dtype=torch.int32, device=ids.device)
    laid[place] = order.int()
    numbers = torch.arange(len(empty.owners), device=ids.device)
    owners = torch.searchsorted(ends, numbers, right=True).clamp(max=experts - 1)
    return Blocks(size, laid[: len(empty.pairs)], owners.int(), (ends[-1:] * size).int())


def on_slots(blocks: Blocks, ids: torch.Tensor, slots: torch.Tensor, experts: int) -> Blocks:
    """Blocks by expert as blocks by slot; those of other rounds compute on any slot that holds something.

    Args:
        ids: [T, k] the router's. slots: int32 [T, k], -1 where a pair is of another round or nobody's.
    """
    # -1, nobody's, is written behind the last expert. An expert may have pairs of padding rows too, without a slot.
    slot_of = slots.new_full((experts + 1,), -1)
    slot_of.scatter_reduce_(0, ids.flatten().long() % (experts + 1), slots.flatten(), "amax")
    owners = slot_of[blocks.owners.clamp(0, experts - 1).long()]
    loaded = slots.max().clamp(min=0)
    return Blocks(blocks.size, blocks.pairs, torch.where(owners < 0, loaded, owners), blocks.filled)
