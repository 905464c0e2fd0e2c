"""Checkpoints of `zoo.make`, or of `layouts`, rewritten in the formats that people download.

`quantize` rounds the routed experts, and in formats whose tools do so the other linear layers, and leaves every other
tensor as it is. Keys of `quantization_config` are those of the tools that write such checkpoints: llm-compressor,
GPTQModel, AutoAWQ, ModelOpt, and the scripts of DeepSeek, Qwen and OpenAI.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import packing

# Marlin never pads the hidden size, a multiple of 128, and pads an expert's width to one of 64; a scale's group
# must not straddle it. Two groups of 64 along the width, so that no dimension of a scale is 1.
_HIDDEN = 256
_WIDTH = 128
SHAPE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": _HIDDEN, "moe_intermediate_size": _WIDTH},
    "qwen2_moe": {"hidden_size": _HIDDEN, "moe_intermediate_size": _WIDTH},
    "olmoe": {"hidden_size": _HIDDEN, "intermediate_size": _WIDTH},
    "glm4_moe": {"hidden_size": _HIDDEN, "moe_intermediate_size": _WIDTH},
    "mixtral": {"hidden_size": _HIDDEN, "intermediate_size": _WIDTH},
    "deepseek_v2": {"hidden_size": _HIDDEN, "moe_intermediate_size": _WIDTH, "intermediate_size": 256},
    "gpt_oss": {"hidden_size": _HIDDEN, "intermediate_size": _WIDTH},
}
"""Overrides for `zoo.make`, by family: shapes that the kernels compute as they are. The zoo's own are too small."""

Matrices = dict[str, Tensor]
"""Of one expert or one block: projection to weight [n, k]."""

_EXPERT = re.compile(r"(?P<block>.+\.experts\.\d+)\.(?P<projection>\w+)\.weight")
_DENSE = re.compile(
    r"(?P<block>.+\.layers\.\d+\.(?:self_attn|mlp|mlp\.shared_experts?))\.(?P<projection>\w+_proj\w*)\.weight"
)
_DOWN = ("down_proj", "w2")
_GROUP = 64
_BLOCK = 128
_LARGEST_INPUT = 16.0
"""Nothing is calibrated here."""
_INPUT_BY_WEIGHT = 30.0
"""The largest input of an expert by its largest weight: so they differ, as calibration finds them."""


@dataclass(frozen=True)
class Format:
    """How a tool writes a checkpoint."""

    pack: Callable[[Matrices], packing.Packed]
    """Of a block's matrices: `projection.end` to tensor."""
    config: Callable[[list[str], list[str]], dict[str, Any]]
    """`quantization_config`, by the names of the modules that are quantised, and of those that are not."""
    dense: Callable[[Matrices], packing.Packed] | None = None
    """As `pack`, for linear layers other than experts; None leaves them."""


