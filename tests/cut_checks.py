"""A block that a launch computes comes out as in a launch of all blocks, whatever configuration the kernel takes.

Collected as `kernel_checks.py` is.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_checks import DEVICE
from vvllm_pager.block_rounds import in_rounds
from vvllm_pager.blocks import Blocks
from vvllm_pager.marlin_blocks import Cuts


def cut(blocks: int, columns: int, grid: int, k_tiles: int, group: int) -> list[tuple[tuple[int, ...], ...]]:
    """Where the kernel cuts K, for each tile of each block (marlin_template.h); stripes are multiples of `group`."""
    tiles = blocks * columns
    end = tiles
    if tiles > grid:
        end = tiles % grid
        end += grid if end * 3 <= grid else 0
    iters = -(-k_tiles * end // grid)
    iters = group * -(-iters // group)
    cuts: list[tuple[int, ...]] = [()] * (tiles - end)
    for tile in range(end):
        at = k_tiles * tile
        cuts.append(tuple(x - at for x in range(0, k_tiles * end, iters) if at < x < at + k_tiles))
    return [tuple(cuts[block * columns : (block + 1) * columns]) for block in range(blocks)]


def keep(cuts: Cuts, mine: np.ndarray) -> np.ndarray:
    """The blocks of one launch, of one row each, in order; there is room for more than the batch has."""
    blocks, room = len(mine), len(mine) + 7
    words = {"dtype": torch.int32, "device": DEVICE}
    # Each block is an expert's, which is in the first round where the block is its launch's.
    whole = Blocks(
        1,
        torch.arange(room, **words),  # type: ignore[arg-type]
        torch.arange(room, **words),  # type: ignore[arg-type]
        torch.tensor([blocks], **words),  # type: ignore[arg-type]
    )
    round_of = torch.ones(room + 1, **words)  # type: ignore[arg-type]
    round_of[:blocks] = torch.from_numpy(~mine).to(**words)  # type: ignore[arg-type]
    slot_of = torch.stack([torch.where(round_of == 0, torch.arange(room + 1, **words), -1), round_of])  # type: ignore[arg-type]
    launch, _ = in_rounds(whole, room, room, cuts, round_of, slot_of)
    filled = int(launch.filled)
    rows, slots = launch.pairs[:filled].cpu().numpy(), launch.owners[:filled].cpu().numpy()
    assert np.array_equal(rows[rows < room], np.flatnonzero(mine))
    assert np.array_equal(slots[rows < room], np.flatnonzero(mine))
    # Which others stay is told by their place alone: those at the front come first.
    others = np.flatnonzero(~mine)
    in_tail = others[others >= blocks - cuts.tail]
    at_front = filled - int(mine.sum()) - len(in_tail)
    kept = np.sort(np.concatenate([np.flatnonzero(mine), in_tail, others[:at_front]]))
    assert np.array_equal(rows < room, mine[kept])
    return kept


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([1, 3, 20, 24, 34, 132]),
    st.sampled_from([8, 16, 32, 48, 64]),
    st.lists(st.sampled_from([64, 128, 192, 512, 1536, 2048]), min_size=1, max_size=2),
    st.integers(1, 900),
    st.floats(0, 1),
    st.sampled_from([(6, 1), (12, 1), (12, 2), (32, 4)]),
    st.integers(0, 2**32 - 1),
)
def test_a_launch_cuts_the_blocks_that_it_is_for_as_the_whole_batch_does(
    multiprocessors: int,
    size: int,
    widths: list[int],
    blocks: int,
    share: float,
    depth: tuple[int, int],
    seed: int,
) -> None:
    mine = np.random.default_rng(seed).random(blocks) < share
    kept = keep(Cuts.of(multiprocessors, size, widths), mine)
    assert mine[kept].sum() == mine.sum()
    for each in range(1, (4 if size <= 16 else 2) + 1):
        for width in widths:
            for columns in (64, 128, 256):
                if width % columns:
                    continue
                whole = cut(blocks, width // columns, multiprocessors * each, *depth)
                launch = cut(len(kept), width // columns, multiprocessors * each, *depth)
                for place, block in enumerate(kept.tolist()):
                    assert not mine[block] or launch[place] == whole[block]


def test_a_large_batch_leaves_most_blocks_of_other_rounds_out() -> None:
    """An RTX 4060 at the shape of Qwen3-30B-A3B: 8,192 tokens are some 1,100 blocks, an eighth of them a round's."""
    mine = np.zeros(1100, np.bool_)
    mine[300:437] = True
    cuts = Cuts.of(24, 64, (1536, 2048))
    assert len(keep(cuts, mine)) == 137 + cuts.tail < 150
    mine[-3:] = True
    assert len(keep(cuts, mine)) < 180


def test_rounds_are_told_apart() -> None:
    """Only those that compute some of the end need a remainder."""
    cuts = Cuts(stride=4, tail=2)
    for mine, kept in (
        ([1, 1, 0, 0, 0, 0, 0, 0], [0, 1, 6, 7]),
        ([0, 0, 1, 0, 0, 0, 0, 1], [0, 2, 6, 7]),
    ):
        assert keep(cuts, np.array(mine) > 0).tolist() == kept
