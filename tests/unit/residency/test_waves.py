"""The pure core: whatever the trace, needed experts are resident when they are used, and nothing in use is evicted."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vvllm_shared.residency import EMPTY, PageTable, Weights, plan_step


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, int, int]:
    """(experts, slots, top_k) with top_k <= slots <= experts."""
    experts = draw(st.integers(1, 24))
    slots = draw(st.integers(1, experts))
    return experts, slots, draw(st.integers(1, slots))


def batch(rng: np.random.Generator, experts: int, top_k: int, tokens: int) -> np.ndarray:
    """Distinct experts in each token, as routers give them; some tokens and pairs are padding."""
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    ids[rng.random(tokens) < 0.1] = -1
    ids[rng.random(ids.shape) < 0.05] = -1
    return ids


def run(
    table: PageTable,
    ids: np.ndarray,
    weights: Weights,
    pair_above: int,
    force: bool = False,
    overlap: bool = False,
):
    """Plan a step and replay the plan against a naive model of the slots."""
    contents, top_k = table.expert_in.copy(), ids.shape[1]
    flat = ids.reshape(-1)
    plan = plan_step(ids, table, weights, pair_waves_above=pair_above, force_pairs=force, overlap=overlap)
    seen: list[int] = []
    for number, wave in enumerate(plan.waves):
        reads = {s for earlier in plan.waves[wave.after + 1 : number] for s in earlier.slots.tolist()}
        for expert, slot in zip(wave.load_experts, wave.load_slots, strict=True):
            assert contents[slot] not in wave.experts, "a load overwrote an expert that its own wave needs"
            assert expert not in contents, "an expert was loaded while it was resident"
            assert slot not in reads, "a load need not wait for the last wave that reads its slot"
            contents[slot] = expert
        assert np.array_equal(contents[wave.slots], wave.experts)
        start, end = wave.tokens
        slots = wave.slot_of(table.experts)[flat[start * top_k : end * top_k]]
        seen += (np.flatnonzero(slots >= 0) + start * top_k).tolist()
    assert sorted(seen) == np.flatnonzero(flat >= 0).tolist(), "each pair is computed once"
    assert np.array_equal(contents, table.expert_in)
    table.check()
    return plan


@settings(max_examples=200, deadline=None)
@given(layers(), st.integers(0, 2**32 - 1), st.integers(0, 12))
def test_every_pair_is_computed_once_from_the_slot_that_holds_its_expert(shape, seed, pair_above) -> None:
    experts, slots, top_k = shape
    rng = np.random.default_rng(seed)
    table = PageTable.empty(experts, slots)
    weights = Weights(heat=rng.random(), age=rng.random(), heat_decay=0.9)
    table.bias[:] = rng.normal(size=experts)
    for _ in range(6):
        ids = batch(rng, experts, top_k, int(rng.integers(1, 20)))
        plan = run(table, ids, weights, pair_above, force=bool(rng.random() < 0.2))
        if plan.by_pairs:
            loads = [e for w in plan.waves for e in w.load_experts]
            assert len(loads) == len(set(loads)), "a pair plan loads no expert twice"
        elif len(plan.waves) > 1:
            cuts = [w.tokens[0] for w in plan.waves] + [len(ids)]
            assert [w.tokens for w in plan.waves] == list(pairwise(cuts)), "a token is in one wave"


@settings(max_examples=200, deadline=None)
@given(layers(), st.integers(0, 2**32 - 1))
def test_waves_that_overlap_begin_with_what_is_resident(shape, seed) -> None:
    experts, slots, top_k = shape
    rng = np.random.default_rng(seed)
    table = PageTable.empty(experts, slots)
    for _ in range(6):
        ids = batch(rng, experts, top_k, int(rng.integers(1, 20)))
        needed, before = set(ids[ids >= 0].tolist()), set(table.expert_in[table.expert_in != EMPTY].tolist())
        plan = run(table, ids, Weights(), 0, force=bool(rng.random() < 0.2), overlap=True)
        loads = [e for w in plan.waves for e in w.load_experts]
        assert sorted(loads) == sorted(needed - before), "what is here is not loaded, and nothing twice"
        if not plan.by_pairs:
            assert len(plan.waves) == 1, "what fits is one wave"
            continue
        for number, wave in enumerate(plan.waves):
            assert len(wave.load_experts) in {0, len(wave.experts)}
            assert len(wave.load_experts) > 0 or number == 0, "the resident experts come first"
        missing = len(needed - before)
        assert len(plan.waves) <= 1 + -(-missing // slots), "and the others in as few waves as there can be"


@settings(max_examples=100, deadline=None)
@given(layers(), st.integers(0, 2**32 - 1))
def test_default_weights_are_exact_lru(shape, seed) -> None:
    experts, slots, top_k = shape
    rng = np.random.default_rng(seed)
    table = PageTable.empty(experts, slots)
    order: list[int] = []
    for _ in range(30):
        ids = rng.permutation(experts)[:top_k].astype(np.int32).reshape(1, -1)
        resident = set(table.expert_in[table.expert_in != EMPTY].tolist())
        plan = run(table, ids, Weights(), pair_above=8)
        assert plan.hits == len(resident & set(ids[0].tolist()))
        assert plan.misses == top_k - plan.hits
        order = [e for e in order if e not in ids] + ids[0].tolist()
        assert set(table.expert_in[table.expert_in != EMPTY].tolist()) == set(order[-slots:])


def test_cyclic_scan_one_longer_than_the_slots_never_hits() -> None:
    table = PageTable.empty(9, 8)
    for step in range(90):
        ids = np.array([[step % 9]], np.int32)
        assert run(table, ids, Weights(), pair_above=8).hits == 0


def test_bias_keeps_what_lru_would_evict() -> None:
    table = PageTable.empty(4, 2)
    table.bias[0] = 1e6
    for expert in (0, 1, 2, 3):
        run(table, np.array([[expert]], np.int32), Weights(), pair_above=8)
    assert set(table.expert_in) == {0, 3}


def test_heat_keeps_the_frequent_expert() -> None:
    table = PageTable.empty(4, 2)
    for expert in (0, 0, 0, 1, 2, 3):
        run(table, np.array([[expert]], np.int32), Weights(heat=10.0), pair_above=8)
    assert 0 in table.expert_in


def test_padding_neither_loads_nor_counts() -> None:
    table = PageTable.empty(4, 2)
    plan = run(table, np.full((5, 2), -1, np.int32), Weights(), pair_above=8)
    assert (plan.hits, plan.misses, len(plan.waves)) == (0, 0, 1)
    assert not table.heat.any()
    assert table.step == 0


@pytest.mark.parametrize("tokens", [8, 9])
def test_the_kind_of_wave_depends_on_the_number_of_tokens_alone(tokens: int) -> None:
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(16)[:2] for _ in range(tokens)]).astype(np.int32)
    cold, warm = PageTable.empty(16, 4), PageTable.empty(16, 4)
    warm.place(np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32))
    kinds = {run(t, ids, Weights(), pair_above=8).by_pairs for t in (cold, warm)}
    assert kinds == {tokens > 8}


def test_victims_refuse_to_evict_what_is_needed() -> None:
    table = PageTable.empty(4, 2)
    table.place(np.array([0, 1], np.int32), np.array([0, 1], np.int32))
    with pytest.raises(AssertionError, match="victims wanted"):
        table.victims(1, np.array([True, True, False, False]), Weights())


def test_check_finds_a_table_that_contradicts_itself() -> None:
    table = PageTable.empty(4, 2)
    table.place(np.array([3], np.int32), np.array([1], np.int32))
    table.slot_of[3] = 0
    with pytest.raises(AssertionError, match="slot 1 holds expert 3"):
        table.check()
