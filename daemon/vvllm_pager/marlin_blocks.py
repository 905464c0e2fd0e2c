"""Which blocks of a batch a launch of vLLM's Marlin kernel may leave out without changing what it computes of others.

The kernel (marlin_template.h) lays the output's tiles in a row, block by block. Each tile of the row's front is one
thread block's alone, all of K, wherever it lies. The row's end, at most four thirds of the grid's thread blocks, is cut
along K where the grid's stripes end, which depends on how many tiles come before it: modulo the grid. So a launch may
leave blocks of the front out, in multiples of a number that keeps the rest of that division, and must keep the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, lcm

import numpy as np

from vvllm_shared.residency.page_table import Bools, Ints

_TILE_COLUMNS = (64, 128, 256)
"""Columns of a tile (ops.cu, `small_batch_thread_configs` and `large_batch_thread_configs`)."""


@dataclass(frozen=True)
class Cuts:
    """How a batch's blocks may be left out.

    Which tile and how many thread blocks a multiprocessor the kernel takes is its own choice, by registers and shared
    memory that only it knows: these numbers hold for every choice that it has.
    """

    stride: int
    """Blocks are left out in multiples of so many, where some of the tail are computed."""
    tail: int
    """The last so many stay."""

    @classmethod
    def of(cls, multiprocessors: int, block: int, widths: Sequence[int]) -> Cuts:
        """For one GPU, blocks of `block` rows, and GEMMs that are `widths` columns wide."""
        choices = list(_choices(multiprocessors, block, widths))
        return cls(
            lcm(*(grid // gcd(grid, columns) for grid, columns in choices)),
            max(-(-(grid + grid // 3) // columns) for grid, columns in choices),
        )

    def keep(self, mine: Bools) -> Ints:
        """The blocks of a launch that shall compute `mine`.

        Args:
            mine: [B] for each block of the batch whether this launch is to compute it.

        Returns:
            Indices of blocks, ascending: these, the tail, and as many others as the stride wants.
        """
        front = max(len(mine) - self.tail, 0)
        kept = mine.copy()
        kept[front:] = True
        if mine[front:].any():
            others = np.flatnonzero(~mine[:front])
            kept[others[: len(others) % self.stride]] = True
        return np.flatnonzero(kept).astype(np.int32)


def _choices(multiprocessors: int, block: int, widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(thread blocks of the grid, tiles that a block of rows has) of every configuration (`determine_exec_config`)."""
    for each in range(1, (4 if block <= 16 else 2) + 1):
        for width in widths:
            for columns in _TILE_COLUMNS:
                if width % columns == 0:
                    yield multiprocessors * each, width // columns
