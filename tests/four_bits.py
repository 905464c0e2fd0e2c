"""Tiny checkpoints with routed experts of four bits, in the compressed-tensors format that vLLM reads.

`quantize` rounds the experts of a model of `zoo.make` and leaves every other tensor as it is. They are for GPUs
and vLLM's Marlin kernels: ask for `moe_backend="marlin"`, since at capability 9.0 vLLM prefers Humming where
that is installed.

The formats are those of llm-compressor's checkpoints: `compressed_tensors/compressors/{pack_quantized,nvfp4}`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

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
}
"""Overrides for `zoo.make`, by family: shapes that Marlin computes as they are. The zoo's own are too small."""

_EXPERT = re.compile(r"(?P<expert>.+\.experts\.\d+)\.(?P<projection>\w+)\.weight")
_DOWN = ("down_proj", "w2")

_INT4_GROUP = 64
_NVFP4_GROUP = 16
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between 0, 0.5, 1, 1.5, 2, 3, 4 and 6
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
# Nothing is calibrated here, and Marlin does not read it: activations stay bfloat16.
_LARGEST_INPUT = 16.0


def quantize(source: Path, target: Path, scheme: str) -> Path:
    """Write into `target` the checkpoint of `source` with its routed experts in four bits.

    Each expert's matrix `weight` bfloat16 [n, k] becomes, in

    - "int4": `weight_packed` int32 [n, k / 8], `weight_scale` bfloat16 [n, k / 64], `weight_shape` int64 [2];
      symmetric, weight only.
    - "nvfp4": `weight_packed` uint8 [n, k / 2], `weight_scale` float8_e4m3fn [n, k / 16], `weight_global_scale`
      and `input_global_scale` float32 [1]. An expert's gate and up projection share the global scales, as vLLM,
      which fuses them, demands.

    Args:
        source: of `zoo.make(family, ..., **SHAPE[family])`, in any number of shards.
        target: made if missing; its weights are one file, whatever `source` has.
        scheme: "int4" or "nvfp4".

    Returns:
        `target`.
    """
    from safetensors.torch import save_file

    pack, args = _SCHEMES[scheme]
    experts, others = _read(source)
    packed = {
        f"{expert}.{name}": tensor
        for expert, matrices in experts.items()
        for name, tensor in pack(matrices).items()
    }
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if not path.name.startswith("model") and path.name != "config.json":
            shutil.copy2(path, target / path.name)
    save_file(others | packed, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = args | _everything_but_experts(others)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def _read(source: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """By name: each routed expert's matrices by projection, and all the other tensors."""
    from safetensors.torch import load_file

    experts: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if match := _EXPERT.fullmatch(name):
                experts.setdefault(match["expert"], {})[match["projection"]] = tensor
            else:
                others[name] = tensor
    return experts, others


def _everything_but_experts(others: dict[str, Tensor]) -> dict[str, list[str]]:
    """Unfused names, each on its own, as llm-compressor lists them: vLLM asks for all parts of a fused layer."""
    matrices = (name for name, tensor in others.items() if tensor.dim() == 2)
    return {"ignore": sorted(name.removesuffix(".weight") for name in matrices)}


def _int4(expert: dict[str, Tensor]) -> dict[str, Tensor]:
    import torch

    packed: dict[str, Tensor] = {}
    for projection, weight in expert.items():
        groups = weight.float().unflatten(1, (-1, _INT4_GROUP))
        # The 16 values -8 to 7 span 15 steps.
        scale = (groups.abs().amax(dim=2) / 7.5).bfloat16()
        values = (groups / scale.float().unsqueeze(2)).round().clamp(-8, 7).flatten(1)
        # Stored with an offset of 8; the first of eight values lies in the lowest bits.
        nibbles = (values.to(torch.int64) + 8).unflatten(1, (-1, 8))
        words = (nibbles << (4 * torch.arange(8))).sum(dim=2)
        packed |= {
            f"{projection}.weight_packed": words.to(torch.int32),
            f"{projection}.weight_scale": scale,
            f"{projection}.weight_shape": torch.tensor(weight.shape),
        }
    return packed


def _nvfp4(expert: dict[str, Tensor]) -> dict[str, Tensor]:
    import torch

    largest = {
        projection: max(
            float(other.abs().max())
            for name, other in expert.items()
            if (name in _DOWN) == (projection in _DOWN)
        )
        for projection in expert
    }
    packed: dict[str, Tensor] = {}
    for projection, weight in expert.items():
        groups = weight.float().unflatten(1, (-1, _NVFP4_GROUP))
        # A divisor: the largest scale of a group is then the largest float8. A weight is value x scale / divisor.
        global_scale = torch.tensor([_E4M3_MAX * _E2M1_MAX / largest[projection]])
        scale = (groups.abs().amax(dim=2) / _E2M1_MAX * global_scale).to(torch.float8_e4m3fn)
        values = groups * global_scale / scale.float().unsqueeze(2)
        codes = torch.bucketize(values.abs(), torch.tensor(_E2M1_MIDPOINTS)) | values.signbit().long() << 3
        low, high = codes.flatten(1).unflatten(1, (-1, 2)).unbind(2)
        packed |= {
            f"{projection}.weight_packed": (low | high << 4).to(torch.uint8),
            f"{projection}.weight_scale": scale,
            f"{projection}.weight_global_scale": global_scale,
            f"{projection}.input_global_scale": torch.tensor([_E4M3_MAX * _E2M1_MAX / _LARGEST_INPUT]),
        }
    return packed


def _quantization_config(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {
        "format": form,
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }


_INT4_ARGS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": _INT4_GROUP,
    "dynamic": False,
    "actorder": None,
}
_NVFP4_ARGS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": _NVFP4_GROUP,
    "dynamic": False,
}
_SCHEMES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any]]] = {
    "int4": (_int4, _quantization_config("pack-quantized", _INT4_ARGS, None)),
    # For activations of four bits, as most published checkpoints are: Marlin takes them and keeps bfloat16.
    "nvfp4": (
        _nvfp4,
        _quantization_config("nvfp4-pack-quantized", _NVFP4_ARGS, _NVFP4_ARGS | {"dynamic": "local"}),
    ),
}

SCHEMES = tuple(_SCHEMES)
