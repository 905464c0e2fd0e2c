"""What the kernels on slots are given, as far as a machine without a GPU can see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.fused_moe import fused_moe

from vvllm_pager import kernel
from vvllm_pager.blocks import Blocks, on_slots
from vvllm_pager.kernel import put_on_slots
from vvllm_pager.rounds import Launch, Rounds
from vvllm_shared.errors import UnsupportedError

EXPERTS = 6


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_blocks_of_this_round_are_on_their_slots_and_the_others_on_one_that_is_loaded(seed: int) -> None:
    """Rows of padding may share experts with tokens."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, EXPERTS, (5, 3)).astype(np.int32)
    resident = {int(e): int(s) for s, e in enumerate(rng.permutation(EXPERTS)[:3])}
    padding = rng.random(5) < 0.4
    slots = np.array(
        [[-1 if padding[t] else resident.get(int(e), -1) for e in row] for t, row in enumerate(ids)]
    )
    owners = torch.arange(EXPERTS, dtype=torch.int32)
    blocks = Blocks(8, torch.zeros(1), owners, torch.ones(1))
    mapped = on_slots(blocks, torch.from_numpy(ids), torch.from_numpy(slots).int(), EXPERTS).owners.tolist()
    used = set(slots[slots >= 0].tolist())
    for expert, slot in enumerate(mapped):
        mine = set(slots[(ids == expert) & (slots >= 0)].tolist())
        assert slot in (mine or used or {0})


def test_rounds_keep_each_pair_from_the_round_that_has_its_expert() -> None:
    nan = float("nan")
    first = torch.tensor([[[1.0], [nan]], [[nan], [nan]]])
    second = torch.tensor([[[nan], [2.0]], [[3.0], [nan]]])
    slots = torch.tensor([[[0, -1], [-1, -1]], [[-1, 4], [2, -1]]])
    rounds = Rounds([Launch(mine) for mine in slots], 2)
    merged = None
    for rows, _ in zip((first, second), rounds, strict=True):
        assert merged is None
        merged = rounds.merge(rows)
    assert merged is not None
    assert merged.flatten().tolist() == [1.0, 2.0, 3.0, 0.0]  # the last is nobody's


def layer(experts: Any, slots: int) -> Any:
    method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))
    return SimpleNamespace(layer_name="layer", quant_method=method, slots=slots, experts=8)


def triton(monkeypatch: pytest.MonkeyPatch, **properties: Any) -> Any:
    made = kernel.TritonExperts.__new__(kernel.TritonExperts)
    given = {"quant_dtype": None, "a2_scale": None, "block_shape": None, "per_act_token_quant": False}
    for name, value in (given | {"quantization_emulation": False} | properties).items():
        monkeypatch.setattr(kernel.TritonExperts, name, value, raising=False)
    return made


def test_a_scale_of_the_whole_batch_is_refused_where_rounds_may_be_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fp8 = {"quant_dtype": torch.float8_e4m3fn}
    with pytest.raises(UnsupportedError, match="by the largest of them"):
        put_on_slots(layer(triton(monkeypatch, **fp8), 4))
    put_on_slots(layer(triton(monkeypatch, **fp8), 8))
    put_on_slots(layer(triton(monkeypatch, **fp8, per_act_token_quant=True), 4))
    put_on_slots(layer(triton(monkeypatch, **fp8, block_shape=[128, 128]), 4))
    put_on_slots(layer(triton(monkeypatch), 4))
    # NVFP4 by Triton scales inputs by what is known before.
    put_on_slots(layer(kernel.Nvfp4TritonExperts.__new__(kernel.Nvfp4TritonExperts), 4))


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="SimpleNamespace is not among"):
        put_on_slots(layer(SimpleNamespace(), 4))


@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_triton_aligns_batches_that_stock_aligns(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 slots of a layer of 128 experts, top-8: up to four tokens stock takes each pair for a block."""
    aligned: list[int] = []

    def align(ids: Any, size: int, among: int, *_: Any, **__: Any) -> Any:
        aligned.append(among)
        return ids, ids, ids

    monkeypatch.setattr(fused_moe, "moe_align_block_size", align)
    made = kernel.SlotTriton.__new__(kernel.SlotTriton)
    made.experts = 128
    ids = torch.zeros((tokens, 8), dtype=torch.int32)
    seen: list[Any] = []

    def apply(self: Any, *, topk_ids: Any, slots: int) -> None:
        assert topk_ids is ids
        prepare = kernel.triton_moe._prepare_expert_assignment
        seen.extend(prepare(ids, {"BLOCK_SIZE_M": 16}, tokens, 8, slots, None, ignore_invalid_experts=False))

    before = kernel.triton_moe._prepare_expert_assignment
    monkeypatch.setattr(kernel.TritonExperts, "apply", apply)
    with kernel.launching(made, Rounds([Launch(ids)], 1)):
        made.apply(topk_ids=ids + 1, slots=24)
    assert not hasattr(made, "rounds")
    if tokens <= 4:
        assert seen[0] is None
        assert not aligned
    else:
        assert aligned == [24]
    assert kernel.triton_moe._prepare_expert_assignment is before
