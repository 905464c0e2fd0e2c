"""What belongs to an expert is found by looking, and what is not understood is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity import MEDIUM, SHORT, ask

from vvllm_pager import loading
from vvllm_pager.bundle import BundleLayout
from vvllm_pager.slot_pool import SlotPool
from vvllm_shared.errors import UnsupportedError

pytestmark = pytest.mark.engine


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


def test_tensors_that_only_the_kernel_holds_move_with_their_expert(toy_model: Callable[[str], Path]) -> None:
    model = toy_model("plain")
    paged = ask(model, [[SHORT], [MEDIUM]], {"slots": 5, "poison": True})
    assert paged == ask(model, [[SHORT], [MEDIUM]], None)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str]]:
    """The tensors that belong to an expert, layer by layer."""
    names: list[frozenset[str]] = []

    class Spied(SlotPool):
        def __init__(self, slots: dict[str, torch.Tensor], store: torch.Tensor, layout: BundleLayout) -> None:
            super().__init__(slots, store, layout)
            names.append(layout.names)

    monkeypatch.setattr(loading, "SlotPool", Spied)
    return names


@pytest.mark.parametrize(("variant", "read"), [("unread", False), ("held", True)])
def test_a_parameter_moves_where_something_reads_it(
    variant: str, read: bool, toy_model: Callable[[str], Path], moved: list[frozenset[str]]
) -> None:
    model = toy_model(variant)
    paged = ask(model, [[SHORT], [MEDIUM]], {"slots": 5, "poison": True})
    assert paged == ask(model, [[SHORT], [MEDIUM]], None)
    assert ["w2_weight_global_scale" in names for names in moved] == [read, read]


def test_experts_of_one_layer_may_have_another_format(
    toy_model: Callable[[str], Path], moved: list[frozenset[str]]
) -> None:
    model = toy_model("first")
    paged = ask(model, [[SHORT], [MEDIUM]], {"slots": 5, "poison": True})
    assert paged == ask(model, [[SHORT], [MEDIUM]], None)
    scales = "kernel.impl.fused_experts.toy_scales"
    assert [scales in names for names in moved] == [True, False]


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
    paged = ask(model, [[SHORT], [MEDIUM]], {"slots": 5, "poison": True})
    assert paged == ask(model, [[SHORT], [MEDIUM]], None)
    assert paged != ask(toy_model("plain"), [[SHORT], [MEDIUM]], None)


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
