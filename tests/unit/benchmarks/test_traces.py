"""The benchmarks' traces hit as often as they were asked to, by the pager's own plan."""

from __future__ import annotations

import pytest
import traces

from vvllm_shared.residency import PageTable, Weights, plan_step


@pytest.mark.parametrize("hit_rate", [0.65, 0.85, 1.0])
@pytest.mark.parametrize("batch", [1, 4])
def test_exact_lru_finds_the_wanted_share(hit_rate: float, batch: int) -> None:
    shape = traces.TraceShape(layers=2, experts=64, slots=24, top_k=4, batch=batch, steps=400)
    trace = traces.synthetic(shape, hit_rate, seed=1)
    assert trace.shape == (2, 400, batch, 4)
    settle = traces.settling_steps(shape)
    hits = misses = 0
    for layer in trace:
        table = PageTable.empty(shape.experts, shape.slots)
        for step, ids in enumerate(layer):
            plan = plan_step(ids, table, Weights(), pair_waves_above=0)
            # Of several waves some would load what another has given up, which would blur the rate.
            assert len(plan.waves) == 1
            if step >= settle:
                hits, misses = hits + plan.hits, misses + plan.misses
    assert hits / (hits + misses) == pytest.approx(hit_rate, abs=0.01)


@pytest.mark.parametrize("predictability", [0.0, 0.8, 1.0])
def test_so_many_of_the_guesses_are_right(predictability: float) -> None:
    trace = traces.synthetic(traces.TraceShape(2, 64, 24, 4, 3, 300), 0.85, seed=1)
    guesses = traces.guesses(trace, 64, predictability, seed=2)
    assert guesses.shape == trace.shape
    right = (guesses[..., :, None] == trace[..., None, :]).any(-1)
    assert right.mean() == pytest.approx(predictability, abs=0.02)
    assert all(len(set(row)) == 4 for row in guesses.reshape(-1, 4).tolist())
