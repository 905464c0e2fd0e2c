"""The Triton kernels that lay a batch's pairs in blocks by expert and share the blocks among rounds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _expert_of(ids_p, i, pairs, E: tl.constexpr):
    """E for what is nobody's."""
    expert = tl.load(ids_p + i, mask=i < pairs, other=-1).to(tl.int32)
    return tl.where((expert >= 0) & (expert < E), expert, E)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def rank(ids_p, before_p, counts_p, pairs, chunks, E: tl.constexpr, CHUNK: tl.constexpr):
    """Of each pair, how many of the same expert are before it in its chunk; of each expert, how many a chunk has.

    Args:
        ids_p: the router's. before_p: int32 [pairs]. counts_p: int32 [E, chunks], zero.
    """
    chunk = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    i = chunk * CHUNK + lane
    expert = _expert_of(ids_p, i, pairs, E)
    same = (expert[:, None] == expert[None, :]).to(tl.int32)
    before = tl.sum(tl.where(lane[:, None] > lane[None, :], same, 0), axis=1)
    tl.store(before_p + i, before, mask=i < pairs)
    last = before == tl.sum(same, axis=1) - 1
    tl.store(counts_p + expert * chunks + chunk, before + 1, mask=last & (expert < E))


@triton.jit(do_not_specialize=["chunks"])
def add_up(counts_p, ends_p, chunks, CHUNKS: tl.constexpr):
    """One expert's pairs: how many are in the chunks before each, and in all.

    Args:
        counts_p: int32 [E, chunks], of each chunk; then of those before it. ends_p: int32 [E].
    """
    expert = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    count = tl.load(counts_p + expert * chunks + chunk, mask=chunk < chunks, other=0)
    tl.store(counts_p + expert * chunks + chunk, tl.cumsum(count) - count, mask=chunk < chunks)
    tl.store(ends_p + expert, tl.sum(count))


@triton.jit(do_not_specialize=["pairs", "chunks", "size"])
def lay(
    ids_p,
    before_p,
    counts_p,
    ends_p,
    pairs_p,
    owners_p,
    filled_p,
    pairs,
    chunks,
    size,
    E: tl.constexpr,
    EP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Put each pair of a chunk where it belongs.

    Args:
        before_p, counts_p: see `rank` and `add_up`.
        ends_p: int32 [2, E], of each expert its pairs, and room for where its blocks end.
        pairs_p, owners_p, filled_p: see `Blocks`; the first filled with `pairs`.
        size: rows of a block.
    """
    chunk = tl.program_id(0)
    one = tl.arange(0, EP)
    blocks = (tl.load(ends_p + one, mask=one < E, other=0) + size - 1) // size
    ends = tl.cumsum(blocks)
    # Every program writes the same, and reads what it has written itself.
    tl.store(ends_p + E + one, ends - blocks, mask=one < E)
    tl.debug_barrier()
    tl.store(filled_p, tl.sum(blocks) * size, mask=chunk == 0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _expert_of(ids_p, i, pairs, E)
    there = expert < E
    row = tl.load(before_p + i, mask=there, other=0)
    row += tl.load(counts_p + expert * chunks + chunk, mask=there, other=0)
    block = tl.load(ends_p + E + expert, mask=there, other=0) + row // size
    tl.store(pairs_p + block * size + row % size, i, mask=there)
    tl.store(owners_p + block, expert, mask=there & (row % size == 0))


@triton.jit(do_not_specialize=["count", "size", "stride", "tail"])
def choose(
    owners_p,
    filled_p,
    round_of_p,
    slot_of_p,
    place_of_p,
    chosen_p,
    rows_p,
    count,
    size,
    stride,
    tail,
    E: tl.constexpr,
    EP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The blocks of one round: its own, the batch's tail, and as many others as the stride wants (`marlin_blocks`).

    Args:
        owners_p, filled_p: of the batch. round_of_p, slot_of_p: see `block_rounds.in_rounds`.
        place_of_p: int32 [count], where each block is in its own round.
        chosen_p: int32 [R, count], the slots of each round's blocks; what has no rows computes on any that holds
            something. rows_p: int32 [R], see `Blocks.filled`.
        size: rows of a block. stride, tail: see `Cuts`.
    """
    number = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    used = tl.load(filled_p) // size
    there = block < used
    owner = tl.load(owners_p + block, mask=there, other=E)
    mine = there & (tl.load(round_of_p + owner, mask=there, other=-1) == number)
    front = block < used - tail
    others = (front & (mine == 0)).to(tl.int32)
    in_tail = there & (front == 0)
    wanted = tl.sum(others) % stride
    wanted = tl.where(tl.max((mine & in_tail).to(tl.int32)) > 0, wanted, 0)
    kept = mine | in_tail | ((others > 0) & (tl.cumsum(others) <= wanted))
    place = tl.cumsum(kept.to(tl.int32)) - 1
    slot_of_p += number * (E + 1)
    one = tl.arange(0, EP)
    anywhere = tl.maximum(tl.max(tl.load(slot_of_p + one, mask=one < E, other=-1)), 0)
    slot = tl.where(mine, tl.load(slot_of_p + owner, mask=mine, other=0), anywhere)
    tl.store(chosen_p + number * count + place, slot, mask=kept)
    tl.store(place_of_p + block, place, mask=mine)
    tl.store(rows_p + number, tl.sum(kept.to(tl.int32)) * size)


@triton.jit(do_not_specialize=["count", "size", "rounds"])
def share(
    pairs_p, owners_p, filled_p, round_of_p, place_of_p, laid_p, count, size, rounds, SIZE: tl.constexpr
):
    """Bring one block's rows to its round.

    Args:
        pairs_p: of the batch; the others as for `choose`. laid_p: int32 [R, count * size].
    """
    block = tl.program_id(0)
    if block < tl.load(filled_p) // size:
        number = tl.load(round_of_p + tl.load(owners_p + block))
        if number < rounds:
            row = tl.arange(0, SIZE)
            place = number * count + tl.load(place_of_p + block)
            pair = tl.load(pairs_p + block * size + row, mask=row < size)
            tl.store(laid_p + place * size + row, pair, mask=row < size)
