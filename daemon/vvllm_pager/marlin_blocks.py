"""Which blocks of a batch a launch of vLLM's Marlin kernel may leave out without changing what it computes of others.

The kernel (marlin_template.h) lays the output's tiles in a row, block by block. Each tile of the row's front is one
thread block's alone, all of K, wherever it lies. The row's end, at most four thirds of the grid's thread blocks, is cut
along K where the grid's stripes end, which depends on how many tiles come before it: modulo the grid. So a launch keeps
the end, and of the front it leaves out what it likes, unless it is for blocks of the end: then it leaves blocks out in
multiples of a number that keeps the rest of that division. How an end that nobody wants is cut does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, lcm

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

    @classmethod
    def all(cls, blocks: int) -> Cuts:
        """Of at most so many blocks none is left out."""
        return cls(1, blocks)


def _choices(multiprocessors: int, block: int, widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(thread blocks of the grid, tiles that a block of rows has) of every configuration (`determine_exec_config`)."""
    for each in range(1, (4 if block <= 16 else 2) + 1):
        for width in widths:
            for columns in _TILE_COLUMNS:
                if width % columns == 0:
                    yield multiprocessors * each, width // columns
