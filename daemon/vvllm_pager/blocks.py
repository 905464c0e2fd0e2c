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