def quantize(source: Path, target: Path, scheme: str) -> Path:
    """Write into `target` the checkpoint of `source` in the format `scheme`, one of `FORMATS` or "mxfp4".

    Args:
        source: of `zoo.make(family, ..., **SHAPE[family])`, in any number of shards.
        target: made if missing; its weights are one file, whatever `source` has.

    Returns:
        `target`.
    """
    tensors = {k: v for path in sorted(source.glob("*.safetensors")) for k, v in load_file(path).items()}
    written, config = _fused_mxfp4(tensors) if scheme == "mxfp4" else _by_module(tensors, FORMATS[scheme])
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if not path.name.startswith("model") and path.name != "config.json":
            shutil.copy2(path, target / path.name)
    save_file(written, target / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (target / "config.json").write_text(json.dumps(whole, indent=2))
    if config["quant_method"] == "modelopt":
        told = {key: value for key, value in config.items() if key not in ("quant_method", "producer")}
        told["exclude_modules"] = told.pop("ignore")
        legacy = {"producer": config["producer"], "quantization": told}
        (target / "hf_quant_config.json").write_text(json.dumps(legacy, indent=2))
    return target


def _by_module(tensors: Mapping[str, Tensor], form: Format) -> tuple[dict[str, Tensor], dict[str, Any]]:
    blocks: dict[str, Matrices] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name) or (_DENSE.fullmatch(name) if form.dense else None)
        if match is None:
            others[name] = tensor
        else:
            blocks.setdefault(match["block"], {})[match["projection"]] = tensor
    written = dict(others)
    for block, matrices in blocks.items():
        pack = form.pack if _EXPERT.fullmatch(f"{block}.x.weight") else form.dense
        assert pack is not None
        written |= {f"{block}.{end}": tensor for end, tensor in pack(matrices).items()}
    quantized = [f"{block}.{projection}" for block, matrices in blocks.items() for projection in matrices]
    # Unfused names, each on its own, as the tools list them: vLLM asks for all parts of a fused layer.
    left = {name.removesuffix(".weight") for name, tensor in others.items() if tensor.dim() == 2}
    # Even of those that a layer whose keys are its values does not have.
    left |= {name.replace("k_proj", "v_proj") for name in left}
    return written, form.config(sorted(quantized), sorted(left))


