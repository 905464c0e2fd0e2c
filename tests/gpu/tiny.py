"""Tiny models on a GPU: their sizes, the engines that serve them, and what they are asked."""

from __future__ import annotations

from typing import Any

from parity import LONG, MEDIUM, SHORT, prompt

from checkpoints.layouts import EXPERTS

TOP_K = {"mixtral": 2}
"""Of a token; 4 where nothing is said."""
OF = {
    "glm4_moe": "n_routed_experts",
    "deepseek_v2": "n_routed_experts",
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
}
"""What a family's config calls its number of experts, where that is not `num_experts`."""
FULL: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    },
}
BATCHES = [
    [SHORT],
    *([prompt(4 + 3 * i, 10 + i) for i in range(count)] for count in (2, 3, 4)),
    [MEDIUM],
    [LONG],
    [SHORT],
]
"""Decode of one to four, alone and after prompts that the host pages for; three are padded to four."""

OF_FAMILY: dict[str, dict[str, Any]] = {
    # flashinfer's kernel for it, which vLLM prefers on Hopper, may not be installed.
    "qwen3_next": {"gdn_prefill_backend": "triton"},
    "qwen3_5_moe": {"gdn_prefill_backend": "triton", "language_model_only": True},
    # FlashAttention 4, which vLLM takes for its heads of two sizes, needs cutlass-dsl, which may not be there either.
    "gemma4": {"language_model_only": True, "attention_backend": "TRITON_ATTN"},
}
"""Arguments that a family needs."""


def sizes(family: str) -> list[int]:
    """Slots: those of a token, three times as many, and a quarter of the experts."""
    top_k = TOP_K.get(family, 4)
    return sorted({top_k, 3 * top_k, EXPERTS // 4})


def backend(scheme: str) -> dict[str, Any]:
    """The experts' kernel, as the daemon chooses it on a GPU that multiplies FP8."""
    by_triton = scheme in ("bf16", "fp16", "fp8_block", "fp8_static", "int8")
    return {"moe_backend": "triton" if by_triton else "marlin"}


def serving(family: str, scheme: str) -> dict[str, Any]:
    """Arguments for FULL decode graphs."""
    return FULL | backend(scheme) | OF_FAMILY.get(family, {})
