"""The Triton kernel *fill*: copies bundles into slots, from pinned host memory or from lanes in VRAM."""

from __future__ import annotations

import triton
import triton.language as tl

from vvllm_pager.guess_kernel import ASK, COUNT, EXPERTS, LATE, MESSAGE, OF, ROW, USED, ask

_PATIENCE = tl.constexpr(1000)
"""Looks, of 0.7 us on an H200, for a bundle that was asked for: a courier that is awake has brought it by then."""


# Without variants for lists that begin anywhere in a longer one.
@triton.jit(
    do_not_specialize=["record_words", "tiles", "lane_words", "layer", "top_k", "live"],
    do_not_specialize_on_alignment=["miss_expert_p", "miss_slot_p", "misses_p"],
)
def fill(
    store_p,
    record_words,
    tiles_p,
    tiles,
    miss_expert_p,
    miss_slot_p,
    misses_p,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
    # With lanes: what was asked for ahead, and where it arrives.
    lanes_p=None,
    lane_words=0,
    arrived_p=None,
    asked_p=None,
    counters_p=None,
    box_p=None,
    layer=0,
    # And with NEXT_E, for what is to be asked for now.
    scores_p=None,
    next_slot_of_p=None,
    top_k=0,
    live=0,
    NEXT_E: tl.constexpr = 0,
    NEXT_EP: tl.constexpr = 0,
):
    """Copy bundles into slots.

    Args:
        store_p: int64 words [n, record_words], in pinned host memory or on the device.
        miss_expert_p, miss_slot_p: int32, for each bundle its number among those n and its slot.
        misses_p: int32 [1], how many.
        tiles_p: int64 [tiles, 5], a piece of a record each: address of slot 0's row, bytes from one slot's row to the
            next, offset in the record, bytes (at most 8 TILE), and whether all of these are multiples of 16.
        lanes_p: int64 words [2, ASK, lane_words] on the device, by the parity of the layer: records that a courier
            brings. arrived_p: int32 [2, ASK], the number of the message that was served last.
        asked_p: int32 [2, ROW], by the parity of the layer. counters_p: see `ask`.
        box_p: int64 [ASK + 1] in pinned host memory, the courier's mailbox: once the program that asks has copied its
            share of this layer's bundles, what the next one is guessed to miss is put into it.
        scores_p, next_slot_of_p: see `ask`.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    count = tl.load(misses_p)
    if lanes_p is None:
        for work in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
            expert = tl.load(miss_expert_p + work // tiles).to(tl.int64)
            record_p = store_p + expert * record_words
            _copy(record_p, miss_slot_p + work // tiles, tiles_p + (work % tiles) * 5, TILE)
    else:
        next_p = asked_p + ((layer + 1) % 2) * ROW
        asker = tl.program_id(0) == tl.num_programs(0) - 1
        if asker:
            if NEXT_E > 0:
                ask(next_p, scores_p, next_slot_of_p, counters_p, layer + 1, live, top_k, NEXT_E, NEXT_EP)
            else:
                tl.store(next_p + OF, -1)
        asked_now_p = asked_p + (layer % 2) * ROW
        patience = count * 0 + _PATIENCE  # a tensor, as a loop must carry one
        # First what nobody brings.
        for brought in tl.static_range(2):
            for work in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
                miss = work // tiles
                expert = tl.load(miss_expert_p + miss)
                lane = _lane(asked_now_p, expert, layer)
                if (lane >= 0) == (brought == 1):
                    record = store_p.to(tl.int64) + expert.to(tl.int64) * record_words * 8
                    if brought == 1:
                        at = (layer % 2) * ASK + lane
                        here, patience = _wait_for(tl.load(asked_now_p + MESSAGE), arrived_p + at, patience)
                        in_lane = lanes_p.to(tl.int64) + at.to(tl.int64) * lane_words * 8
                        record = tl.where(here, in_lane, record)
                        tl.atomic_add(counters_p + USED, 1, mask=here & (work % tiles == 0), sem="relaxed")
                        lost = (here == 0) & (work % tiles == 0)
                        tl.atomic_add(counters_p + LATE, 1, mask=lost, sem="relaxed")
                    record_p = record.to(tl.pointer_type(tl.int64))
                    _copy(record_p, miss_slot_p + miss, tiles_p + (work % tiles) * 5, TILE)
        if asker:
            tl.debug_barrier()
            _post(next_p, counters_p, box_p, layer + 1)


@triton.jit
def _copy(record_p, slot_p, tile_p, TILE: tl.constexpr):
    """One tile of a record."""
    w = tl.arange(0, TILE)
    to = tl.load(tile_p) + tl.load(slot_p).to(tl.int64) * tl.load(tile_p + 1)
    offset = tl.load(tile_p + 2)
    nbytes = tl.load(tile_p + 3)
    if tl.load(tile_p + 4) != 0:
        source = tl.multiple_of(record_p + offset // 8, 16)
        target = tl.multiple_of(to.to(tl.pointer_type(tl.int64)), 16)
        words = tl.multiple_of(nbytes // 8, 2)
        tl.store(target + w, tl.load(source + w, mask=w < words), mask=w < words)
    else:
        from_byte = record_p.to(tl.pointer_type(tl.uint8)) + offset
        to_byte = to.to(tl.pointer_type(tl.uint8))
        for at in range(0, nbytes, TILE):
            inside = at + w < nbytes
            tl.store(to_byte + at + w, tl.load(from_byte + at + w, mask=inside), mask=inside)


@triton.jit
def _wait_for(number, arrived_p, patience):
    """Whether the message of this number has been served, and what patience is left."""
    arrived = tl.atomic_add(arrived_p, 0, sem="acquire", scope="sys")
    while (arrived != number) & (patience > 0):
        arrived = tl.atomic_add(arrived_p, 0, sem="acquire", scope="sys")
        patience -= 1
    return arrived == number, patience


@triton.jit
def _lane(row_p, expert, layer):
    """Which of the layer's lanes this expert was asked into; -1 for none."""
    mine = tl.load(row_p + OF) == layer
    count = tl.load(row_p + COUNT)
    lane = -1
    for number in tl.static_range(ASK):
        lane = tl.where(mine & (number < count) & (tl.load(row_p + EXPERTS + number) == expert), number, lane)
    return lane


@triton.jit
def _post(row_p, counters_p, box_p, next_layer):
    """Every word carries the message's number in its upper half, so the reader needs no fence to see what is whole."""
    count = tl.load(row_p + COUNT)
    if (tl.load(row_p + OF) == next_layer) & (count > 0):
        number = tl.load(row_p + MESSAGE).to(tl.int64) << 32
        for place in tl.static_range(ASK):
            wanted = tl.where(place < count, tl.load(row_p + EXPERTS + place) + 1, 0).to(tl.int64)
            tl.store(box_p + place, number | (next_layer.to(tl.int64) << 16) | wanted)
        tl.store(box_p + ASK, number | (tl.load(counters_p + USED).to(tl.int64) & 0xFFFFFFFF))
