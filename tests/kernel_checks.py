"""Tests of *resolve* and *fill*: what they do is what the planner plans.

Not collected by itself: on a CPU it wants a process with TRITON_INTERPRET=1 from its start (Triton's own library is
interpreted only then), on a GPU none. See `unit/pager/test_kernels.py` and `gpu/test_gpu_kernels.py`.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resolve_driver import Beside, random_step
from vvllm_pager.bundle import BundleLayout
from vvllm_pager.device_resolver import starts_early
from vvllm_pager.fill_kernel import fill
from vvllm_pager.slot_pool import TILE_BYTES, SlotPool
from vvllm_shared.residency import Weights, plan_step

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
WARPS = [1] if DEVICE == "cpu" else [1, 8]
"""As the pager launches it; the interpreter has none."""


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, int, int]:
    """(experts, slots, top_k), of no power of two in particular."""
    experts = draw(st.integers(2, 40))
    slots = draw(st.integers(1, experts))
    return experts, slots, draw(st.integers(1, min(slots, 8)))


@pytest.mark.parametrize("warps", WARPS)
@settings(max_examples=40, deadline=None)
@given(layers(), st.integers(0, 2**32 - 1), st.sampled_from([0, 8, 16]), st.booleans())
def test_resolve_does_what_the_planner_plans(warps, shape, seed, block, masked) -> None:
    experts, slots, top_k = shape
    rng = np.random.default_rng(seed)
    weights = Weights() if seed % 2 else Weights(heat=0.5, age=0.25, heat_decay=0.75)
    bias = rng.integers(-8, 8, experts).astype(float).tolist() if seed % 3 else None
    beside = Beside(experts, slots, weights, bias, DEVICE, warps)
    for _ in range(5):
        tokens = int(rng.integers(1, max(4 * slots // top_k, 1) + 1))
        ids, padding = random_step(rng, experts, top_k, min(tokens, 12))
        beside.step(ids, padding if masked else None, block)


@pytest.mark.parametrize(
    ("experts", "slots", "top_k", "tokens"), [(1000, 992, 8, 20), (512, 64, 10, 25), (300, 75, 6, 50)]
)
def test_resolve_at_the_sizes_of_large_models(experts: int, slots: int, top_k: int, tokens: int) -> None:
    """Up to the most slots and to four rounds."""
    rng = np.random.default_rng(experts)
    beside = Beside(experts, slots, Weights(), device=DEVICE, warps=WARPS[-1])
    for _ in range(3):
        ids, padding = random_step(rng, experts, top_k, tokens)
        beside.step(ids, padding, 8)


def test_steps_of_host_and_device_may_alternate() -> None:
    """Both leave the table where the other goes on, and advice in between counts for both."""
    rng = np.random.default_rng(3)
    beside = Beside(16, 5, Weights(), device=DEVICE)
    for number in range(12):
        if number in (3, 8):  # after a host-driven step, and before one
            beside.advise(rng.integers(-8, 8, 16).astype(float).tolist())
        ids, padding = random_step(rng, 16, 4, 3)
        beside.step(ids, padding)
        if number % 3 == 2:  # a host-driven step in between, planned on what the device left
            ids, _ = random_step(rng, 16, 4, 9)
            beside.read()
            mine = plan_step(ids, beside.table.host, Weights(), pair_waves_above=0)
            theirs = plan_step(ids, beside.planned, Weights(), pair_waves_above=0)
            beside.table.write()
            for one, other in zip(mine.waves, theirs.waves, strict=True):
                assert one.load_experts.tolist() == other.load_experts.tolist()
                assert one.load_slots.tolist() == other.load_slots.tolist()


def test_a_warm_up_run_loads_and_leaves_no_statistics() -> None:
    beside = Beside(8, 4, Weights(), device=DEVICE)
    slots, *_ = beside.resolve(np.array([[1, 2]], np.int32), None, 0, 1, live=False)
    assert slots.tolist() == [0, 1]
    beside.read()
    host = beside.table.host
    assert (host.step, host.heat.any(), host.last_used.any()) == (0, False, False)
    assert not beside.table.device["counted"].any()
    assert beside.reader.take() is None


def test_rows_of_padding_alone_do_nothing() -> None:
    beside = Beside(8, 4, Weights(), device=DEVICE)
    ids = np.array([[1, 2], [3, 4]], np.int32)
    slots, _, _, filled = beside.resolve(ids, np.ones(2, bool), 0, 1, block=8)
    assert slots.tolist() == [-1] * 4
    beside.read()
    assert (beside.misses, int(filled), beside.table.host.step) == (0, 0, 0)
    assert beside.reader.take() is None


def test_the_ring_tells_each_step_and_never_loses_a_count() -> None:
    beside = Beside(16, 8, Weights(), device=DEVICE)
    rng = np.random.default_rng(0)
    for number in range(40):
        ids, _ = random_step(rng, 16, 4, 2)
        beside.step(ids)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if number < 20:
            entries = beside.reader.take()
            assert entries is not None
            assert entries.ids[0].tolist() == ids.tolist()
            assert (entries.layer.tolist(), entries.step.tolist()) == ([3], [number + 1])
    # The ring of 8 was overtaken: steps are missing, and the totals are those of all steps.
    assert beside.reader.take() is None
    assert beside.reader.lost > 0
    entries = beside.reader.take()
    assert entries is not None
    assert entries.totals[-1].tolist() == beside.table.device["counted"][:3].tolist()
    assert entries.step[-1] == 40


def test_fill_copies_bundles_of_any_bytes() -> None:
    """Rows below, at and above a tile, and rows that no wide load may touch."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"big": (TILE_BYTES + 4096,), "wide": (64, 32), "odd": (7,), "scalar": (), "tile": (TILE_BYTES,)}
    dtypes = {"wide": torch.bfloat16, "scalar": torch.float32}
    slots = {
        name: torch.zeros(2, *shape, dtype=dtypes.get(name, torch.uint8), device=DEVICE)
        for name, shape in shapes.items()
    }
    layout = BundleLayout.of(slots)
    store = torch.randint(0, 255, (3, layout.record_bytes), dtype=torch.uint8, generator=generator)
    store = store.pin_memory() if DEVICE == "cuda" else store
    pool = SlotPool(slots, store, layout)
    assert {int(wide) for wide in pool.tiles[:, 4]} == {0, 1}
    arguments = [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([2, 0], [1, 0], [2])]
    early = starts_early(torch.device(DEVICE))
    fill[(3,)](
        pool.store_words,
        pool.store_words.shape[1],
        pool.tiles,
        len(pool.tiles),
        *arguments,
        TILE=TILE_BYTES // 8,
        EARLY=early,
        launch_pdl=early,
    )
    for part in layout.parts:
        rows = slots[part.name].view(2, -1).view(torch.uint8)
        for slot, expert in ((1, 2), (0, 0)):
            assert torch.equal(rows[slot].cpu(), store[expert, part.offset : part.offset + part.nbytes]), (
                part.name
            )
