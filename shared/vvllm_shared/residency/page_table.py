"""The page table of one layer: which expert lies in which slot, and which slot is given up next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

EMPTY = -1
"""In `slot_of`: not resident. In `expert_in`: nothing in this slot."""


@dataclass(frozen=True)
class Weights:
    """How the terms of the victim formula are weighed; the defaults are exact LRU.

    The victim is the slot whose expert has the lowest `bias[e] + heat * heat[e] + age * last_used[e]`.
    """

    heat: float = 0.0
    age: float = 1.0
    heat_decay: float = 1.0
    """What a step leaves of the heat that was there, in (0, 1]."""


@dataclass
class PageTable:
    """One layer's table. The arrays may be views of memory that somebody else owns.

    `slot_of` and `expert_in` are inverse to each other; an expert is in at most one slot.
    """

    slot_of: Ints
    """[E] slot of each expert, or EMPTY."""
    expert_in: Ints
    """[S] expert in each slot, or EMPTY."""
    last_used: Floats
    """[E] when the expert was last needed, in steps; the fraction orders the uses within a step."""
    heat: Floats
    """[E] uses, decayed by `Weights.heat_decay` each step."""
    bias: Floats
    """[E] what the policy adds to an expert's score; higher stays longer."""
    clock: Floats
    """[1] number of the layer's last step."""

    @classmethod
    def empty(cls, experts: int, slots: int) -> PageTable:
        """A table in which nothing is resident."""
        return cls(
            np.full(experts, EMPTY, np.int32),
            np.full(slots, EMPTY, np.int32),
            np.zeros(experts),
            np.zeros(experts),
            np.zeros(experts),
            np.zeros(1),
        )

    @property
    def experts(self) -> int:
        """E, the number of experts of the layer."""
        return len(self.slot_of)

    @property
    def slots(self) -> int:
        """S, the number of slots of the layer."""
        return len(self.expert_in)

    @property
    def step(self) -> int:
        """Number of the layer's last step; 0 before the first."""
        return int(self.clock[0])

    def touch(self, flat_ids: Ints, decay: float) -> Bools:
        """Begin the next step, and record the experts that it needs. A step of nobody is none.

        Args:
            flat_ids: the step's (token, k) pairs in order, repeats included; ids of -1 are nobody's.
            decay: see `Weights.heat_decay`.

        Returns:
            [E] whether the step needs it.
        """
        # Where an expert repeats, numpy's assignment keeps the last: recency is the last occurrence's. One more place,
        # which -1 means too, is nobody's.
        last = np.full(self.experts + 1, -1)
        last[flat_ids] = np.arange(len(flat_ids))
        last = last[:-1]
        needed: Bools = last >= 0
        if needed.any():
            self.clock[0] += 1
            self.last_used[needed] = self.clock[0] + (last[needed] + 1) / (len(flat_ids) + 1)
            self.heat *= decay
            self.heat[needed] += 1.0
        return needed

    def victims(self, count: int, keep: Bools, weights: Weights) -> Ints:
        """The `count` slots to give up: empty ones first, then by the lowest score; ties by slot number.

        Args:
            count: how many slots are wanted.
            keep: [E] experts that are needed now; their slots are never victims.
            weights: the victim formula's.

        Raises:
            AssertionError: fewer than `count` slots may be given up: the caller planned more than fits.
        """
        owner = self.expert_in
        occupied = owner != EMPTY
        score = self.bias + weights.heat * self.heat + weights.age * self.last_used
        slot_score = np.where(occupied, score[owner], -np.inf)
        slot_score[occupied & keep[owner]] = np.inf
        order = np.argsort(slot_score, kind="stable")[:count].astype(np.int32)
        found = int(np.count_nonzero(~np.isposinf(slot_score[order])))
        assert found == count, (  # noqa: S101
            f"{count} victims wanted of {self.slots} slots, {int(keep.sum())} experts needed"
        )
        return order

    def place(self, expert_ids: Ints, slots: Ints) -> None:
        """Put experts into slots; what was there is no longer resident."""
        old = self.expert_in[slots]
        self.slot_of[old[old != EMPTY]] = EMPTY
        self.expert_in[slots] = expert_ids
        self.slot_of[expert_ids] = slots

    def check(self) -> None:
        """Raise AssertionError, with the numbers, where the two directions of the table disagree."""
        for slot, expert in enumerate(self.expert_in):
            assert expert == EMPTY or self.slot_of[expert] == slot, (  # noqa: S101
                f"slot {slot} holds expert {expert}, whose slot is {self.slot_of[expert]}"
            )
        for expert, slot in enumerate(self.slot_of):
            assert slot == EMPTY or self.expert_in[slot] == expert, (  # noqa: S101
                f"expert {expert} is in slot {slot}, which holds {self.expert_in[slot]}"
            )
