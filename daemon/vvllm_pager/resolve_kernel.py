"""The Triton kernel *resolve*: plans one round of a layer's step, inside the captured decode step.

No Python, no synchronisation, fixed addresses. What it does is `vvllm_shared.residency.plan_step` with pair waves that
do not overlap, by the same table and the same victim formula.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vvllm_pager.guess_kernel import score


# Without a variant for every layer's number: one compilation serves all layers and rounds of a size.
@triton.jit(do_not_specialize=["N", "top_k", "round_", "live", "layer", "phase"])
def resolve(
    # What the router chose: ids [N] int32 or int64, and the mask of rows that are nobody's, [N / top_k] bytes.
    ids_p,
    padding_p,
    # The layer's page table, see `DeviceTable`; `last_used` as the bits of its float64.
    last_used_p,
    heat_p,
    bias_p,
    weights_p,
    clock_p,
    counted_p,
    slot_of_p,
    expert_in_p,
    # Scratch of one step, int32: [E] each expert's place in the order of rounds, [S] victims, [2 E] for alignment.
    order_p,
    victims_p,
    aligned_p,
    # Out: the misses of this round, and each pair's slot [N] or -1 where it is not of this round.
    miss_expert_p,
    miss_slot_p,
    misses_p,
    slots_p,
    # Out, with BLOCK: the pairs sorted by expert in blocks, each block's slot, and how much of that is filled.
    sorted_p,
    block_slot_p,
    filled_p,
    # The ring in pinned memory, and how many entries were ever written, on the device.
    ring_p,
    ring_head_p,
    N,
    top_k,
    round_,
    live,
    layer,
    phase,
    E: tl.constexpr,
    S: tl.constexpr,
    EP: tl.constexpr,
    SP: tl.constexpr,
    NP: tl.constexpr,
    ROUNDS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    RING_IDS: tl.constexpr,
    EARLY: tl.constexpr,
    # With H, for a guess at what the next layer will miss; see `score`.
    x_p=None,
    gate_p=None,
    correction_p=None,
    scores_p=None,
    H: tl.constexpr = 0,
):
    """Make the experts of round `round_` resident in the table; one program, and with H one for each expert of the next
    layer behind it, which have nothing to do with that.

    EP, SP and NP are E, S and N rounded up to powers of two. ROUNDS is how many rounds the batch may need; the
    experts that are resident come in the first. `live` is 0 in vLLM's own warm-up runs, which leave no statistics.
    EARLY: the launch is a programmatic dependent one, and so is *fill*'s: each starts while the kernel before it ends,
    and waits until that has ended and its writes can be seen.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if H > 0:  # noqa: SIM102  # the outer one is Triton's to decide, when it compiles
        if tl.program_id(0) > 0:
            expert = tl.program_id(0) - 1
            score(x_p, padding_p, gate_p, correction_p, scores_p, expert, N // top_k, H, MASKED)
            return
    i = tl.arange(0, NP)
    e = tl.arange(0, EP)
    # All that a step without misses reads is asked for at once: since the last step the table has left the caches.
    routed = tl.load(ids_p + i, mask=i < N, other=-1).to(tl.int32)
    slot = tl.load(slot_of_p + e, mask=e < E, other=-1)
    counted_p += phase * 3
    heat = tl.load(heat_p + e, mask=e < E, other=0.0)
    decay = tl.load(weights_p + 2)
    clock = tl.load(clock_p) + 1.0
    all_hits = tl.load(counted_p)
    all_misses = tl.load(counted_p + 1)
    all_waves = tl.load(counted_p + 2)
    head = tl.load(ring_head_p)
    routed = tl.where((routed >= 0) & (routed < E), routed, -1)
    ids = routed
    if MASKED:
        nobody = tl.load(padding_p + i // top_k, mask=i < N, other=1)
        ids = tl.where(nobody != 0, -1, routed)
    used = ids >= 0
    pair_slot = tl.load(slot_of_p + ids, mask=used, other=-1)
    needed = tl.histogram(tl.where(used, ids, 0), EP, mask=used) > 0

    group = needed
    if ROUNDS > 1:
        order = _order(needed, slot, order_p, round_, E, EP)
        group = (order >= round_ * S) & (order < (round_ + 1) * S)
    if (round_ == 0) & (live != 0):
        # fmt: off
        _note(ids, used, needed, slot, heat * decay, clock, all_hits, all_misses, all_waves, head, last_used_p, heat_p,
              clock_p, counted_p, ring_p, ring_head_p, N, top_k, layer, phase, E, S, EP, NP, ENTRIES, RING_IDS)
        # fmt: on
    lacking = group & (slot < 0)
    count = tl.sum(lacking.to(tl.int32), 0)
    tl.store(misses_p, count)
    if count > 0:
        tl.debug_barrier()
        # fmt: off
        _choose(count, group, slot, last_used_p, heat_p, bias_p, weights_p, expert_in_p, victims_p, E, S, EP, SP)
        slot = _place(lacking, slot, slot_of_p, expert_in_p, victims_p, miss_expert_p, miss_slot_p, EP)
        # fmt: on
        pair_slot = tl.load(slot_of_p + ids, mask=used, other=-1)

    if ROUNDS > 1:
        tl.debug_barrier()
        place = tl.load(order_p + ids, mask=used, other=-1)
        mine = (place >= round_ * S) & (place < (round_ + 1) * S)
        pair_slot = tl.where(mine, pair_slot, -1)
    tl.store(slots_p + i, pair_slot, mask=i < N)
    if BLOCK > 0:
        _align(routed, group, slot, aligned_p, sorted_p, block_slot_p, filled_p, N, E, EP, SP, NP, BLOCK)


@triton.jit
def _note(
    ids,
    used,
    needed,
    slot,
    # As they were: [EP] decayed, and scalars.
    heat,
    clock,
    all_hits,
    all_misses,
    all_waves,
    head,
    last_used_p,
    heat_p,
    clock_p,
    counted_p,
    ring_p,
    ring_head_p,
    N,
    top_k,
    layer,
    phase,
    E: tl.constexpr,
    S: tl.constexpr,
    EP: tl.constexpr,
    NP: tl.constexpr,
    ENTRIES: tl.constexpr,
    RING_IDS: tl.constexpr,
):
    """The step's statistics: recency, heat, the clock, the counters, and an entry of the ring. None for nobody."""
    hits = tl.sum((needed & (slot >= 0)).to(tl.int32), 0)
    misses = tl.sum((needed & (slot < 0)).to(tl.int32), 0)
    if hits + misses > 0:
        i = tl.arange(0, NP)
        e = tl.arange(0, EP)
        all_hits += hits
        all_misses += misses
        all_waves += (hits + misses - 1) // S
        # Every warp has loaded these scalars for itself, and one of them stores the next ones.
        tl.debug_barrier()
        tl.store(clock_p, clock)
        tl.store(counted_p, all_hits)
        tl.store(counted_p + 1, all_misses)
        tl.store(counted_p + 2, all_waves)
        tl.store(ring_head_p, head + 1)
        # Recency is the step and, within it, the position of the last occurrence.
        stamp = clock + (i + 1).to(tl.float64) / (N + 1)
        # Relaxed: a release would wait for every store before it, and the barriers order what is read again here.
        tl.atomic_max(last_used_p + ids, stamp.to(tl.int64, bitcast=True), mask=used, sem="relaxed")
        tl.store(heat_p + e, heat + needed.to(tl.float64), mask=e < E)
        entry_p = ring_p + (head % ENTRIES) * (16 + RING_IDS)
        # Every word carries the ring's lap in its upper half: the reader needs no fence to see what is whole.
        lap = ((head // ENTRIES) % 32767 + 1).to(tl.int32) << 16
        _record(entry_p, lap, clock, all_hits, all_misses, all_waves, N // top_k, top_k, layer, phase)
        tl.store(entry_p + 16 + i, lap | (ids & 0xFFFF), mask=(i < N) & (i < RING_IDS))


@triton.jit
def _place(lacking, slot, slot_of_p, expert_in_p, victims_p, miss_expert_p, miss_slot_p, EP: tl.constexpr):
    """Give the lacking experts the chosen slots, in the table and in the list of misses; returns [EP] slots."""
    e = tl.arange(0, EP)
    tl.debug_barrier()
    rank = tl.cumsum(lacking.to(tl.int32), 0) - 1
    given = tl.load(victims_p + rank, mask=lacking, other=0)
    evicted = tl.load(expert_in_p + given, mask=lacking, other=-1)
    tl.store(slot_of_p + evicted, -1, mask=lacking & (evicted >= 0))
    tl.debug_barrier()
    tl.store(slot_of_p + e, given, mask=lacking)
    tl.store(expert_in_p + given, e, mask=lacking)
    tl.store(miss_expert_p + rank, e, mask=lacking)
    tl.store(miss_slot_p + rank, given, mask=lacking)
    tl.debug_barrier()
    return tl.where(lacking, given, slot)


@triton.jit
def _order(needed, slot, order_p, round_, E: tl.constexpr, EP: tl.constexpr):
    """[EP] each needed expert's place in the order of rounds: the resident ones, then the others; else -1."""
    e = tl.arange(0, EP)
    order = tl.zeros([EP], tl.int32)
    if round_ == 0:
        first = (needed & (slot >= 0)).to(tl.int32)
        then = (needed & (slot < 0)).to(tl.int32)
        order = tl.where(slot >= 0, tl.cumsum(first, 0) - 1, tl.sum(first, 0) + tl.cumsum(then, 0) - 1)
        order = tl.where(needed, order, -1)
        tl.store(order_p + e, order, mask=e < E)
    else:
        order = tl.load(order_p + e, mask=e < E, other=-1)
    return order


@triton.jit
def _choose(
    count,
    group,
    slot,
    last_used_p,
    heat_p,
    bias_p,
    weights_p,
    expert_in_p,
    victims_p,
    E: tl.constexpr,
    S: tl.constexpr,
    EP: tl.constexpr,
    SP: tl.constexpr,
):
    """Write `count` victims: empty slots first, then the lowest score among experts that this round does not need;
    ties by slot."""
    e = tl.arange(0, EP)
    s = tl.arange(0, SP)
    empty = tl.load(expert_in_p + s, mask=s < S, other=0) < 0
    score = tl.load(bias_p + e, mask=e < E, other=0.0)
    score += tl.load(weights_p) * tl.load(heat_p + e, mask=e < E, other=0.0)
    recency = tl.load(last_used_p + e, mask=e < E, other=0).to(tl.float64, bitcast=True)
    score += tl.load(weights_p + 1) * recency
    score = tl.where((slot >= 0) & (group == 0), score, float("inf"))
    for number in range(count):
        free = tl.min(tl.where(empty, s, SP), 0)
        lowest = tl.min(score, 0)
        owned = tl.min(tl.where((score == lowest) & (slot >= 0), slot, SP), 0)
        victim = tl.where(free < SP, free, owned)
        tl.store(victims_p + number, victim)
        empty = empty & (s != victim)
        score = tl.where(slot == victim, float("inf"), score)


@triton.jit
def _record(entry_p, lap, clock, hits, misses, waves, tokens, top_k, layer, phase):
    """Write the header of the ring's next entry; see `vvllm_pager.ring` for its words."""
    j = tl.arange(0, 16)
    long = tl.where(j < 7, clock.to(tl.int64), hits)
    long = tl.where(j < 10, long, misses)
    long = tl.where(j < 13, long, waves)
    word = ((long >> (((j + 2) % 3) * 16)) & 0xFFFF).to(tl.int32)
    word = tl.where(j == 0, layer, word)
    word = tl.where(j == 1, tokens, word)
    word = tl.where(j == 2, top_k, word)
    word = tl.where(j == 3, phase, word)
    tl.store(entry_p + j, lap | word)


@triton.jit
def _align(
    routed,
    group,
    slot,
    aligned_p,
    sorted_p,
    block_slot_p,
    filled_p,
    N,
    E: tl.constexpr,
    EP: tl.constexpr,
    SP: tl.constexpr,
    NP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lay the blocks as vLLM's moe_align_block_size lays them for all E experts, whoever's the rows are: where a
    block lies decides how Marlin cuts its sums. Blocks of other rounds compute on any loaded slot."""
    i = tl.arange(0, NP)
    e = tl.arange(0, EP)
    valid = routed >= 0
    uses = tl.histogram(tl.where(valid, routed, 0), EP, mask=valid)
    blocks = (uses + BLOCK - 1) // BLOCK
    start = tl.cumsum(blocks, 0) - blocks
    total = tl.sum(blocks, 0)
    any_slot = tl.min(tl.where(group, slot, SP), 0)
    block_slot = tl.where(group, slot, any_slot % SP)
    for number in range(tl.max(blocks, 0)):
        tl.store(block_slot_p + start + number, block_slot, mask=number < blocks)
    tl.store(filled_p, tl.where(any_slot == SP, 0, total * BLOCK))
    for at in range(0, total * BLOCK, NP):
        tl.store(sorted_p + at + i, N, mask=at + i < total * BLOCK)
    tl.store(aligned_p + e, start, mask=e < E)
    tl.store(aligned_p + E + e, 0, mask=e < E)
    tl.debug_barrier()
    place = tl.load(aligned_p + routed, mask=valid, other=0) * BLOCK
    place += tl.atomic_add(aligned_p + E + routed, 1, mask=valid, sem="relaxed")
    tl.store(sorted_p + place, i, mask=valid)
