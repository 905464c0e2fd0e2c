"""Checkpoints in compressed-tensors' formats against its own decoder; what only a GPU runs is checked here alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import zoo
from checkpoints import formats

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN, WIDTH = 256, 128
SCHEMES = ("int4", "nvfp4")
FIRST, DOWN = ("gate_proj", "up_proj"), ("down_proj",)
MIXTRAL_FIRST, MIXTRAL_DOWN = ("w1", "w3"), ("w2",)


def load(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()}


def pair(tmp_path: Path, family: str, scheme: str, **overrides: Any) -> tuple[Path, Path]:
    shape = formats.SHAPE[family] | {"num_hidden_layers": 2} | overrides
    source = zoo.make(family, tmp_path / "source", **shape)
    return source, formats.quantize(source, tmp_path / "target", scheme)


def is_expert(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", sorted(formats.SHAPE.keys() - {"gpt_oss"}))
def test_only_the_experts_change(family: str, scheme: str, tmp_path: Path) -> None:
    source, target = pair(tmp_path, family, scheme)
    before, after = load(source), load(target)
    kept = {name for name in before if not is_expert(name)}
    assert kept == {name for name in after if not is_expert(name)}
    assert all(before[name].equal(after[name]) for name in kept)
    assert {path.name for path in source.iterdir()} == {path.name for path in target.iterdir()}

    config = json.loads((target / "config.json").read_text())
    ignored = config.pop("quantization_config")["ignore"]
    assert config == json.loads((source / "config.json").read_text())
    assert {"lm_head", "model.layers.1.self_attn.q_proj"} < set(ignored)
    assert not any(is_expert(name) for name in ignored)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_tensors_of_an_expert(family: str, scheme: str, tmp_path: Path) -> None:
    import torch

    _, target = pair(tmp_path, family, scheme)
    first, down = (MIXTRAL_FIRST, MIXTRAL_DOWN) if family == "mixtral" else (FIRST, DOWN)
    expected = {}
    for projection in first + down:
        n, k = (HIDDEN, WIDTH) if projection in down else (WIDTH, HIDDEN)
        suffixes: dict[str, Any] = {
            "int4": {
                "weight_packed": ((n, k // 8), torch.int32),
                "weight_scale": ((n, k // 64), torch.bfloat16),
                "weight_shape": ((2,), torch.int64),
            },
            "nvfp4": {
                "weight_packed": ((n, k // 2), torch.uint8),
                "weight_scale": ((n, k // 16), torch.float8_e4m3fn),
                "weight_global_scale": ((1,), torch.float32),
                "input_global_scale": ((1,), torch.float32),
            },
        }
        expected |= {f"{projection}.{suffix}": what for suffix, what in suffixes[scheme].items()}
    found = {
        name.split(".experts.3.")[1]: (tuple(tensor.shape), tensor.dtype)
        for name, tensor in load(target).items()
        if "layers.1." in name and ".experts.3." in name
    }
    assert found == expected


# The largest error in steps of one scale: half of the widest gap between two values (1 for integers; 2 in nvfp4, from
# 4 to 6), where a zero point is rounded another half, and a little for the rounded scale and for the decoder, which
# computes in bfloat16.
@pytest.mark.parametrize(
    ("scheme", "largest", "mean"),
    [("int4", 0.55, 0.12), ("int4_asymmetric", 1.05, 0.12), ("int8", 1.05, 0.02), ("nvfp4", 1.05, 0.12)],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_decoder_of_the_format_gives_the_weights_back(
    family: str, scheme: str, largest: float, mean: float, tmp_path: Path
) -> None:
    source, target = pair(tmp_path, family, scheme, num_hidden_layers=1)
    before, after = load(source), load(target)
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    for name in filter(is_expert, before):
        module = name.removesuffix(".weight")
        stored = {k.removeprefix(f"{module}."): v for k, v in after.items() if k.startswith(f"{module}.")}
        error = (decode(config, stored) - before[name].float()).abs()
        step = stored["weight_scale"].float() / stored.get("weight_global_scale", 1.0)
        steps = step.repeat_interleave(error.shape[1] // step.shape[1], dim=1)
        assert (error <= largest * steps).all(), name
        assert error.norm() < mean * before[name].float().norm(), name


def decode(config: dict[str, Any], stored: dict[str, Tensor]) -> Tensor:
    """The weight [n, k] float32 that `compressed_tensors` reads from one module's tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    weight: Tensor = compressor.decompress(stored, scheme)["weight"].float()
    return weight


def test_gate_and_up_share_their_global_scales(tmp_path: Path) -> None:
    _, target = pair(tmp_path, "qwen3_moe", "nvfp4")
    tensors = load(target)
    experts = {name.rsplit(".", 2)[0] for name in tensors if is_expert(name)}
    scales = {
        expert: [float(tensors[f"{expert}.{projection}.weight_global_scale"]) for projection in FIRST + DOWN]
        for expert in experts
    }
    assert all(gate == up != down for gate, up, down in scales.values())
    assert len({gate for gate, _, _ in scales.values()}) > len(experts) / 2


def test_shards_give_the_same_weights(tmp_path: Path) -> None:
    whole, parts = (
        load(
            formats.quantize(
                zoo.make("olmoe", tmp_path / f"{shards}", shards=shards, **formats.SHAPE["olmoe"]),
                tmp_path / f"{shards}-four-bits",
                "nvfp4",
            )
        )
        for shards in (1, 3)
    )
    assert whole.keys() == parts.keys()
    assert all(bits(whole[name]).equal(bits(parts[name])) for name in whole)


def bits(tensor: Tensor) -> Tensor:
    """Float8 has no `equal`."""
    import torch

    return tensor.view(torch.uint8)
