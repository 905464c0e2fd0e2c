"""The shape that the benchmarks share, of any number of layers; the real model has 48."""

from __future__ import annotations

from typing import Any

# Qwen/Qwen3-30B-A3B, config.json
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}
