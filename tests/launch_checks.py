"""The rounds of a step, worked out on the device: each pair is computed once, by its expert, and lies where it must.

Collected as `kernel_checks.py` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cut_checks import keep
from kernel_checks import DEVICE
from vvllm_pager import launches as launches_module
from vvllm_pager.batch import Batch
from vvllm_pager.block_rounds import aligned_in_order
from vvllm_pager.blocks import Blocks
from vvllm_pager.launches import launches
from vvllm_pager.marlin_blocks import Cuts
from vvllm_shared.residency import PageTable, Plan, Weights, plan_step
from vvllm_shared.residency.page_table import Ints


def step(rng: np.random.Generator, experts: int, tokens: int, top_k: int, *, blind: bool) -> tuple[Any, ...]:
    """A batch with padding, and a plan for it or, `blind`, for all experts, and the ids that are somebody's."""
    slots = int(rng.integers(top_k, experts + 1))
    table = PageTable.empty(experts, slots)
    resident = rng.permutation(experts)[: int(rng.integers(0, slots + 1))].astype(np.int32)
    table.place(resident, np.arange(len(resident), dtype=np.int32))
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.05] = -1
    padding = rng.random(tokens) < 0.2
    planned = np.where(padding[:, None], -1, ids)
    wanted = np.arange(experts, dtype=np.int32)[None] if blind else planned
    plan = plan_step(wanted, table, Weights(), pair_waves_above=0, overlap=blind)
    x = torch.zeros(tokens, 8, device=DEVICE)
    compute: Any = None
    on_device = torch.from_numpy(ids).to(DEVICE), torch.from_numpy(padding).to(DEVICE)
    batch = Batch(x, x[:, :top_k], *on_device, compute)
    return batch, plan, planned


def upload(arrays: Sequence[Ints]) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(DEVICE) for array in arrays]


def places(plan: Plan) -> np.ndarray:
    return np.arange(sum(len(wave.load_experts) for wave in plan.waves), dtype=np.int32)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(1, 30), st.integers(0, 2**32 - 1), st.booleans())
def test_every_pair_has_its_slot_in_one_round(experts: int, tokens: int, seed: int, blind: bool) -> None:
    rng = np.random.default_rng(seed)
    batch, plan, planned = step(rng, experts, tokens, int(rng.integers(1, min(experts, 6) + 1)), blind=blind)
    given = launches(plan.waves, places(plan), batch, experts, 0, Cuts.all(0), upload)
    seen = np.zeros(planned.shape, int)
    for wave, mine in zip(plan.waves, given, strict=True):
        assert mine.load_slots.tolist() == wave.load_slots.tolist()
        assert mine.launch.slots is not None
        assert mine.launch.slots.tolist() == wave.slot_of(experts)[planned].tolist()
        seen += mine.launch.slots.cpu().numpy() >= 0
    assert (seen == (planned >= 0)).all()
    assert [place for mine in given for place in mine.places.tolist()] == places(plan).tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 40),
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([Cuts(1, 0), Cuts(3, 2), Cuts(5, 9), Cuts(1, 10_000)]),
)
def test_a_round_has_its_own_rows_where_the_whole_batch_has_them(
    experts: int, tokens: int, seed: int, blind: bool, size: int, cuts: Cuts
) -> None:
    rng = np.random.default_rng(seed)
    batch, plan, planned = step(rng, experts, tokens, int(rng.integers(1, min(experts, 6) + 1)), blind=blind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches_module, "aligned_by_chance", lambda pairs, experts: True)
        given = launches(plan.waves, places(plan), batch, experts, size, cuts, upload)
    whole = aligned_in_order(size, batch.ids, experts)
    used = int(whole.filled) // size
    rows = whole.pairs[: used * size].view(-1, size)
    nobody = batch.ids.numel()
    seen: list[int] = []
    for wave, prepared in zip(plan.waves, given, strict=True):
        launch = prepared.launch
        assert launch.blocks is not None
        slot_of = wave.slot_of(experts)
        mine = np.isin(whole.owners[:used].cpu().numpy(), wave.experts)
        kept = keep(cuts, mine)
        assert int(launch.blocks.filled) == len(kept) * size
        laid = launch.blocks.pairs.view(-1, size)
        for place, block in enumerate(kept):
            owner, slot = int(whole.owners[block]), int(launch.blocks.owners[place])
            if mine[block]:
                assert slot == slot_of[owner]
                assert laid[place].tolist() == rows[block].tolist()
                seen += [pair for pair in laid[place].tolist() if pair < nobody]
            else:
                assert slot in (set(wave.slots.tolist()) or {0})
                assert laid[place].tolist() == [nobody] * size
    wanted = np.flatnonzero(planned.reshape(-1) >= 0).tolist()
    assert len(seen) == len(set(seen))
    assert set(wanted) <= set(seen)
    # Pairs of padding rows lie among those of the same expert; nothing else is computed.
    assert set(seen) - set(wanted) <= set(
        np.flatnonzero(np.repeat(batch.padding.cpu(), batch.ids.shape[1])).tolist()
    )


def test_where_stock_lays_the_rows_all_its_blocks_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches_module, "aligned", aligned_in_order)
    monkeypatch.setattr(launches_module, "aligned_by_chance", lambda pairs, experts: False)
    batch, plan, _ = step(np.random.default_rng(5), 24, 40, 4, blind=True)
    used = int(aligned_in_order(8, batch.ids, 24).filled)
    for prepared in launches(plan.waves, places(plan), batch, 24, 8, Cuts(3, 1), upload):
        assert prepared.launch.blocks is not None
        assert int(prepared.launch.blocks.filled) == used


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 8, 16]), st.sampled_from([5, 40, 150]))
def test_blocks_in_order_are_a_layout_that_stock_may_give(seed: int, size: int, tokens: int) -> None:
    """Each expert's pairs, in the batch's order, in as few blocks as they need; nobody's in none."""
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(1, 30))
    ids = rng.integers(-1, experts + 1, (tokens, 3)).astype(np.int32)
    blocks = aligned_in_order(size, torch.from_numpy(ids).to(DEVICE), experts)
    empty = Blocks.empty(size, ids.size, experts, torch.device("cpu"))
    assert (len(blocks.pairs), len(blocks.owners)) == (len(empty.pairs), len(empty.owners))
    at = 0
    for expert in range(experts):
        mine = np.flatnonzero(ids.reshape(-1) == expert).tolist()
        for start in range(0, len(mine), size):
            rows = mine[start : start + size]
            assert blocks.owners[at] == expert
            assert blocks.pairs[at * size : (at + 1) * size].tolist() == rows + [ids.size] * (
                size - len(rows)
            )
            at += 1
    assert blocks.filled.tolist() == [at * size]
    assert all(tensor.dtype == torch.int32 for tensor in (blocks.pairs, blocks.owners, blocks.filled))
