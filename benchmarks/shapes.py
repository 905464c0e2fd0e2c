"""The shapes of real models that the benchmarks build with random weights, and the formats of their experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

FORMATS = ("bf16", "int4", "nvfp4")
"""Of the experts; everything else is bf16. Four bits are compressed-tensors, for vLLM's Marlin kernels."""


@dataclass(frozen=True)
class Shape:
    """A model without its weights."""

    architecture: str
    """What vLLM calls it."""
    config_class: str
    """Of transformers."""
    values: Mapping[str, Any]
    """Of its config.json, where they differ from the class's own."""
    additional_config: Mapping[str, Any] = field(default_factory=dict)
    """For every engine, stock or not."""

    @property
    def hidden(self) -> int:
        """Columns of a token's state."""
        return int(self.values["hidden_size"])

    @property
    def layers(self) -> int:
        return int(self.values["num_hidden_layers"])

    @property
    def experts(self) -> int:
        return int(self.values["num_experts"])

    @property
    def top_k(self) -> int:
        return int(self.values["num_experts_per_tok"])

    def cut(self, layers: int) -> Shape:
        """The model's first layers, or fewer or more of its kind."""
        return replace(self, values={**self.values, "num_hidden_layers": layers})

    def write(self, directory: Path, form: str) -> None:
        """Write config.json for experts in one of `FORMATS`."""
        import transformers

        extra = {"quantization_config": _quantization(*_WEIGHTS[form])} if form in _WEIGHTS else {}
        made = getattr(transformers, self.config_class)
        config = made(**self.values, architectures=[self.architecture], dtype="bfloat16", **extra)
        config.save_pretrained(directory)


SHAPES = {
    # Qwen/Qwen3-30B-A3B, config.json
    "qwen3-30b-a3b": Shape(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
            "norm_topk_prob": True,
        },
    ),
    # Qwen/Qwen3.6-35B-A3B, its text model: three of four layers have linear attention (GDN), all a shared expert.
    "qwen3.6-35b-a3b": Shape(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "vocab_size": 248320,
            "tie_word_embeddings": False,
        },
        # FlashInfer, vLLM's choice at capability 9.0, need not be installed (gdn/qwen_gdn_linear_attn.py:93).
        {"gdn_prefill_backend": "triton"},
    ),
}

_INT4 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
    "dynamic": False,
    "actorder": None,
}
_NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "dynamic": False,
}
_WEIGHTS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int4": ("pack-quantized", _INT4, None),
    "nvfp4": ("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"}),
}
"""By format: compressed-tensors' name for it, its weights, its activations."""


def _quantization(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {
        "format": form,
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    dense = ("self_attn", "linear_attn", "shared_expert", "shared_expert_gate", "gate")
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *(rf"re:.*\.{name}(\..*)?$" for name in dense)],
    }
