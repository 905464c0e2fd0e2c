"""Damaged copies of a good model: each damage is refused, and the message names the file and the tensor."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import surgery
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from vvllm_msd.checkpoint import Checkpoint, validate
from vvllm_shared.errors import CheckpointError, UnsupportedError, VvllmError

EXPERT = "model.layers.1.mlp.experts.11"
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path, zoo_model: Callable[[str], Path]) -> Path:
    return Path(shutil.copytree(zoo_model("qwen3_moe"), tmp_path / "model"))


@pytest.fixture(scope="session")
def sharded_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.make("qwen3_moe", tmp_path_factory.mktemp("zoo") / "sharded", shards=3)


@pytest.fixture
def sharded(tmp_path: Path, sharded_original: Path) -> Path:
    return Path(shutil.copytree(sharded_original, tmp_path / "sharded"))


def refused(model: Path, *parts: str, error: type[VvllmError] = CheckpointError) -> str:
    """Validate; the sentence must contain each of `parts`."""
    with pytest.raises(error) as caught:
        validate(model)
    sentence = caught.value.sentence
    assert all(part in sentence for part in parts), sentence
    assert caught.value.hint
    assert sentence.endswith(".")
    return sentence


# The directory and its configuration


def test_a_missing_directory(tmp_path: Path) -> None:
    refused(tmp_path / "none", str(tmp_path / "none"), "does not exist")


def test_a_file_in_place_of_the_directory(model: Path) -> None:
    refused(model / "config.json", "config.json is not a directory")


@pytest.mark.parametrize("forbidden", [".", "config.json", "model.safetensors"])
def test_what_may_not_be_read(model: Path, forbidden: str) -> None:
    # A child that is no longer root, if this is: the permissions of files mean nothing to root.
    for folder in (model, *list(model.parents)[:3]):
        folder.chmod(0o755)
    for file in model.iterdir():
        file.chmod(0o644)
    (model / forbidden).chmod(0)
    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            validate(model)
        except CheckpointError as error:
            os.write(sender, error.sentence.encode())
        finally:
            os._exit(0)
    os.close(sender)
    with open(receiver) as answer:
        sentence = answer.read()
    os.waitpid(child, 0)
    (model / forbidden).chmod(0o755)
    assert "cannot be read: Permission denied" in sentence
    assert (str(model) if forbidden == "." else forbidden) in sentence


def test_config_missing(model: Path) -> None:
    (model / "config.json").unlink()
    refused(model, "config.json is missing")


@pytest.mark.parametrize(
    ("text", "says"), [("{", "is not JSON"), ("\xff", "is not JSON"), ("[]", "no JSON object")]
)
def test_config_is_no_json_object(model: Path, text: str, says: str) -> None:
    (model / "config.json").write_text(text, encoding="latin-1")
    refused(model, "config.json", says)


def test_not_a_mixture_of_experts(model: Path) -> None:
    surgery.edit_json(model / "config.json", lambda config: config.pop("num_local_experts"))
    refused(
        model, str(model), "is not a Mixture-of-Experts model", "Qwen3MoeForCausalLM", error=UnsupportedError
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_local_experts": "16"}, "impossible value '16' for num_local_experts"),
        ({"num_local_experts": -1}, "impossible value '-1' for num_local_experts"),
        ({"num_local_experts": 10**9}, "impossible value"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        ({"num_experts_per_tok": 17}, "17 experts per token but only 16 experts"),
        ({"decoder_sparse_step": 0}, "impossible rule"),
        ({"mlp_only_layers": 3}, "impossible rule"),
        ({"mlp_layer_types": ["sparse"]}, "impossible rule"),
    ],
)
def test_config_contradicts_itself(model: Path, changes: dict[str, Any], says: str) -> None:
    surgery.edit_json(model / "config.json", lambda config: config.update(changes))
    refused(model, "config.json", says)


# Which files there are


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused(model, str(model), "has no *.safetensors file")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.gguf"])
def test_weights_in_another_format_are_never_opened(model: Path, name: str) -> None:
    (model / "model.safetensors").rename(model / name)
    refused(model, name, "safetensors alone", error=UnsupportedError)


def test_the_index_names_a_missing_shard(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    refused(sharded, INDEX, SHARDS[1])


def test_a_shard_is_missing_and_there_is_no_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / SHARDS[2]).unlink()
    refused(sharded, "lacks", SHARDS[2])


def test_a_link_to_nothing_as_an_interrupted_download_leaves_it(sharded: Path) -> None:
    (sharded / SHARDS[0]).unlink()
    (sharded / SHARDS[0]).symlink_to("../../blobs/0123456789")
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]} is missing") as caught:
        validate(sharded)
    assert "../../blobs/0123456789" in caught.value.hint


@pytest.mark.parametrize("cut", [1, 1000, 1 << 17])
def test_a_truncated_shard(sharded: Path, cut: int) -> None:
    path = sharded / SHARDS[1]
    header, data = surgery.read(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    needed = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    refused(sharded, SHARDS[1], "is truncated", str(needed), str(len(data) - cut))


def test_a_garbage_header(sharded: Path) -> None:
    path = sharded / SHARDS[2]
    raw = bytearray(path.read_bytes())
    raw[200] ^= 0x80
    path.write_bytes(raw)
    refused(sharded, SHARDS[2], "has a damaged header")


def test_an_index_without_a_map(sharded: Path) -> None:
    (sharded / INDEX).write_text("{}")
    refused(sharded, INDEX, "has no weight_map")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "x.bin", 7, "\x1b.safetensors"])
def test_an_index_that_leads_out_of_the_directory(sharded: Path, file: object) -> None:
    surgery.edit_json(sharded / INDEX, lambda index: index["weight_map"].update(x=file))
    assert refused(sharded, INDEX, "'x'").isprintable()


def test_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    name = next(iter(surgery.tensors_of(sharded / SHARDS[0])))
    surgery.edit(sharded / SHARDS[0], surgery.drop([name]))
    refused(sharded, INDEX, SHARDS[0], name)


def test_a_tensor_that_the_index_lacks(sharded: Path) -> None:
    name = next(iter(surgery.tensors_of(sharded / SHARDS[0])))
    surgery.edit_json(sharded / INDEX, lambda index: index["weight_map"].pop(name))
    refused(sharded, INDEX, SHARDS[0], name)


def test_a_tensor_in_two_files(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    shutil.copy(sharded / SHARDS[0], sharded / "copy.safetensors")
    refused(sharded, SHARDS[0], "copy.safetensors", "is in two files")


# One expert


def edit(model: Path, change: Callable[[surgery.Tensors], object]) -> None:
    surgery.edit(model / "model.safetensors", change)


def test_one_tensor_of_one_expert_is_missing(model: Path) -> None:
    edit(model, surgery.drop([f"{EXPERT}.up_proj.weight"]))
    refused(model, "model.safetensors", "Layer 1 expert 11: up_proj.weight is missing;", EXPERT)


def test_one_whole_expert_is_missing(model: Path) -> None:
    edit(model, lambda tensors: surgery.drop([n for n in tensors if n.startswith(f"{EXPERT}.")])(tensors))
    refused(model, "Layer 1 expert 11: all tensors", f"{EXPERT}.* are missing.")


def test_half_of_the_experts_are_missing(model: Path) -> None:
    surgery.edit_json(model / "config.json", lambda config: config.update(num_local_experts=32))
    refused(model, "Layer 0 expert 16", "and 15 more experts")


def test_more_experts_than_the_config_says(model: Path) -> None:
    surgery.edit_json(model / "config.json", lambda config: config.update(num_local_experts=8))
    refused(model, "model.safetensors", "experts.15.", "config.json says 8 experts")


def test_a_tensor_of_half_the_rows(model: Path) -> None:
    def halve(tensors: surgery.Tensors) -> None:
        dtype, (rows, columns), data = tensors[f"{EXPERT}.up_proj.weight"]
        tensors[f"{EXPERT}.up_proj.weight"] = (dtype, [rows // 2, columns], data[: len(data) // 2])

    edit(model, halve)
    refused(
        model, f"{EXPERT}.up_proj.weight in model.safetensors is BF16 [16, 64]", "siblings are BF16 [32, 64]"
    )


def test_a_tensor_of_another_dtype(model: Path) -> None:
    def retype(tensors: surgery.Tensors) -> None:
        _, shape, data = tensors[f"{EXPERT}.down_proj.weight"]
        tensors[f"{EXPERT}.down_proj.weight"] = ("F16", shape, data)

    edit(model, retype)
    refused(model, f"{EXPERT}.down_proj.weight in model.safetensors is F16 [64, 32]")


@pytest.mark.parametrize("tail", ["mystery.weight", "up_proj.mystery", "weight", "up_projection.weight"])
def test_an_unknown_tensor_among_an_experts_own(model: Path, tail: str) -> None:
    edit(model, lambda tensors: tensors.update({f"{EXPERT}.{tail}": ("U8", [1], b"x")}))
    refused(model, "model.safetensors", f"{EXPERT}.{tail}", "no expert is known to have")


def add_scales(tensors: surgery.Tensors) -> None:
    for name in list(tensors):
        if ".experts." in name and name.endswith(".weight"):
            tensors[f"{name}_scale"] = ("F32", [1], b"\0\0\x80\x3f")


def test_a_scale_that_one_expert_lacks(model: Path) -> None:
    edit(model, add_scales)
    assert validate(model).expert_bytes == 3 * 32 * 64 * 2 + 3 * 4
    edit(model, surgery.drop([f"{EXPERT}.gate_proj.weight_scale"]))
    refused(model, "model.safetensors", "Layer 1 expert 11: gate_proj.weight_scale is missing")


def test_a_bias_that_only_one_expert_has(model: Path) -> None:
    edit(model, lambda tensors: tensors.update({f"{EXPERT}.gate_proj.bias": ("BF16", [32], b"\0" * 64)}))
    refused(model, "model.safetensors", f"{EXPERT}.gate_proj.bias", "only 1 of 16 experts")


# Whole layers


def of_layer(tensors: surgery.Tensors, layer: int, part: str = "") -> list[str]:
    return [name for name in tensors if f"layers.{layer}.mlp.experts." in name and part in name]


def test_a_layer_without_experts(model: Path) -> None:
    edit(model, lambda tensors: surgery.drop(of_layer(tensors, 1))(tensors))
    refused(model, "Layer 1 has no expert in any file, but it has a router")


def test_a_layer_without_experts_and_router(model: Path) -> None:
    edit(
        model,
        lambda tensors: surgery.drop([*of_layer(tensors, 1), "model.layers.1.mlp.gate.weight"])(tensors),
    )
    refused(model, "Layer 1 has no expert in any file, but config.json says")


def test_a_layer_with_experts_that_should_be_dense(model: Path) -> None:
    surgery.edit_json(model / "config.json", lambda config: config.update(mlp_only_layers=[1]))
    refused(model, "Layer 1 has no", error=CheckpointError) if False else refused(
        model, "Layer 1 has experts"
    )


def test_a_layer_whose_experts_all_lack_a_projection(model: Path) -> None:
    edit(model, lambda tensors: surgery.drop(of_layer(tensors, 1, "up_proj"))(tensors))
    refused(model, "Layer", "model.layers.", "up_proj for every expert")


def test_scales_without_their_weights(model: Path) -> None:
    edit(model, add_scales)
    edit(model, lambda tensors: surgery.drop(of_layer(tensors, 0, "down_proj.weight"))(tensors))
    edit(model, lambda tensors: tensors.update(lost_scales()))
    refused(model, "Layer 0: the weight of model.layers.0.mlp.experts.*.down_proj is missing")


def lost_scales() -> surgery.Tensors:
    name = "model.layers.0.mlp.experts.{}.down_proj.weight_scale"
    return {name.format(expert): ("F32", [1], b"\0" * 4) for expert in range(16)}


def test_a_layer_whose_experts_all_lack_a_scale(model: Path) -> None:
    edit(model, add_scales)
    edit(model, lambda tensors: surgery.drop(of_layer(tensors, 1, "up_proj.weight_scale"))(tensors))
    refused(model, "Layer", "up_proj.weight_scale for every expert")


def test_no_tensor_is_named_as_an_experts(model: Path) -> None:
    def rename(tensors: surgery.Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name.replace(".experts.", ".specialists.")] = tensors.pop(name)

    edit(model, rename)
    refused(model, "Qwen3MoeForCausalLM", "is named as an expert's", error=UnsupportedError)


# Whatever the files say


@settings(max_examples=150, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from(
            [
                "num_local_experts",
                "num_experts_per_tok",
                "num_hidden_layers",
                "mlp_only_layers",
                "decoder_sparse_step",
                "moe_layer_freq",
                "first_k_dense_replace",
                "mlp_layer_types",
                "text_config",
                "architectures",
                "model_type",
                "dtype",
                "quantization_config",
            ]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers(-2, 20) | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
            ),
            max_leaves=4,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_no_config_raises_anything_else(changes: dict[str, object], fuzzed_model: Path) -> None:
    config = json.loads((fuzzed_model / "original.json").read_text())
    (fuzzed_model / "config.json").write_text(json.dumps(config | changes))
    try:
        assert isinstance(validate(fuzzed_model), Checkpoint)
    except (CheckpointError, UnsupportedError) as error:
        assert error.sentence.isprintable()  # noqa: PT017 - nothing has to be raised


@pytest.fixture(scope="module")
def fuzzed_model(tmp_path_factory: pytest.TempPathFactory, zoo_model: Callable[[str], Path]) -> Path:
    model = Path(shutil.copytree(zoo_model("qwen3_moe"), tmp_path_factory.mktemp("fuzzed") / "model"))
    shutil.copy(model / "config.json", model / "original.json")
    return model


def test_fifty_thousand_tensors_take_less_than_three_seconds(model: Path) -> None:
    layers, experts = 66, 256
    config = {"num_local_experts": experts, "num_hidden_layers": layers}
    surgery.edit_json(model / "config.json", lambda old: old.update(config))
    tensors: surgery.Tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": ("BF16", [0, 64], b"")
        for layer in range(layers)
        for expert in range(experts)
        for part in ("gate", "up", "down")
    }
    surgery.save(model / "model.safetensors", tensors)
    start = time.process_time()  # not the wall's: other tests may have the cores
    assert len(validate(model).moe_layers) == layers
    assert len(tensors) > 50_000
    assert time.process_time() - start < 3
