"""The Triton kernel *fill*: copies bundles into slots, from pinned host memory or from lanes in VRAM."""

from __future__ import annotations

import triton
import triton.language as tl


# Without variants for lists that begin anywhere in a longer one.
@triton.jit(
    do_not_specialize=["record_words", "tiles"],
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
):
    """Copy bundles into slots.

    Args:
        store_p: int64 words [n, record_words], in pinned host memory or on the device.
        miss_expert_p, miss_slot_p: int32, for each bundle its number among those n and its slot.
        misses_p: int32 [1], how many.
        tiles_p: int64 [tiles, 5], a piece of a record each: address of slot 0's row, bytes from one slot's row to the
            next, offset in the record, bytes (at most 8 TILE), and whether all of these are multiples of 16.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    count = tl.load(misses_p)
    w = tl.arange(0, TILE)
    for work in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
        miss = work // tiles
        tile_p = tiles_p + (work % tiles) * 5
        expert = tl.load(miss_expert_p + miss).to(tl.int64)
        slot = tl.load(miss_slot_p + miss).to(tl.int64)
        to = tl.load(tile_p) + slot * tl.load(tile_p + 1)
        offset = tl.load(tile_p + 2)
        nbytes = tl.load(tile_p + 3)
        if tl.load(tile_p + 4) != 0:
            source = tl.multiple_of(store_p + expert * record_words + offset // 8, 16)
            target = tl.multiple_of(to.to(tl.pointer_type(tl.int64)), 16)
            words = tl.multiple_of(nbytes // 8, 2)
            tl.store(target + w, tl.load(source + w, mask=w < words), mask=w < words)
        else:
            from_byte = store_p.to(tl.pointer_type(tl.uint8)) + expert * record_words * 8 + offset
            to_byte = to.to(tl.pointer_type(tl.uint8))
            for at in range(0, nbytes, TILE):
                inside = at + w < nbytes
                tl.store(to_byte + at + w, tl.load(from_byte + at + w, mask=inside), mask=inside)
