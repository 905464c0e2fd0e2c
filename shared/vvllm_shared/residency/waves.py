"""Planning one layer's step: which experts to load into which slots, in how many kernel calls.

A batch whose distinct experts fit the slots is one wave. Otherwise it is cut:

- *token waves*: consecutive tokens whose union of experts fits. Each token is computed as a whole, so the result
  is bit-identical to one call. An expert may be loaded more than once: right for decode batches.
- *pair waves*: (token, k) pairs by expert, resident ones first, each expert loaded at most once, and the partial
  results of a token are added at the end: right for prefill, and on a GPU, where the sum is stock's, for all.

Which of the two is a matter of the batch's size alone, never of what happens to be resident: a result must not
depend on the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vvllm_shared.residency.page_table import EMPTY, Bools, Ints, PageTable, Weights

MAX_ROUNDS = 4
"""Pair waves that a device-driven step has at most: each is a kernel call in the captured graph, needed or not."""


def most_tokens(slots: int, top_k: int) -> int:
    """The largest batch that a device-driven step serves: at most `MAX_ROUNDS` waves, whatever is routed where."""
    return MAX_ROUNDS * slots // top_k


def graph_sizes(most: int) -> list[int]:
    """Numbers of tokens to capture CUDA graphs for: powers of two below `most`, and `most`. Batches in between are
    padded to the next."""
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]


@dataclass(frozen=True)
class Wave:
    """One kernel call: load these experts into these slots, then compute these pairs."""

    load_experts: Ints
    load_slots: Ints
    pairs: NDArray[np.int64]
    """Indices into the flattened [T * k] ids of the pairs of this wave, ascending."""
    slot_ids: Ints
    """[len(pairs)] the slot of each pair's expert while this wave runs."""


@dataclass(frozen=True)
class Plan:
    """What a step of one layer does."""

    waves: tuple[Wave, ...]
    by_pairs: bool
    """Whether the waves are pair waves."""
    hits: int
    """Distinct experts that were resident when the step began."""
    misses: int
    """Bundles to load, repeats in later token waves included."""


def plan_step(
    ids: Ints,
    table: PageTable,
    weights: Weights,
    *,
    pair_waves_above: int,
    force_pairs: bool = False,
) -> Plan:
    """Plan a step, and bring `table` to what it will be when the step is done.

    Args:
        ids: [T, k] expert ids of the batch; negative ids (padding) are nobody's and belong to no wave.
        table: the layer's page table; changed.
        weights: the victim formula's.
        pair_waves_above: batches of more tokens than this are cut into pair waves, smaller ones into token waves.
        force_pairs: pair waves even where one call would do (to measure the memory that they need).

    Returns:
        The waves in order. No pairs at all is one wave without pairs.
    """
    flat = ids.reshape(-1)
    valid = np.flatnonzero(flat >= 0)
    used = flat[valid]
    needed = np.zeros(table.experts, np.bool_)
    needed[used] = True
    hits = int(np.count_nonzero(needed & (table.slot_of != EMPTY)))
    table.touch(flat, weights.heat_decay)

    by_pairs = force_pairs
    if not force_pairs and int(np.count_nonzero(needed)) <= table.slots:
        waves = [_wave(valid, used, needed, table, weights)]
    elif force_pairs or ids.shape[0] > pair_waves_above:
        by_pairs = True
        waves = _pair_waves(valid, used, needed, table, weights)
    else:
        waves = _token_waves(ids, table, weights)
    return Plan(tuple(waves), by_pairs, hits, sum(len(w.load_experts) for w in waves))


def _wave(pairs: NDArray[np.int64], used: Ints, needed: Bools, table: PageTable, weights: Weights) -> Wave:
    """Make `needed` resident, evicting none of it, and map each pair to its slot."""
    missing = np.flatnonzero(needed & (table.slot_of == EMPTY)).astype(np.int32)
    slots = table.victims(len(missing), needed, weights) if len(missing) else missing
    if len(missing):
        table.place(missing, slots)
    return Wave(missing, slots, pairs, table.slot_of[used])


def _pair_waves(
    valid: NDArray[np.int64], used: Ints, needed: Bools, table: PageTable, weights: Weights
) -> list[Wave]:
    resident = np.flatnonzero(needed & (table.slot_of != EMPTY))
    missing = np.flatnonzero(needed & (table.slot_of == EMPTY))
    order = np.concatenate([resident, missing])
    waves = []
    for start in range(0, max(len(order), 1), table.slots):
        group = np.zeros(table.experts, np.bool_)
        group[order[start : start + table.slots]] = True
        mine = group[used]
        waves.append(_wave(valid[mine], used[mine], group, table, weights))
    return waves


def _token_waves(ids: Ints, table: PageTable, weights: Weights) -> list[Wave]:
    tokens, top_k = ids.shape
    waves = []
    start = 0
    while start < tokens:
        group = np.zeros(table.experts, np.bool_)
        end = start
        while end < tokens:
            grown = group.copy()
            grown[ids[end][ids[end] >= 0]] = True
            if int(np.count_nonzero(grown)) > table.slots:
                break
            group, end = grown, end + 1
        # top_k <= slots is checked where the slots are sized, so every token fits by itself.
        assert end > start, f"one token needs more than {table.slots} slots"  # noqa: S101
        pairs = np.arange(start * top_k, end * top_k, dtype=np.int64)
        used = ids[start:end].reshape(-1)
        waves.append(_wave(pairs[used >= 0], used[used >= 0], group, table, weights))
        start = end
    return waves
