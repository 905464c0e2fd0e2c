"""What an engine on a GPU is given besides: its kernel by the checkpoint's format, its graphs by the slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vvllm_msd.device_options import graph_options, moe_backend, quantization


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str = "") -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


INT4, FP4 = {"num_bits": 4, "type": "int"}, {"num_bits": 4, "type": "float"}
INT8, FP8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
MIXED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"weights": FP4}, "b": {"weights": FP8, "input_activations": FP8}},
}
DENSE = {"weights": FP8, "input_activations": FP8, "targets": [r"re:.*shared_experts\..*_proj$"]}
GROUPS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": DENSE, "b": {"weights": INT4, "targets": [r"re:.*\.experts\.\d+\..*"]}},
}


def layers(**algorithms: str) -> dict[str, Any]:
    """ModelOpt's several algorithms, by the name of the module in layer 0."""
    told = {f"model.layers.0.{name}": {"quant_algo": algorithm} for name, algorithm in algorithms.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": told}


@pytest.mark.parametrize(
    ("told", "backend"),
    [
        (None, "triton"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "triton"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "triton"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "marlin"),
        ({"quant_method": "fp8"}, "marlin"),
        ({"quant_method": "fbgemm_fp8"}, "triton"),
        ({"quant_method": "gptq", "bits": 4}, "marlin"),
        ({"quant_method": "awq", "bits": 4}, "marlin"),
        ({"quant_method": "mxfp4"}, "marlin"),
        (compressed(INT4, None, "pack-quantized"), "marlin"),
        (compressed(INT8, None, "pack-quantized"), "marlin"),
        (compressed(FP4, FP4, "nvfp4-pack-quantized"), "marlin"),
        (compressed(FP4, None, "mxfp4-pack-quantized"), "marlin"),
        (compressed(FP8, FP8, "float-quantized"), "triton"),
        (compressed(FP8, FP8 | {"dynamic": True, "strategy": "token"}, "float-quantized"), "triton"),
        (compressed(FP8, FP8 | {"dynamic": False, "strategy": "tensor"}, "float-quantized"), "triton"),
        (compressed(FP8, FP8 | {"dynamic": True, "strategy": "tensor"}, "float-quantized"), "marlin"),
        (compressed(INT8, INT8, "int-quantized"), "triton"),
        (compressed(INT4, INT8, "pack-quantized"), None),
        (compressed(FP8, FP8, "mxfp8-quantized"), None),
        (MIXED, None),
        (compressed(INT4, None) | {"ignore": ["lm_head", "model.layers.0.mlp.experts.0.up_proj"]}, None),
        (compressed(INT4, None) | {"ignore": ["re:.*shared_experts.*", "re:.*mlp.gate$"]}, "marlin"),
        (compressed(FP4, None) | {"ignore": ["mtp.layers.0.mlp.experts.3.up_proj"]}, "marlin"),
        ({"quant_method": "awq", "modules_to_not_convert": ["model.layers.0.mlp.experts"]}, None),
        ({"quant_method": "awq", "modules_to_not_convert": None}, "marlin"),
        (GROUPS, "marlin"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "marlin"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "nvfp4"}, "marlin"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "triton"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, None),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),
        (layers(q_proj="FP8", experts_0_up_proj="NVFP4", experts_1_up_proj="NVFP4"), "marlin"),
        (layers(q_proj="NVFP4", experts_0_up_proj="FP8", shared_experts="NVFP4"), "triton"),
        (layers(experts_0_up_proj="NVFP4", experts_1_up_proj="FP8"), None),
        (layers(q_proj="NVFP4"), None),
        ({"quant_method": "quark"}, None),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, None),
        ({}, None),
    ],
)
def test_the_kernel_of_each_format(told: dict[str, Any] | None, backend: str | None) -> None:
    assert moe_backend(told, fp8_units=True) == backend


@pytest.mark.parametrize("told", [{"quant_method": "fp8"}, compressed(FP8, FP8)])
def test_fp8_where_the_device_cannot_multiply_it(told: dict[str, Any]) -> None:
    assert moe_backend(told, fp8_units=False) == "marlin"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"config": {}}, None),
        ({"config": {"quantization_config": {"quant_method": "fp8"}}}, {"quant_method": "fp8"}),
        ({"config": {"text_config": {"compression_config": {"format": "x"}}}}, {"format": "x"}),
        (
            {"config": {}, "hf_quant_config": {"quantization": {"quant_algo": "NVFP4"}}},
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        ),
    ],
)
def test_where_a_checkpoint_says_its_quantization(
    files: dict[str, Any], found: dict[str, Any] | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert quantization(tmp_path) == found


def drafts(tokens: object) -> dict[str, Any]:
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": tokens}}


@pytest.mark.parametrize(
    ("engine", "slots", "requests", "sizes"),
    [
        ({}, 8, 4, [1, 2, 4]),
        ({}, 8, 1, [1]),
        ({}, 24, 3, [1, 2, 3]),
        ({}, 24, 64, [1, 2, 4, 8, 12]),
        (drafts(2), 24, 4, [3, 6, 12]),
        (drafts(2), 8, 4, [3]),
        (drafts("two"), 24, 4, [1, 2, 4]),
        ({"compilation_config": {"mode": 0}, "enforce_eager": False}, 8, 4, [1, 2, 4]),
    ],
)
def test_graphs_of_whole_requests(
    engine: dict[str, Any], slots: int, requests: int, sizes: list[int]
) -> None:
    assert graph_options(engine, slots, 8, requests) == {"cudagraph_capture_sizes": sizes}


def test_no_graph_where_not_even_one_request_with_its_drafts_fits() -> None:
    assert graph_options(drafts(4), 8, 8, 4) == {"enforce_eager": True}


@pytest.mark.parametrize(
    "engine",
    [
        {"enforce_eager": True},
        {"cudagraph_capture_sizes": [1]},
        {"max_cudagraph_capture_size": 2},
        {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}},
        {"compilation_config": "of vLLM's class"},
    ],
)
def test_what_the_user_says_of_graphs_stands(engine: dict[str, Any]) -> None:
    assert graph_options(engine, 24, 8, 4) == {}
