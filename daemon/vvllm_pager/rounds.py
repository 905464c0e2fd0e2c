"""Putting the rows of a batch together that several kernel calls compute."""

from __future__ import annotations

import torch


class Rounds:
    """The experts' outputs of a batch, which several kernel calls fill.

    Args:
        rounds: how many calls.
        rows: [T * k, H] into which a kernel writes the rows of its call, and no others, by itself; None where they are
            to be copied out of what it gives.
    """

    mine: torch.Tensor
    """bool [T, k], the pairs of the running call, where their rows are copied."""

    def __init__(self, rounds: int, rows: torch.Tensor | None = None) -> None:
        self._left = rounds
        self._merged: torch.Tensor | None = None
        self.rows = rows

    def merge(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Take this round's rows.

        Args:
            rows: [T, k, H], of which those of other rounds are garbage; or all rounds' `rows`.

        Returns:
            All rows after the last round. Where this object has copied them, nobody's are zero.
        """
        if self.rows is not None:
            self._merged = rows
        elif self._merged is None:
            self._merged = torch.where(self.mine.unsqueeze(-1), rows, 0)
        else:
            torch.where(self.mine.unsqueeze(-1), rows, self._merged, out=self._merged)
        self._left -= 1
        return None if self._left else self._merged
