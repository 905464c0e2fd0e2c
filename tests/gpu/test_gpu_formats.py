"""On a real GPU: families and formats of experts, in FULL decode graphs and without, give stock's tokens and logprobs;
and what a kernel reads of an expert moves with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from parity import ask
from tiny import BATCHES, EXPERTS, serving, sizes

from checkpoints import formats
from vvllm_pager import loading
from vvllm_pager.slot_pool import SlotPool

pytestmark = pytest.mark.gpu

Model = Callable[[str, str], Path]
OF_QWEN3_5 = ("bf16", "nvfp4_modelopt_mixed", "nvfp4_groups", "int4_groups")


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        *(("qwen3_moe", scheme) for scheme in ("bf16", "fp16", *sorted(formats.FORMATS))),
        *(
            (family, scheme)
            for family in ("glm4_moe", "mixtral", "olmoe", "qwen2_moe")
            for scheme in ("bf16", "int4", "nvfp4")
        ),
        *(("gpt_oss", scheme) for scheme in ("bf16", "mxfp4")),
        *(("deepseek_v2", scheme) for scheme in ("bf16", "awq")),
        *(("qwen3_5_moe", scheme) for scheme in OF_QWEN3_5),
        *(("gemma4", scheme) for scheme in ("bf16", "nvfp4")),
        ("qwen3_next", "bf16"),
    ],
)
def test_tokens_and_logprobs_equal_stock(
    family: str, scheme: str, model: Model, record_parity: Callable[..., None]
) -> None:
    """Slots = top_k (four requests take four rounds), 3 x top_k and a quarter; poison in every free slot."""
    path, arguments = model(family, scheme), serving(family, scheme)
    reference = ask(path, BATCHES, None, **arguments)
    for slots in sizes(family):
        assert ask(path, BATCHES, {"slots": slots, "poison": True}, **arguments) == reference, slots
    record_parity(family, scheme, slots=sizes(family), experts=EXPERTS)


@pytest.mark.parametrize("scheme", sorted(formats.FORMATS))
def test_tokens_and_logprobs_equal_stock_without_graphs(scheme: str, model: Model) -> None:
    path, arguments = model("qwen3_moe", scheme), serving("qwen3_moe", scheme) | {"enforce_eager": True}
    reference = ask(path, BATCHES, None, **arguments)
    assert ask(path, BATCHES, {"slots": 8, "poison": True}, **arguments) == reference


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_modelopt"])
def test_nvfp4_by_triton_equals_stock(scheme: str, model: Model, record_parity: Callable[..., None]) -> None:
    """Inputs are rounded to four bits as well, by one static scale for all experts."""
    path, arguments = model("qwen3_moe", scheme), serving("qwen3_moe", scheme) | {"moe_backend": "emulation"}
    reference = ask(path, BATCHES, None, **arguments)
    for slots in sizes("qwen3_moe"):
        assert ask(path, BATCHES, {"slots": slots, "poison": True}, **arguments) == reference, slots
    record_parity("qwen3_moe", f"{scheme}_emulation", slots=sizes("qwen3_moe"), experts=EXPERTS)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [*(("qwen3_moe", scheme) for scheme in ("bf16", *sorted(formats.FORMATS))), ("gpt_oss", "mxfp4")],
)
def test_an_expert_that_comes_without_one_of_its_tensors_is_seen(
    family: str, scheme: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is moved could stay behind. What is left out stays that of another expert: no poison, since vLLM's
    sampler ends the process when it meets NaN."""
    path, arguments = model(family, scheme), serving(family, scheme)
    batches, slots = [[[7]], [[9]]], {"slots": 4}
    reference = ask(path, batches, None, **arguments)
    monkeypatch.setattr(loading, "SlotPool", _Incomplete)
    assert ask(path, batches, slots, **arguments) == reference
    unseen = []
    for name in (parts := _Incomplete.parts):
        monkeypatch.setattr(_Incomplete, "left_out", name)
        if ask(path, batches, slots, **arguments) == reference:
            unseen.append(name)
    print(f"{family} {scheme} moves {parts}")
    assert not unseen, parts


class _Incomplete(SlotPool):
    """Slots into which *fill* brings all but one tensor of an expert."""

    left_out = ""
    parts: tuple[str, ...] = ()

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        type(self).parts = tuple(part.name for part in self.layout.parts)
        for part in self.layout.parts:
            if part.name == self.left_out:
                offsets = self.tiles[:, 2]
                others = (offsets < part.offset) | (offsets >= part.offset + part.nbytes)
                self.tiles = self.tiles[others].contiguous()
