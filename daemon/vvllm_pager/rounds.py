"""Putting the rows of a batch together that several kernel calls compute."""

from __future__ import annotations

import torch

_ROWS_AT_ONCE = 8192
"""That are copied through memory of their own."""


class Rounds:
    """The experts' outputs of a batch, which several kernel calls fill.

    Args:
        rounds: how many calls.
        rows: [T * k, H] into which a kernel writes the rows of its call, and no others, by itself; None where they are
            to be copied out of what it gives.
        nobody: int64, indices of the pairs that no call computes, where `mine` is indices.
    """

    mine: torch.Tensor
    """The pairs of the running call, where they are copied: bool [T, k] where sizes must not depend on the routing,
    else int64 [n] of their indices among T * k."""

    def __init__(
        self, rounds: int, rows: torch.Tensor | None = None, nobody: torch.Tensor | None = None
    ) -> None:
        self._left = rounds
        self._nobody = nobody
        self._rows: torch.Tensor | None = None
        self.rows = rows

    def merge(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Take this round's rows.

        Args:
            rows: [T, k, H], of which those of other rounds are garbage, or all rounds' `rows`.

        Returns:
            All rows after the last round; nobody's are zero, where this object has copied them.
        """
        if self.rows is not None:
            self._rows = rows
        else:
            self._rows = self._masked(rows) if self.mine.dtype == torch.bool else self._indexed(rows)
        self._left -= 1
        return None if self._left else self._rows

    def _masked(self, rows: torch.Tensor) -> torch.Tensor:
        mine = self.mine.unsqueeze(-1)
        if self._rows is None:
            return torch.where(mine, rows, 0)
        return torch.where(mine, rows, self._rows, out=self._rows)

    def _indexed(self, rows: torch.Tensor) -> torch.Tensor:
        merged, width = self._rows, rows.shape[-1]
        if merged is None:
            merged = torch.empty_like(rows)
            if self._nobody is not None:
                merged.view(-1, width)[self._nobody] = 0
        for mine in self.mine.split(_ROWS_AT_ONCE):
            merged.view(-1, width)[mine] = rows.view(-1, width)[mine]
        return merged