def _fused_mxfp4(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """gpt-oss: stacks [E, k, n] of all experts become blocks and scales [E, n, k / 32], beside their biases."""
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if re.search(r"\.experts\.(gate_up|down)_proj$", name):
            written[f"{name}_blocks"], written[f"{name}_scales"] = packing.mxfp4(tensor.transpose(1, 2))
        else:
            written[name] = tensor
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return written, {"quant_method": "mxfp4", "modules_to_not_convert": left}


def _each(pack: Callable[[Tensor], packing.Packed]) -> Callable[[Matrices], packing.Packed]:
    """A format in which no matrix knows of another."""

    def block(matrices: Matrices) -> packing.Packed:
        packed = {projection: pack(weight) for projection, weight in matrices.items()}
        return {f"{p}.{end}": tensor for p, tensors in packed.items() for end, tensor in tensors.items()}

    return block


def _sharing(pack: Callable[[Tensor, float, float], packing.Packed]) -> Callable[[Matrices], packing.Packed]:
    """A format in which matrices that vLLM fuses share a global scale: an expert's gate and up projection.

    Args:
        pack: of a weight, and the largest weight and input of all that share.
    """

    def block(matrices: Matrices) -> packing.Packed:
        packed: packing.Packed = {}
        for projection, weight in matrices.items():
            fused = [w for p, w in matrices.items() if (p in _DOWN) == (projection in _DOWN)]
            largest = max(float(w.abs().max()) for w in fused)
            tensors = pack(weight, largest, _INPUT_BY_WEIGHT * largest)
            packed |= {f"{projection}.{end}": tensor for end, tensor in tensors.items()}
        return packed

    return block


def _group(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, targets: str = "Linear"
) -> dict[str, Any]:
    return {
        "format": form,
        "targets": [targets],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def _compressed(*groups: dict[str, Any]) -> Any:
    form = groups[0]["format"] if len(groups) == 1 else "mixed-precision"

    def config(_quantized: list[str], left: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": form,
            "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
            "kv_cache_scheme": None,
            "ignore": left,
        }

    return config


def _args(bits: int, kind: str, strategy: str, group: int | None, **more: Any) -> dict[str, Any]:
    args = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    return args | ({} if group is None else {"group_size": group}) | more


def _gptq_config(_quantized: list[str], _left: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": _GROUP,
        "sym": True,
        "desc_act": False,
        "true_sequential": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "damp_percent": 0.01,
    }


def _awq_config(_quantized: list[str], _left: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": _GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def _fp8_config(**more: Any) -> Any:
    def config(_quantized: list[str], left: list[str]) -> dict[str, Any]:
        told = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return told | more | {"modules_to_not_convert": left}

    return config


def _modelopt_config(algorithm: str, **more: Any) -> Any:
    def config(_quantized: list[str], left: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "kv_cache_scheme": None,
            "producer": {"name": "modelopt", "version": "0.39.0"},
            "ignore": left,
            **more,
        }

    return config


def _mixed_config(quantized: list[str], left: list[str]) -> dict[str, Any]:
    """ModelOpt's own list of what is what, by module."""
    layers = {
        name: {"quant_algo": "NVFP4", "group_size": 16} if ".experts." in name else {"quant_algo": "FP8"}
        for name in quantized
    }
    return _modelopt_config("MIXED_PRECISION", quantized_layers=layers)(quantized, left)


_gptq = _each(lambda weight: packing.gptq(weight, _GROUP))
_awq = _each(lambda weight: packing.awq(weight, _GROUP))
_int4 = _each(lambda weight: packing.compressed_int4(weight, _GROUP, symmetric=True))
_nvfp4 = _sharing(packing.compressed_nvfp4)
_modelopt_nvfp4 = _sharing(packing.modelopt_nvfp4)
_INT4 = _args(4, "int", "group", _GROUP, actorder=None)
_NVFP4 = _args(4, "float", "tensor_group", 16)
# For activations of four bits, as most published checkpoints are: Marlin takes them and keeps bfloat16.
_NVFP4_INPUTS = _NVFP4 | {"dynamic": "local"}
_EXPERTS = r"re:.*\.experts\.\d+\..*"
_FP8_DENSE = _group(
    "float-quantized",
    _args(8, "float", "channel", None),
    _args(8, "float", "token", None, dynamic=True),
    r"re:.*(self_attn|shared_expert)\..*_proj$",
)

FORMATS: dict[str, Format] = {
    "int4": Format(_int4, _compressed(_group("pack-quantized", _INT4))),
    "int4_asymmetric": Format(
        _each(lambda weight: packing.compressed_int4(weight, _GROUP, symmetric=False)),
        _compressed(_group("pack-quantized", _INT4 | {"symmetric": False})),
    ),
    "int4_groups": Format(
        _int4,
        _compressed(_group("pack-quantized", _INT4, targets=_EXPERTS), _FP8_DENSE),
        _each(packing.compressed_fp8),
    ),
    "int8": Format(
        _each(packing.compressed_int8),
        _compressed(
            _group(
                "int-quantized",
                _args(8, "int", "channel", None),
                _args(8, "int", "token", None, dynamic=True),
            )
        ),
    ),
    "nvfp4": Format(_nvfp4, _compressed(_group("nvfp4-pack-quantized", _NVFP4, _NVFP4_INPUTS))),
    "nvfp4_groups": Format(
        _nvfp4,
        _compressed(_group("nvfp4-pack-quantized", _NVFP4, _NVFP4_INPUTS, _EXPERTS), _FP8_DENSE),
        _each(packing.compressed_fp8),
    ),
    "nvfp4_modelopt_mixed": Format(
        _modelopt_nvfp4, _mixed_config, _each(lambda weight: packing.fp8_tensor(weight, _LARGEST_INPUT))
    ),
    "nvfp4_modelopt": Format(_modelopt_nvfp4, _modelopt_config("NVFP4", group_size=16)),
    "gptq": Format(_gptq, _gptq_config, _gptq),
    "awq": Format(_awq, _awq_config, _awq),
    "fp8_block": Format(
        _each(lambda weight: packing.fp8_block(weight, _BLOCK)),
        _fp8_config(weight_block_size=[_BLOCK, _BLOCK]),
    ),
    "fp8": Format(_each(lambda weight: packing.fp8_tensor(weight, None)), _fp8_config()),
    "fp8_static": Format(
        _sharing(lambda weight, _, largest_input: packing.fp8_tensor(weight, largest_input)),
        _fp8_config(activation_scheme="static"),
    ),
}
"""By name."""
