"""Tests of the benchmarks' router, in Triton's interpreter; see `unit/benchmarks/test_router.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import traces
from router import TracePlayer

LAYERS, EXPERTS, TOP_K, HIDDEN = 3, 16, 4, 24


def routed(player: TracePlayer, tokens: int) -> list[np.ndarray]:
    """Of each layer, the ids of a step."""
    x = torch.zeros(tokens, 8)
    return [player.route_tokens(x, x, TOP_K)[1].numpy() for _ in range(LAYERS)]


def test_a_batch_of_the_traces_size_plays_it_again_and_again() -> None:
    player = TracePlayer(LAYERS, EXPERTS, TOP_K, HIDDEN, 1000, "cpu")
    trace = np.random.default_rng(0).integers(0, EXPERTS, (LAYERS, 3, 2, TOP_K), dtype=np.int32)
    player.play(trace)
    for step in range(5):
        for layer, ids in enumerate(routed(player, 2)):
            assert (ids == trace[layer, step % 3]).all()
    assert player.position() == 5


def test_the_scores_of_a_layer_are_the_guess_at_the_next() -> None:
    player = TracePlayer(LAYERS, EXPERTS, TOP_K, HIDDEN, 1000, "cpu")
    rng = np.random.default_rng(0)
    trace = traces.synthetic(traces.TraceShape(LAYERS, EXPERTS, 12, TOP_K, 2, 3), 0.5, 0)
    guesses = traces.guesses(trace, EXPERTS, 0.5, 1)
    player.play(trace, guesses)
    x = torch.from_numpy(rng.normal(size=(2, HIDDEN))).float()
    for step in range(3):
        for layer in range(LAYERS):
            player.route_tokens(x, x, TOP_K)
            if layer + 1 < LAYERS:
                said = (player.scores[:2] @ player.gate.T).argsort(dim=1, descending=True)[:, :TOP_K]
                assert (said.numpy() == guesses[layer + 1, step]).all()


def test_a_larger_batch_is_routed_at_random() -> None:
    player = TracePlayer(LAYERS, EXPERTS, TOP_K, HIDDEN, 1000, "cpu")
    player.play(np.zeros((LAYERS, 3, 1, TOP_K), np.int32))
    steps = [routed(player, 200) for _ in range(2)]
    for ids in [*steps[0], *steps[1]]:
        assert all(len(set(row)) == TOP_K for row in ids.tolist())
        counts = np.bincount(ids.reshape(-1), minlength=EXPERTS)
        assert len(counts) == EXPERTS
        assert counts.min() > 20
    assert not (steps[0][0] == steps[0][1]).all()
    assert not (steps[0][0] == steps[1][0]).all()
