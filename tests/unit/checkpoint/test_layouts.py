"""Whole models in the layouts that are out there, and what `validate` tells of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import surgery

import zoo
from vvllm_msd.checkpoint import validate
from vvllm_shared.errors import CheckpointError, UnsupportedError

ZooModel = Callable[[str], Path]


@pytest.fixture
def copy(tmp_path: Path, zoo_model: ZooModel) -> ZooModel:
    def get(family: str) -> Path:
        return Path(shutil.copytree(zoo_model(family), tmp_path / family))

    return get


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_family_is_whole(family: str, zoo_model: ZooModel) -> None:
    model = zoo_model(family)
    config = json.loads((model / "config.json").read_text())
    found = validate(model)
    dense = config.get("first_k_dense_replace", 0)
    assert (found.path, found.model_type, found.architecture) == (model, family, config["architectures"][0])
    assert found.moe_layers == tuple(range(dense, found.layers))
    assert found.experts in {16, 32}
    assert found.top_k == config["num_experts_per_tok"]
    assert (found.dtype, found.quantization) == ("bfloat16", None)
    assert found.has_tokenizer
    assert found.has_chat_template
    assert found.warnings == ()


def test_bytes_are_those_of_the_files(zoo_model: ZooModel) -> None:
    found = validate(zoo_model("qwen3_moe"))
    assert found.expert_bytes == 3 * 64 * 32 * 2
    assert found.experts_bytes == 2 * 16 * found.expert_bytes
    _, data = surgery.read(found.path / "model.safetensors")
    assert found.total_bytes == len(data)


def test_shards_say_the_same_as_one_file(tmp_path: Path, zoo_model: ZooModel) -> None:
    whole = validate(zoo_model("glm4_moe"))
    split = validate(zoo.make("glm4_moe", tmp_path / "split", shards=4))
    assert (split.moe_layers, split.experts_bytes, split.total_bytes) == (
        whole.moe_layers,
        whole.experts_bytes,
        whole.total_bytes,
    )


def test_a_hub_snapshot_of_links_into_its_blobs(tmp_path: Path, copy: ZooModel) -> None:
    blobs = copy("olmoe").rename(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    assert validate(snapshot).warnings == ()


def test_a_files_header_is_all_that_is_read(copy: ZooModel) -> None:
    model = copy("gpt_oss")
    header, data = surgery.read(model / "model.safetensors")
    surgery.write(model / "model.safetensors", header, b"")
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(len(data) - 1, 2)  # a hole of the data's size
        file.write(b"\0")
    assert validate(model).total_bytes == len(data)


# All experts of a layer in one tensor


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj", "gate_up_proj_bias"])
def test_a_fused_tensor_for_another_number_of_experts(copy: ZooModel, part: str) -> None:
    model = copy("gpt_oss")
    name = f"model.layers.1.mlp.experts.{part}"

    def shrink(tensors: surgery.Tensors) -> None:
        dtype, (experts, *rest), data = tensors[name]
        tensors[name] = (dtype, [experts // 2, *rest], data[: len(data) // 2])

    surgery.edit(model / "model.safetensors", shrink)
    with pytest.raises(CheckpointError) as caught:
        validate(model)
    assert f"{name} in model.safetensors is BF16 [8, " in caught.value.sentence


def test_a_fused_bias_that_one_layer_lacks(copy: ZooModel) -> None:
    model = copy("gpt_oss")
    surgery.edit(model / "model.safetensors", surgery.drop(["model.layers.1.mlp.experts.down_proj_bias"]))
    with pytest.raises(CheckpointError, match=r"model\.layers\..*down_proj_bias for every expert"):
        validate(model)


def test_fused_and_single_tensors_in_one_layer(copy: ZooModel) -> None:
    model = copy("gpt_oss")
    extra: surgery.Tensors = {"model.layers.0.mlp.experts.3.up_proj.weight": ("U8", [1], b"x")}
    surgery.edit(model / "model.safetensors", lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj\.weight in model\.safetensors"):
        validate(model)


def test_mxfp4_blocks_and_scales(copy: ZooModel) -> None:
    model = copy("gpt_oss")

    def quantize(tensors: surgery.Tensors) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            del tensors[name]
            tensors[f"{name}_blocks"] = ("U8", [16, 8, 2, 16], b"\0" * 4096)
            tensors[f"{name}_scales"] = ("U8", [16, 8, 2], b"\0" * 256)

    surgery.edit(model / "model.safetensors", quantize)
    surgery.edit_json(
        model / "config.json", lambda config: config.update(quantization_config={"quant_method": "mxfp4"})
    )
    found = validate(model)
    assert found.quantization == "mxfp4"
    assert found.expert_bytes == 2 * (256 + 16) + (128 + 64) * 2
    surgery.edit(model / "model.safetensors", surgery.drop(["model.layers.0.mlp.experts.down_proj_scales"]))
    with pytest.raises(CheckpointError, match="down_proj_scales for every expert"):
        validate(model)


# Models inside models, and parts that do not run


def test_a_language_model_inside_another(copy: ZooModel) -> None:
    model = copy("qwen3_moe")
    text = json.loads((model / "config.json").read_text())
    outer = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
    (model / "config.json").write_text(
        json.dumps(outer | {"text_config": text, "vision_config": {"depth": 2}})
    )

    def nest(tensors: surgery.Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.blocks.0.mlp.experts.0.mystery"] = ("U8", [1], b"x")

    surgery.edit(model / "model.safetensors", nest)
    found = validate(model)
    assert found.architecture == "Qwen3VLMoeForConditionalGeneration"
    assert found.moe_layers == (0, 1)
    assert found.experts_bytes == 2 * 16 * found.expert_bytes


@pytest.mark.parametrize("prefix", ["model.layers.2.", "mtp.layers.0."])
def test_draft_layers_are_left_alone(copy: ZooModel, prefix: str) -> None:
    model = copy("qwen3_moe")
    tensors: surgery.Tensors = {f"{prefix}mlp.experts.0.up_proj.weight": ("U8", [1], b"x")}
    surgery.edit(model / "model.safetensors", lambda old: old.update(tensors))
    found = validate(model)
    assert found.moe_layers == (0, 1)
    assert [warning for warning in found.warnings if "not run" in warning] == (
        ["Layers 2 are not run: the model has 2 (draft layers?)."] if "layers.2" in prefix else []
    )


@pytest.mark.parametrize(
    ("config", "moe_layers"),
    [
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"mlp_only_layers": [0, 5]}, (1, 2, 3, 4)),
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"mlp_layer_types": ["dense", *["sparse"] * 5]}, (1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": None, "interleave_moe_layer_step": 3}, (2, 5)),
        ({"hybrid_override_pattern": "M-E*ME"}, (2, 5)),
        ({"layers_block_type": ["mamba", "moe", "attention"] * 2}, (1, 4)),
    ],
)
def test_rules_for_which_layers_have_experts(
    copy: ZooModel, config: dict[str, Any], moe_layers: tuple[int, ...]
) -> None:
    model = copy("qwen3_moe")
    surgery.edit_json(model / "config.json", lambda old: old.update(num_hidden_layers=6, **config))

    def spread(tensors: surgery.Tensors) -> None:
        experts = {n: t for n, t in tensors.items() if n.startswith("model.layers.1.mlp.")}
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]
        for layer in moe_layers:
            tensors.update({n.replace(".1.", f".{layer}.", 1): tensor for n, tensor in experts.items()})

    surgery.edit(model / "model.safetensors", spread)
    assert validate(model).moe_layers == moe_layers


# What is told, and what is only warned of


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": None}, None),
    ],
)
def test_the_quantization_is_named(copy: ZooModel, config: dict[str, Any], name: str | None) -> None:
    model = copy("qwen3_moe")
    surgery.edit_json(model / "config.json", lambda old: old.update(config))
    assert validate(model).quantization == name


@pytest.mark.parametrize("method", ["bitsandbytes", "gguf", "hqq"])
def test_a_quantization_that_vllm_does_not_serve(
    method: str, copy: ZooModel, record_parity: Callable[..., None]
) -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    from vvllm_msd.checkpoint.model_config import _NOT_SERVED

    assert _NOT_SERVED.isdisjoint(QUANTIZATION_METHODS)
    model = copy("qwen3_moe")
    surgery.edit_json(
        model / "config.json", lambda old: old.update(quantization_config={"quant_method": method})
    )
    with pytest.raises(
        UnsupportedError, match=f"quantised with {method}, which vLLM 0.32.0 does not"
    ) as refusal:
        validate(model)
    assert "vvllm-msd models" in refusal.value.hint
    record_parity("qwen3_moe", method, refused=refusal.value.sentence.partition(" is ")[2])


def test_a_layer_may_be_left_unquantized(copy: ZooModel) -> None:
    model = copy("qwen3_moe")

    def quantize_layer_1(tensors: surgery.Tensors) -> None:
        for name in [name for name in tensors if "layers.1.mlp.experts." in name]:
            _, shape, data = tensors[name]
            tensors[name] = ("F8_E4M3", shape, data[: len(data) // 2])
            tensors[f"{name}_scale_inv"] = ("F32", [1, 1], b"\0" * 4)

    surgery.edit(model / "model.safetensors", quantize_layer_1)
    assert validate(model).expert_bytes == 3 * 64 * 32 * 2  # of the larger layer


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_the_dtype_is_the_configs_or_the_tensors(copy: ZooModel, key: str | None) -> None:
    model = copy("qwen3_moe")
    surgery.edit_json(model / "config.json", lambda config: config.pop("dtype"))
    if key:
        surgery.edit_json(model / "config.json", lambda config: config.update({key: "float16"}))
    assert validate(model).dtype == ("float16" if key else "bfloat16")


def test_without_tokenizer_and_template(copy: ZooModel) -> None:
    model = copy("qwen3_moe")
    (model / "tokenizer.json").unlink()
    (model / "chat_template.jinja").unlink()
    found = validate(model)
    assert (found.has_tokenizer, found.has_chat_template) == (False, False)
    assert ["no tokenizer" in warning or "no chat template" in warning for warning in found.warnings] == [
        True
    ] * 2
    surgery.edit_json(model / "tokenizer_config.json", lambda config: config.update(chat_template="{{ x }}"))
    assert validate(model).has_chat_template


def test_code_in_the_directory_is_reported_and_not_run(copy: ZooModel, tmp_path: Path) -> None:
    model = copy("qwen3_moe")
    (model / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    surgery.edit_json(
        model / "config.json", lambda config: config.update(auto_map={"AutoConfig": "modeling_own.Own"})
    )
    warnings = validate(model).warnings
    assert any("modeling_own.py" in warning for warning in warnings)
    assert any("auto_map" in warning for warning in warnings)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_the_index_does_not_name_is_warned_of(tmp_path: Path) -> None:
    model = zoo.make("qwen3_moe", tmp_path / "model", shards=2)
    (model / "adapter.safetensors").write_bytes(b"not even read")
    assert validate(model).warnings == (
        "adapter.safetensors is not read: model.safetensors.index.json does not name it.",
    )
