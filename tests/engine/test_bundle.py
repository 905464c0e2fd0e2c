"""What belongs to an expert is found by looking, and what is not understood is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity import MEDIUM, SHORT, ask

from vvllm_msd.verify_engine import Answer
from vvllm_pager import loading
from vvllm_pager.bundle import BundleLayout
from vvllm_pager.slot_pool import SlotPool
from vvllm_shared.errors import UnsupportedError

pytestmark = pytest.mark.engine

BATCHES = [[SHORT], [MEDIUM]]
SCALES = "kernel.impl.fused_experts.toy_scales"


@pytest.fixture
def toy_model(zoo_model: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A tiny model that says it is quantised the toy way."""
    import toy_quant

    def make(variant: str) -> Path:
        model = shutil.copytree(zoo_model("qwen3_moe"), tmp_path / variant)
        config = json.loads((model / "config.json").read_text())
        config["quantization_config"] = {"quant_method": toy_quant.NAME, "variant": variant}
        (model / "config.json").write_text(json.dumps(config))
        return model

    return make


@pytest.fixture(scope="module")
def stock(zoo_model: Callable[[str], Path]) -> list[Answer]:
    """Of the model as it was drawn: the toy way gives it back exactly."""
    return ask(zoo_model("qwen3_moe"), BATCHES, None)


@pytest.mark.parametrize(
    ("variant", "name", "expected"),
    [
        ("plain", SCALES, [True, True]),
        ("first", SCALES, [True, False]),  # the other layer's experts have another format
        ("unread", "w2_weight_global_scale", [False, False]),
        ("held", "w2_weight_global_scale", [True, True]),
        ("zeros", "w13_zero_point", [True, True]),
        ("symmetric", "w13_zero_point", [False, False]),
    ],
)
def test_what_the_kernel_reads_moves_with_its_expert_and_nothing_else(
    variant: str,
    name: str,
    expected: list[bool],
    toy_model: Callable[[str], Path],
    stock: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layer by layer, whoever holds it: not what is read by nobody, or the same for all experts."""
    moved: list[bool] = []

    class Spied(SlotPool):
        def __init__(self, slots: dict[str, torch.Tensor], store: torch.Tensor, layout: BundleLayout) -> None:
            super().__init__(slots, store, layout)
            moved.append(name in layout.names)

    monkeypatch.setattr(loading, "SlotPool", Spied)
    assert ask(toy_model(variant), BATCHES, {"slots": 5, "poison": True}) == stock
    assert moved == expected


def test_a_static_scale_of_inputs_is_that_of_all_experts(toy_model: Callable[[str], Path]) -> None:
    """As in FP8: the largest of the layer, whichever chunk its expert is in. Powers of two, so that they are exact."""
    from safetensors.torch import load_file, save_file

    model = toy_model("static")
    tensors = load_file(model / "model.safetensors")
    for layer, largest in ((0, 3), (1, 12)):
        for expert in range(16):
            name = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.input_scale"
            tensors[name] = torch.tensor(2.0 if expert == largest else 0.5**expert)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    paged = ask(model, BATCHES, {"slots": 5, "poison": True})
    assert paged == ask(model, BATCHES, None)
    assert paged != ask(toy_model("plain"), BATCHES, None)


@pytest.mark.parametrize(
    ("variant", "sentence"),
    [
        ("reduction", "toy_maximum of ToyMoEMethod depends on which experts are processed together"),
        ("relative", "toy_relative of ToyMoEMethod depends on which experts are processed together"),
        ("opaque", "holds torch._C.Generator at kernel.impl.fused_experts.toy_opaque"),
        ("transposed", "toy_transposed of ToyMoEMethod has shape"),
    ],
)
def test_what_is_not_understood_is_refused(
    variant: str, sentence: str, toy_model: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.experts") as refusal:
        ask(toy_model(variant), [[SHORT]], {"slots": 5})
    assert sentence in refusal.value.sentence
    assert "moe_backend" in refusal.value.hint


def test_a_reduction_that_the_first_experts_hide_is_refused(toy_model: Callable[[str], Path]) -> None:
    """The largest expert is the first: every small chunk from the start has the same maximum, later ones have not."""
    from safetensors.torch import load_file, save_file

    model = toy_model("reduction")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.down_proj.weight"] *= 64
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match="toy_maximum of ToyMoEMethod depends on which experts"):
        ask(model, [[SHORT]], {"slots": 5})
