"""Tiny random models of eight families, with the names and layouts of their real checkpoints.

`make` writes one; the fixture `zoo_model` keeps one of each for a test session. Two or three layers, 16 or 32
experts; every one loads in stock vLLM on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vvllm_msd import demo_model

ZooModel = Callable[[str], Path]
"""Of the fixture `zoo_model`: a family's name to the directory of its model."""

_SMALL: dict[str, Any] = demo_model.COMMON | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def _qwen2_moe(**overrides: Any) -> Any:
    from transformers import Qwen2MoeConfig

    shape = {
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_attention_heads": 2,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    }
    return Qwen2MoeConfig(**_SMALL | shape | overrides)


def _deepseek_v2(**overrides: Any) -> Any:
    from transformers import DeepseekV2Config

    # The first layer is dense. Latent 512 + rotary 64 is the one MLA shape that the CPU backend computes, and with
    # heads of 128 the one for which vLLM has a prefill on every GPU.
    shape = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.0,
    }
    return DeepseekV2Config(**_SMALL | shape | overrides)


def _mixtral(**overrides: Any) -> Any:
    from transformers import MixtralConfig

    shape = {
        "intermediate_size": 64,
        "head_dim": 32,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    return MixtralConfig(**_SMALL | shape | overrides)


def _olmoe(**overrides: Any) -> Any:
    from transformers import OlmoeConfig

    shape = {"intermediate_size": 32, "num_attention_heads": 2, "num_experts": 32, "num_experts_per_tok": 4}
    return OlmoeConfig(**_SMALL | shape | overrides)


def _gpt_oss(**overrides: Any) -> Any:
    from transformers import GptOssConfig

    shape = {
        "intermediate_size": 64,
        "head_dim": 32,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "initial_context_length": 4096,
    }
    return GptOssConfig(**_SMALL | shape | overrides)


def _glm4_moe(**overrides: Any) -> Any:
    from transformers import Glm4MoeConfig

    # The first layer is dense.
    shape = {
        "num_hidden_layers": 3,
        "head_dim": 32,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "use_qk_norm": True,
    }
    return Glm4MoeConfig(**_SMALL | shape | overrides)


def _qwen3_next(**overrides: Any) -> Any:
    from transformers import Qwen3NextConfig

    # The CPU's kernel for linear attention computes heads of 64 and 128, not of 32.
    shape = {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 32,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    return Qwen3NextConfig(**_SMALL | shape | overrides)


_CONFIGS: dict[str, Callable[..., Any]] = {
    "qwen3_moe": demo_model.qwen3_moe_config,
    "qwen2_moe": _qwen2_moe,
    "deepseek_v2": _deepseek_v2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "qwen3_next": _qwen3_next,
}

FAMILIES = tuple(_CONFIGS)


def make(
    family: str,
    directory: Path,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write a model of `family` into `directory`; `overrides` are keys of its config. Returns `directory`."""
    return demo_model.write(_CONFIGS[family](**overrides), directory, dtype=dtype, seed=seed, shards=shards)
