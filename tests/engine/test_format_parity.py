"""Formats of few bits, with their scales, through vLLM's own kernels for the CPU: the same output as stock, and every
tensor that a kernel reads moves with its expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import MEDIUM, SHORT, ask, largest_difference, prompt

import zoo
from checkpoints import formats
from vvllm_msd.verify_engine import Answer
from vvllm_pager import loading
from vvllm_pager.bundle import BundleLayout
from vvllm_pager.slot_pool import SlotPool

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU kernels for quantised experts need AMX"
    ),
]

EXPERTS, TOP_K = 32, 4
BATCHES = [[SHORT], [MEDIUM], [prompt(4 + 3 * i, 10 + i) for i in range(4)]]
CASES = [
    ("qwen3_moe", "awq"),
    ("gpt_oss", "mxfp4"),
    *(
        pytest.param(family, scheme, marks=pytest.mark.slow)
        for family, scheme in (
            ("qwen3_moe", "int4"),
            ("qwen3_moe", "gptq"),
            ("qwen3_moe", "int8"),
            ("deepseek_v2", "awq"),
        )
    ),
]
_NUMBER = {"deepseek_v2": "n_routed_experts", "gpt_oss": "num_local_experts"}

Make = Callable[..., Path]
Record = Callable[..., None]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`make(family, scheme, seed)` is a checkpoint of that format; "bf16" leaves it as it was drawn."""

    @cache
    def made(family: str, scheme: str, seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp(f"{family}-{scheme}")
        shape: dict[str, Any] = formats.SHAPE[family] | {_NUMBER.get(family, "num_experts"): EXPERTS}
        plain = zoo.make(family, folder / "plain", seed=seed, **shape)
        return plain if scheme == "bf16" else formats.quantize(plain, folder / scheme, scheme)

    return made


@pytest.fixture(scope="module")
def stock(make: Make) -> Callable[..., list[Answer]]:
    """Stock's answers to `BATCHES`."""

    @cache
    def answers(family: str, scheme: str, seed: int = 0) -> list[Answer]:
        return ask(make(family, scheme, seed), BATCHES, None)

    return answers


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_tokens_and_logprobs_equal_stock(
    family: str, scheme: str, make: Make, stock: Callable[..., list[Answer]], record_parity: Record
) -> None:
    reference = stock(family, scheme)
    sizes = (TOP_K, EXPERTS // 4, 3 * TOP_K)
    for slots in sizes:
        paged = ask(make(family, scheme), BATCHES, {"slots": slots, "poison": True})
        assert paged == reference, slots
    record_parity(family, scheme, slots=sizes, experts=EXPERTS)


@pytest.mark.slow
def test_blocks_of_fp8_equal_stock_where_no_waves_are_needed(make: Make, record_parity: Record) -> None:
    """With few rows of an expert vLLM's CPU kernel adds in another order, so that waves of few tokens only repeat
    themselves: a token at a time is exact."""
    model, batches = make("qwen3_moe", "fp8_block"), [[[7]], [[9]]]
    reference = ask(model, batches, None)
    sizes = (TOP_K, EXPERTS // 4, 3 * TOP_K)
    for slots in sizes:
        assert ask(model, batches, {"slots": slots, "poison": True}) == reference, slots
    in_waves = {"slots": TOP_K, "poison": True}
    assert ask(model, BATCHES, in_waves) == ask(model, BATCHES, in_waves)
    record_parity("qwen3_moe", "fp8_block", slots=sizes, experts=EXPERTS, only="one token at a time")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "scheme"), [*CASES, ("qwen3_moe", "fp8_block")])
def test_the_checkpoint_is_the_model_that_was_quantised(
    family: str, scheme: str, stock: Callable[..., list[Answer]]
) -> None:
    """Stock vLLM reads weights that are near those before rounding, so nothing is packed in a wrong order."""
    plain, other = stock(family, "bf16"), stock(family, "bf16", 1)
    rounded = stock(family, scheme)
    assert mean_difference(rounded, plain) < 0.5 * mean_difference(other, plain)


def mean_difference(some: list[Answer], others: list[Answer]) -> float:
    """Of the logprobs of the prompts' tokens."""
    differences = [
        largest_difference(Answer([], [], [a]), Answer([], [], [b]))
        for one, other in zip(some, others, strict=True)
        for a, b in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)
    ]
    return sum(differences) / len(differences)


@pytest.mark.parametrize(
    ("family", "scheme", "parts"),
    [
        ("qwen3_moe", "awq", 6),
        *(
            pytest.param(family, scheme, parts, marks=pytest.mark.slow)
            for family, scheme, parts in (
                ("qwen3_moe", "int4", 4),
                ("qwen3_moe", "gptq", 4),
                ("qwen3_moe", "int8", 4),
                ("qwen3_moe", "fp8_block", 4),
                ("gpt_oss", "mxfp4", 6),
            )
        ),
    ],
)
def test_an_expert_that_comes_without_one_of_its_tensors_is_seen(
    family: str, scheme: str, parts: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, scales, biases, and zero points where they are not all the same; nothing else is moved."""
    model, batches = make(family, scheme), [[[7]], [[9]]]
    reference = ask(model, batches, None)
    cache_of = {"slots": TOP_K, "poison": True}
    layouts: list[BundleLayout] = []

    class Spied(SlotPool):
        left_out = -1

        def __init__(self, slots: dict[str, torch.Tensor], store: torch.Tensor, layout: BundleLayout) -> None:
            super().__init__(slots, store, layout)
            layouts.append(layout)
            if self.left_out >= 0:
                del self._rows[self.left_out]

    monkeypatch.setattr(loading, "SlotPool", Spied)
    assert ask(model, batches, cache_of) == reference
    assert {len(layout.parts) for layout in layouts} == {parts}
    for number, part in enumerate(layouts[0].parts):
        monkeypatch.setattr(Spied, "left_out", number)
        assert ask(model, batches, cache_of) != reference, part.name
