"""Parts of the Triton kernels *resolve* and *fill*: a guess at what the next layer will miss, by this layer's input.

The residual stream changes little from layer to layer, so the next layer's gate is asked about this layer's input
(Fate, arXiv:2502.12224). A guess changes what travels early, never a result. *resolve* computes the scores, in programs
beside its own; *fill* chooses, in one of its programs: neither makes a kernel longer that misses nothing by more than
a microsecond.
"""

from __future__ import annotations

import triton
import triton.language as tl

ASK = tl.constexpr(2)
"""Bundles that are asked for ahead at most: what a link moves while a layer is computed."""
OF, MESSAGE, COUNT, EXPERTS = map(tl.constexpr, range(4))
ROW = tl.constexpr(3 + ASK.value)
"""int32 words of what is asked for a layer: the layer, the message's number, how many, and their experts."""
NUMBER, USED, ENABLED, LATE = map(tl.constexpr, range(4))
"""Of the counters, int32: messages so far, bundles that came from lanes, whether anything is to be asked for, and how
often a program of *fill* lost its patience in the courier's present window of bundles."""
_TOO_LATE = tl.constexpr(64)
"""From so many on nothing is asked for: the courier gets no time to run."""
_LAST = tl.constexpr(2**31 - 1)
"""A place behind all."""
_RANKED = tl.constexpr(64)
"""Scores that all others are held against at a time."""


@triton.jit
def score(
    x_p,
    padding_p,
    gate_p,
    correction_p,
    scores_p,
    expert,
    tokens,
    H: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Write down the highest score that a token of somebody's gives an expert of the next layer.

    Args:
        x_p: [tokens, H]. gate_p: [E, H], the next layer's. correction_p: [E] or None, added to the sigmoid.
        scores_p: float32 [E].
    """
    WIDTH: tl.constexpr = 2048
    h = tl.arange(0, WIDTH)
    best = float("-inf")
    for token in range(tokens):
        total = tl.zeros([WIDTH], tl.float32)
        for at in range(0, H, WIDTH):
            inside = at + h < H
            x = tl.load(x_p + token * H + at + h, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(gate_p + expert * H + at + h, mask=inside, other=0.0).to(tl.float32)
            total += x * gate
        mine = tl.sum(total, 0)
        if correction_p is not None:
            mine = tl.sigmoid(mine) + tl.load(correction_p + expert).to(tl.float32)
        if MASKED:
            mine = tl.where(tl.load(padding_p + token) != 0, float("-inf"), mine)
        best = tl.maximum(best, mine)
    tl.store(scores_p + expert, best)


@triton.jit
def ask(
    row_p, scores_p, next_slot_of_p, counters_p, next_layer, live, top_k, E: tl.constexpr, EP: tl.constexpr
):
    """Write down the best ASK of those among the `top_k` best experts that have no slot; none where `live` or ENABLED
    is 0, or nobody brings them in time.

    Args:
        row_p: int32 [ROW]. next_slot_of_p: int32 [E], the next layer's page table. counters_p: int32 [4].
    """
    e = tl.arange(0, EP)
    scores = tl.load(scores_p + e, mask=e < E, other=float("-inf"))
    slot = tl.load(next_slot_of_p + e, mask=e < E, other=0)
    wanted = (live != 0) & (tl.load(counters_p + ENABLED) != 0) & (tl.load(counters_p + LATE) < _TOO_LATE)
    number = tl.load(counters_p + NUMBER)
    rank = tl.zeros([EP], tl.int32)
    for at in tl.static_range(0, EP, _RANKED):
        f = at + tl.arange(0, _RANKED)
        other = tl.load(scores_p + f, mask=f < E, other=float("-inf"))[None, :]
        ahead = (other > scores[:, None]) | ((other == scores[:, None]) & (f[None, :] < e[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
    # The best come first; who has a slot, or is no token's choice, is behind all.
    chosen = wanted & (rank < top_k) & (slot < 0) & (scores > float("-inf"))
    place = tl.where(chosen, rank * EP + e, _LAST)
    count = 0
    for at in tl.static_range(ASK):
        first = tl.min(place, 0)
        found = first < _LAST
        tl.store(row_p + EXPERTS + at, first % EP, mask=found)
        count += found.to(tl.int32)
        place = tl.where(place == first, _LAST, place)
    # Not 0, which is what nobody's lane says.
    following = tl.where(number == -1, 1, number + 1)
    number = tl.where(count > 0, following, number)
    tl.store(counters_p + NUMBER, number)
    tl.store(row_p + OF, next_layer)
    tl.store(row_p + MESSAGE, number)
    tl.store(row_p + COUNT, count)
