"""Synthetic router traces with a chosen hit rate, and what exact LRU makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Trace = NDArray[np.int32]
"""[layers, steps, batch, top_k] expert ids; the ids of a token are distinct."""


MOST_GUESSED = 16
"""Tokens of a batch that the pager guesses for (`vvllm_pager.foresight`)."""


@dataclass(frozen=True)
class TraceShape:
    """The layers that a trace is for, and its length."""

    layers: int
    experts: int
    slots: int
    top_k: int
    batch: int
    steps: int


def settling_steps(shape: TraceShape) -> int:
    """Steps after which LRU holds what the trace's generator held, whatever it held before.

    Where all hits come from the same `slots` experts, one of them is untouched for n steps with probability
    (1 - top_k / slots)^n; n = 16 slots / top_k makes that e^-16.
    """
    return max(64, -(-16 * shape.slots // shape.top_k))


def synthetic(shape: TraceShape, hit_rate: float, seed: int) -> Trace:
    """A trace of which exact LRU with `slots` slots a layer finds the share `hit_rate` of a step's experts.

    Each token draws its experts from those resident when the step begins; then as many distinct experts of the step
    as shall miss, in all layers independently, are renamed into ones that are not resident. How many follows the hit
    rate: about as scattered as if each expert missed by itself, but steered, so that the mean is met. A step thus never
    has more distinct experts than slots.

    Args:
        hit_rate: hits by (hits + misses), both counted per distinct expert of a step; in [0, 1].
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    layers, experts, slots = shape.layers, shape.experts, shape.slots
    pairs = shape.batch * shape.top_k
    trace = np.empty((layers, shape.steps, pairs), np.int32)
    rows = np.arange(layers)[:, None]
    stamp = np.full((layers, experts), -np.inf)
    stamp[rows, rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)[:, :slots]] = (
        np.arange(slots) / slots
    )
    wanted, given = np.zeros(layers), np.zeros(layers)
    for step in range(shape.steps):
        # LRU holds the `slots` experts that were used last.
        resident = np.zeros((layers, experts), np.bool_)
        np.put_along_axis(resident, np.argpartition(-stamp, slots - 1, axis=1)[:, :slots], True, axis=1)
        drawn = np.concatenate([_first(rng, resident, shape.top_k) for _ in range(shape.batch)], axis=1)
        used = np.zeros((layers, experts), np.bool_)
        np.put_along_axis(used, drawn, True, axis=1)
        distinct = used.sum(axis=1)
        wanted += distinct * (1 - hit_rate)
        scatter = rng.normal(size=layers) * np.sqrt(distinct * hit_rate * (1 - hit_rate))
        most = np.minimum(distinct, experts - slots)
        misses = np.clip(np.rint(wanted + scatter - given), 0, most).astype(np.int64)
        given += misses
        ids = np.take_along_axis(_renaming(rng, used, resident, misses), drawn, axis=1)
        trace[:, step] = ids
        stamp[rows, ids] = step + 1 + np.arange(pairs) / pairs  # of repeats the last one counts
    return trace.reshape(layers, shape.steps, shape.batch, shape.top_k)


def guesses(trace: Trace, experts: int, predictability: float, seed: int) -> Trace:
    """What a guess at each step's experts says: a list of the same length, in random order.

    Args:
        predictability: the share of the ids that are right; the others are random experts that the step does not use.
    """
    rng = np.random.default_rng(seed)
    layers, steps, _, top_k = trace.shape
    drawn = trace.reshape(layers, steps, -1)
    used = np.zeros((layers, steps, experts), np.bool_)
    np.put_along_axis(used, drawn, True, axis=2)
    keys = np.where(used, np.inf, rng.random(used.shape))
    others = np.argsort(keys, axis=2)[:, :, :top_k].astype(np.int32)
    wrong = np.broadcast_to(others[:, :, None, :], trace.shape)
    guessed = np.where(rng.random(trace.shape) < predictability, trace, wrong)
    return rng.permuted(guessed, axis=3)


def _first(rng: np.random.Generator, among: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """[layers, count] distinct random members of each row's set."""
    keys = np.where(among, rng.random(among.shape), np.inf)
    return np.argsort(keys, axis=1)[:, :count]


def _renaming(
    rng: np.random.Generator,
    used: NDArray[np.bool_],
    resident: NDArray[np.bool_],
    misses: NDArray[np.int64],
) -> NDArray[np.int64]:
    """[layers, experts]: in each layer `misses` of the used experts become ones that are not resident."""
    layers, experts = used.shape
    names = np.tile(np.arange(experts), (layers, 1))
    most = int(misses.max())
    leaving, coming = _first(rng, used, most), _first(rng, ~resident, most)
    for place in range(most):
        layer = np.flatnonzero(misses > place)
        names[layer, leaving[layer, place]] = coming[layer, place]
    return names
