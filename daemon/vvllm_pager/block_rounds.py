"""A large batch's pairs in blocks by expert, and these blocks shared among rounds.

On the device, since the host has not seen the router's ids; by kernels of our own, since the host is what a prefill
step waits for otherwise: in torch's operators it is a hundred launches, 2 ms a layer.
"""

from __future__ import annotations

import torch
import triton

from vvllm_pager.blocks import Blocks
from vvllm_pager.blocks_kernel import add_up, choose, lay, rank, share
from vvllm_pager.marlin_blocks import Cuts

_CHUNK = 128
"""Pairs that are compared with each other at once."""
_CHUNKS, _BLOCKS, _ROWS = 512, 2048, 64
"""Of a batch and of a block. What is smaller takes the same kernels, so that few prompts wait for a compiler."""


def aligned_in_order(size: int, ids: torch.Tensor, experts: int) -> Blocks:
    """As `blocks.aligned`, and the rows of an expert are in the order of the batch: the same blocks in every run.

    Args:
        size: rows of a block.
        ids: [T, k]; what is no number of an expert is nobody's.
        experts: E.
    """
    pairs, device = ids.numel(), ids.device
    chunks = triton.cdiv(pairs, _CHUNK)
    before = torch.empty(pairs, dtype=torch.int32, device=device)
    counts = torch.zeros(experts, chunks, dtype=torch.int32, device=device)
    ends = torch.empty(2, experts, dtype=torch.int32, device=device)
    blocks = Blocks.empty(size, pairs, experts, device)
    blocks.pairs.fill_(pairs)
    rank[(chunks,)](ids, before, counts, pairs, chunks, E=experts, CHUNK=_CHUNK)
    add_up[(experts,)](counts, ends, chunks, CHUNKS=max(triton.next_power_of_2(chunks), _CHUNKS))
    lay[(chunks,)](
        *(ids, before, counts, ends, blocks.pairs, blocks.owners, blocks.filled),
        *(pairs, chunks, size),
        E=experts,
        EP=triton.next_power_of_2(experts),
        CHUNK=_CHUNK,
    )
    return blocks


def in_rounds(
    whole: Blocks, pairs: int, experts: int, cuts: Cuts, round_of: torch.Tensor, slot_of: torch.Tensor
) -> list[Blocks]:
    """The blocks of each round's launch: its own on their slots, those that `cuts` wants beside them without rows.

    Args:
        whole: the batch's, by expert.
        pairs: T * k.
        cuts: which blocks may be left out.
        round_of: int32 [E + 1], each expert's round, or R.
        slot_of: int32 [R, E + 1], each expert's slot in each round, -1 where it has none.
    """
    rounds, device = len(slot_of), whole.pairs.device
    count = len(whole.pairs) // whole.size
    place_of = torch.empty(count, dtype=torch.int32, device=device)
    owners = torch.empty(rounds, count, dtype=torch.int32, device=device)
    filled = torch.empty(rounds, 1, dtype=torch.int32, device=device)
    laid = torch.full((rounds, count * whole.size), pairs, dtype=torch.int32, device=device)
    choose[(rounds,)](
        *(whole.owners, whole.filled, round_of, slot_of, place_of, owners, filled),
        *(count, whole.size, cuts.stride, cuts.tail),
        E=experts,
        EP=triton.next_power_of_2(experts),
        BLOCKS=max(triton.next_power_of_2(count), _BLOCKS),
        num_warps=8,
    )
    share[(count,)](
        *(whole.pairs, whole.owners, whole.filled, round_of, place_of, laid),
        *(count, whole.size, rounds),
        SIZE=_ROWS,
        num_warps=2,
    )
    return [Blocks(whole.size, laid[number], owners[number], filled[number]) for number in range(rounds)]
