"""Runs engines in this process, one after the other, for the tests of equality."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from vvllm_msd.verify_engine import Answer, Job, run

MAX_TOKENS = 8


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids that visit many experts."""
    return [5 + (seed * 97 + i * 31 + i * i * 7) % 400 for i in range(tokens)]


SHORT, MEDIUM, LONG = prompt(5, 1), prompt(40, 2), prompt(150, 3)
"""With the default threshold of 64 tokens: decode and token waves for the first two, pair waves for the last."""


def engine_args(**extra: Any) -> dict[str, Any]:
    """Arguments of `LLM` for a tiny model on the CPU."""
    return {
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 64 << 20,
        # Unused then, but vLLM wants this share of the device free (v1/worker/utils.py:716).
        "gpu_memory_utilization": 0.01,
        "enable_prefix_caching": False,
        **extra,
    }


def ask(
    model: Path, batches: list[list[list[int]]], cache: dict[str, Any] | None, **extra: Any
) -> list[Answer]:
    """The answers of one engine; `cache` None is stock."""
    import vllm  # noqa: F401

    # vLLM collects garbage several times an engine, over everything that it ever imported: leave that out.
    gc.freeze()
    args = engine_args(**extra)
    if cache is not None:
        args["additional_config"] = {"expert_cache": cache}
    try:
        return run(Job(str(model), batches, MAX_TOKENS, args)).answers
    finally:
        gc.collect()


def largest_difference(one: Answer, other: Answer) -> float:
    """Of the logprobs that both give for the same token at the same position."""
    worst = 0.0
    for mine, theirs in (
        (one.logprobs, other.logprobs),
        (one.prompt_logprobs, other.prompt_logprobs),
    ):
        for a, b in zip(mine, theirs, strict=True):
            worst = max([worst, *(abs(a[t] - b[t]) for t in a.keys() & b.keys())])
    return worst
