"""Planning one layer's step: which experts to load into which slots, in how many kernel calls.

A batch whose distinct experts fit the slots is one wave. Otherwise it is cut:

- *token waves*: consecutive tokens whose union of experts fits. Each token is computed as a whole, so the result
  is bit-identical to one call. An expert may be loaded more than once: right for decode batches.
- *pair waves*: (token, k) pairs by expert, resident ones first, each expert loaded at most once, and the partial
  results of a token are added at the end: right for prefill, and on a GPU, where the sum is stock's, for all.

Which of the two is a matter of the batch's size alone, never of what happens to be resident: a result must not
depend on the cache.

Where bundles can arrive beside the slots while others are computed with, pair waves may *overlap*: the resident experts
are a wave of their own, which waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

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
    """One kernel call: load these experts into these slots, then compute the pairs of `experts` among `tokens`."""

    load_experts: Ints
    """Ascending."""
    load_slots: Ints
    experts: Ints
    """Ascending; those whose pairs this wave computes."""
    slots: Ints
    """The slot of each while this wave runs."""
    tokens: tuple[int, int]
    """First, and one behind the last; the whole batch but in token waves."""
    after: int = -1
    """The last wave that reads a slot which this one loads into; -1 where none does."""

    def slot_of(self, experts: int) -> Ints:
        """[experts + 1] each expert's slot, -1 for those of other waves; the last is of ids of -1."""
        slots = np.full(experts + 1, EMPTY, np.int32)
        slots[self.experts] = self.slots
        return slots


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
    overlap: bool = False,
) -> Plan:
    """Plan a step, and bring `table` to what it will be when the step is done.

    Args:
        ids: [T, k] expert ids of the batch; ids of -1 (padding) are nobody's and belong to no wave.
        table: the layer's page table; changed.
        weights: the victim formula's.
        pair_waves_above: batches of more tokens than this are cut into pair waves, smaller ones into token waves.
        force_pairs: pair waves even where one call would do (to measure the memory that they need).
        overlap: see above; of pair waves alone.

    Returns:
        The waves in order. No pairs at all is one wave without experts.
    """
    needed = table.touch(ids.reshape(-1), weights.heat_decay)
    resident = needed & (table.slot_of != EMPTY)

    by_pairs = force_pairs
    everyone = (0, ids.shape[0])
    if not force_pairs and int(np.count_nonzero(needed)) <= table.slots:
        waves = [_wave(needed, everyone, table, weights)]
    elif force_pairs or ids.shape[0] > pair_waves_above:
        by_pairs = True
        groups = _groups(needed, resident, table.slots, apart=overlap)
        waves = list(_pair_waves(groups, everyone, table, weights))
    else:
        waves = _token_waves(ids, table, weights)
    misses = sum(len(wave.load_experts) for wave in waves)
    return Plan(tuple(_with_readers(waves, table.slots)), by_pairs, int(np.count_nonzero(resident)), misses)


def _wave(group: Bools, tokens: tuple[int, int], table: PageTable, weights: Weights) -> Wave:
    """Make `group` resident."""
    missing = np.flatnonzero(group & (table.slot_of == EMPTY)).astype(np.int32)
    slots = table.victims(len(missing), group, weights) if len(missing) else missing
    if len(missing):
        table.place(missing, slots)
    experts = np.flatnonzero(group).astype(np.int32)
    return Wave(missing, slots, experts, table.slot_of[experts], tokens)


def _groups(needed: Bools, resident: Bools, slots: int, *, apart: bool) -> Iterator[Ints]:
    """As many experts as there are slots, resident ones first; `apart`: and these by themselves."""
    here: Ints = np.flatnonzero(resident).astype(np.int32)
    missing: Ints = np.flatnonzero(needed & ~resident).astype(np.int32)
    rest = missing
    if apart and len(here) and len(missing):
        yield here
    else:
        rest = np.concatenate([here, missing])
    for start in range(0, max(len(rest), 1), slots):
        yield rest[start : start + slots]


def _pair_waves(
    groups: Iterator[Ints], tokens: tuple[int, int], table: PageTable, weights: Weights
) -> Iterator[Wave]:
    for group in groups:
        mine = np.zeros(table.experts, np.bool_)
        mine[group] = True
        yield _wave(mine, tokens, table, weights)


def _token_waves(ids: Ints, table: PageTable, weights: Weights) -> list[Wave]:
    tokens = len(ids)
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
        waves.append(_wave(group, (start, end), table, weights))
        start = end
    return waves


def _with_readers(waves: list[Wave], slots: int) -> Iterator[Wave]:
    """The waves with `after`."""
    reader = np.full(slots, -1)
    for number, wave in enumerate(waves):
        yield replace(wave, after=int(reader[wave.load_slots].max(initial=-1)))
        reader[wave.slots] = number
