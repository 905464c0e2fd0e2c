"""The launches of an expert kernel that one step takes, and putting the rows together that they compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from vvllm_pager.blocks import Blocks


@dataclass(frozen=True)
class Launch:
    """What one launch is given."""

    slots: torch.Tensor | None = None
    """int32 [T, k], each pair's slot, -1 for those of other rounds and nobody's: for a kernel without blocks, and where
    rows are copied."""
    blocks: Blocks | None = None
    """For a kernel with blocks."""


class Rounds:
    """The launches of a step, for the kernel to go through.

    Args:
        launches: each is made once what it reads is there, or will be when the compute stream gets to it.
        count: how many they are.
        rows: [T * k, H] into which a kernel writes the rows of its launch, and no others, by itself; None where they
            are to be copied out of what it gives.
    """

    def __init__(self, launches: Iterable[Launch], count: int, rows: torch.Tensor | None = None) -> None:
        self._launches = launches
        self._count = self._left = count
        self._running = Launch()
        self._merged: torch.Tensor | None = None
        self.rows = rows

    def __iter__(self) -> Iterator[Launch]:
        for launch in self._launches:
            self._running = launch
            self._left -= 1
            yield launch

    def merge(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Take the rows of the running launch.

        Args:
            rows: [T, k, H], of which those of other rounds are garbage; or all rounds' `rows`.

        Returns:
            All rows after the last launch. Where this object has copied them, nobody's are zero.
        """
        if self.rows is not None or self._count == 1:
            self._merged = rows
        else:
            assert self._running.slots is not None  # noqa: S101  # what is copied has them
            mine = (self._running.slots >= 0).unsqueeze(-1)
            if self._merged is None:
                self._merged = torch.where(mine, rows, 0)
            else:
                torch.where(mine, rows, self._merged, out=self._merged)
        return None if self._left else self._merged
