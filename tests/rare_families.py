"""Families that fewer people run: tiny models by the dozen, checked by `make test-all`.

Each is written by the model class of transformers. Where that has other words than the published checkpoint, this table
has the published ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from vvllm_msd import demo_model

EXPERTS = 16


@dataclass(frozen=True)
class Family:
    """How to write a tiny model."""

    config: str
    """Class of transformers."""
    shape: Mapping[str, Any]
    """Its arguments, keys of published configs that the class does not know included."""
    top_k: int = 4
    architecture: str | None = None
    """As published, where transformers' class has another name."""
    unpublished: str | None = None
    """A pattern of tensors that transformers' class has and a checkpoint has not."""
    needs_gpu: str | None = None
    """Why stock vLLM does not serve it on a CPU."""


_SMALL: dict[str, Any] = demo_model.COMMON | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_ROWS = _SMALL | {"num_attention_heads": 4, "head_dim": 32}
_DENSE_FIRST: dict[str, Any] = {
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 4,
}
_ROUTED = _ROWS | _DENSE_FIRST | {"num_experts": EXPERTS, "num_shared_experts": 1}
_GROUPED = _ROWS | _DENSE_FIRST | {"n_routed_experts": EXPERTS, "n_shared_experts": 1}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""The one shape of latent attention that the CPU backend computes."""
_BY_GROUPS = {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_LOCAL = {"intermediate_size": 32, "num_local_experts": EXPERTS, "num_experts_per_tok": 4}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "moe", "attention"],
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 1,
}
_NO_GATE = "experts without a gate (is_act_and_mul=False) are for GPUs"
_ROUTER = "the router's operators are for GPUs"

FAMILIES: dict[str, Family] = {
    "afmoe": Family(
        "AfmoeConfig",
        _ROUTED
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "score_func": "sigmoid",
            "route_norm": True,
            "route_scale": 2.0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "axk1": Family("AXK1Config", _GROUPED | _LATENT | _BY_GROUPS | {"first_k_dense_replace": 0}),
    "cohere2_moe": Family(
        "Cohere2MoeConfig",
        _ROWS
        | {"intermediate_size": 32, "num_experts": EXPERTS, "num_experts_per_tok": 4}
        # As published, and as transformers wants it.
        | {"tie_word_embeddings": True},
    ),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        _GROUPED | _LATENT | _BY_GROUPS | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    ),
    "dots1": Family("Dots1Config", _GROUPED | {"first_k_dense_replace": 1}),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeConfig",
        _ROWS
        | {"num_hidden_layers": 3, "intermediate_size": 128, "moe_intermediate_size": 32}
        | {"moe_num_experts": EXPERTS, "moe_k": 4, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
    "exaone_moe": Family("ExaoneMoeConfig", _ROUTED | {"sliding_window": 128}),
    "flex_olmo": Family(
        "FlexOlmoConfig",
        _SMALL | {"intermediate_size": 32, "num_experts": EXPERTS, "num_experts_per_tok": 4},
    ),
    "glm4_moe_lite": Family("Glm4MoeLiteConfig", _GROUPED | _LATENT | {"first_k_dense_replace": 1}),
    "granitemoe": Family("GraniteMoeConfig", _SMALL | _LOCAL | {"attention_multiplier": 0.2}),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        _SMALL
        | _LOCAL
        | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32}
        | {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16},
    ),
    "granitemoeshared": Family("GraniteMoeSharedConfig", _SMALL | _LOCAL | {"shared_intermediate_size": 32}),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1Config", _ROWS | {"intermediate_size": 32, "num_experts": EXPERTS, "moe_topk": 4}
    ),
    "hy_v3": Family(
        "HYV3Config",
        _ROUTED | {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "route_norm": True, "qk_norm": True},
    ),
    "jamba": Family(
        "JambaConfig",
        _SMALL
        | {"intermediate_size": 32, "num_experts": EXPERTS, "num_experts_per_tok": 4, "mamba_dt_rank": 8}
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        needs_gpu="the mixer of its Mamba layers is for GPUs",
    ),
    "laguna": Family("LagunaConfig", _ROUTED | {"shared_expert_intermediate_size": 32}, needs_gpu=_ROUTER),
    "lfm2_moe": Family(
        "Lfm2MoeConfig",
        _SMALL
        | _DENSE_FIRST
        | {"num_experts": EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "llama4": Family(
        "Llama4TextConfig",
        _ROWS
        | {"intermediate_size": 32, "intermediate_size_mlp": 128, "num_local_experts": EXPERTS}
        | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
        | {"attention_chunk_size": 2048, "use_qk_norm": False},
        top_k=1,
        architecture="Llama4ForCausalLM",
    ),
    "longcat_flash": Family(
        "LongcatFlashConfig",
        {name: value for name, value in _SMALL.items() if name != "num_hidden_layers"}
        | _LATENT
        | {"num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32}
        | {"n_routed_experts": EXPERTS, "moe_topk": 4, "zero_expert_num": 8, "zero_expert_type": "identity"}
        | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA"},
        unpublished=r"experts\.(?:1[6-9]|2\d)\.",
        needs_gpu=_ROUTER,
    ),
    "mellum": Family(
        "MellumConfig",
        _ROWS | _LOCAL | {"intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": EXPERTS},
    ),
    "mimo_v2_flash": Family(
        "MiMoV2FlashConfig",
        _ROWS
        | _DENSE_FIRST
        | {"head_dim": 64, "v_head_dim": 32, "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1}
        | {"hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1], "layernorm_epsilon": 1e-5}
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 64}
        | {"swa_v_head_dim": 32, "swa_rope_theta": 1e4, "sliding_window": 128, "sliding_window_size": 128}
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
        needs_gpu="its attention needs Triton",
    ),
    "minimax_m2": Family(
        "MiniMaxM2Config",
        _ROWS | _LOCAL | {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
        needs_gpu=_ROUTER,
    ),
    "nemotron_h": Family("NemotronHConfig", _ROWS | _HYBRID, needs_gpu=_NO_GATE),
    "nemotron_h_latent": Family(
        "NemotronHConfig", _ROWS | _HYBRID | {"moe_latent_size": 32}, needs_gpu=_NO_GATE
    ),
    "phimoe": Family(
        "PhimoeConfig",
        _SMALL | _LOCAL | {"num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
        top_k=2,
        architecture="PhiMoEForCausalLM",
    ),
    "solar_open": Family("SolarOpenConfig", _GROUPED),
}


def make(name: str, directory: Path, *, dtype: str = "bfloat16") -> Path:
    """Write the tiny model `name` into `directory`, and return that."""
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.shape)
    demo_model.write(config, directory, dtype=dtype)
    if family.architecture is not None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [family.architecture]}))
    if family.unpublished is not None:
        path = directory / "model.safetensors"
        kept = {k: v for k, v in load_file(path).items() if not re.search(family.unpublished, k)}
        save_file(kept, path, metadata={"format": "pt"})
    return directory
