"""On a real GPU: decode inside CUDA graphs, however vLLM is told to serve, gives stock's tokens and logprobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity import LONG, MEDIUM, SHORT, ask, engine_args, prompt
from tiny import BATCHES, FULL, backend

from vvllm_msd.verify_engine import set_environment

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
def test_vllms_own_compilation_and_piecewise_graphs_equal_stock(
    scheme: str, model: Callable[[str, str], Path]
) -> None:
    path, sizes = model("qwen3_moe", scheme), [1, 2, 4, 8]
    arguments = backend(scheme) | {
        "enforce_eager": False,
        # Both engines are compiled, and Inductor would choose the reductions of each by a race of its own.
        "compilation_config": {
            "cudagraph_capture_sizes": sizes,
            "inductor_compile_config": {"deterministic": True},
        },
    }
    reference = ask(path, BATCHES, None, **arguments)
    assert ask(path, BATCHES, {"slots": 8, "poison": True}, **arguments) == reference


SERVING = {
    "drafts": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
        "compilation_config": FULL["compilation_config"] | {"cudagraph_capture_sizes": [3, 6, 12]},
    },
    "chunks": {"enable_chunked_prefill": True, "max_num_batched_tokens": 48},
    "prefixes": {"enable_prefix_caching": True},
}


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4"])
@pytest.mark.parametrize("how", sorted(SERVING))
def test_drafts_chunks_and_shared_prefixes_equal_stock(
    how: str, scheme: str, model: Callable[[str, str], Path]
) -> None:
    """Batches that mix prefill and decode, repeat a prompt, or verify drafts."""
    path, arguments = model("qwen3_moe", scheme), FULL | backend(scheme) | SERVING[how]
    loop = [7, 8, 9, 10] * 12
    batches = [[LONG, SHORT, MEDIUM, loop], [loop], [[*LONG, 9, 11], [*LONG, 12]], [SHORT]]
    reference = ask(path, batches, None, **arguments)
    assert ask(path, batches, {"slots": 12, "poison": True}, **arguments) == reference


@pytest.mark.parametrize("slots", [8, 16])
def test_large_batches_equal_stock(slots: int, model: Callable[[str, str], Path]) -> None:
    """Under graphs up to 4 x slots / top_k, in up to four rounds; beyond by the host. Equal prompts choose equal
    experts: more rows of one than a block of Marlin's has."""
    path, most = model("qwen3_moe", "nvfp4"), slots
    arguments = FULL | backend("nvfp4") | {"max_num_seqs": 24}
    arguments["compilation_config"] = FULL["compilation_config"] | {
        "cudagraph_capture_sizes": [size for size in (1, 8, 16) if size <= most]
    }
    batches = [[prompt(5 + i, i) for i in range(count)] for count in (8, 24, 8)]
    batches += [[SHORT] * 16, [[*SHORT, 9 + i] for i in range(16)]]
    reference = ask(path, batches, None, **arguments)
    assert ask(path, batches, {"slots": slots, "poison": True}, **arguments) == reference


def paged(path: Path) -> tuple[Any, list[Any]]:
    """An engine with 12 slots, and its paged layers."""
    set_environment()
    from vllm import LLM

    llm = LLM(model=str(path), **engine_args(additional_config={"expert_cache": {"slots": 12}}, **FULL))
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return llm, [m for m in runner.get_model().modules() if getattr(m, "paging", None) is not None]


def generate(llm: Any, prompt_ids: list[int], tokens: int) -> None:
    from vllm import SamplingParams

    llm.generate(
        [{"prompt_token_ids": prompt_ids}],
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
    )
    time.sleep(0.5)


def test_counters_count_every_layer_of_every_decode_step(model: Callable[[str, str], Path]) -> None:
    """Warm-up and capture leave no trace; each layer of each step looks up its k experts once."""
    llm, layers = paged(model("qwen3_moe", "bf16"))
    board = layers[0].paging.board
    assert not any(any(c) for counts in board.layers(len(layers)).values() for c in counts)
    generate(llm, LONG, 21)
    counts = board.layers(len(layers))
    for hits, misses, nbytes, waves in counts["decode"]:
        assert hits + misses == 20 * 4
        assert 0 < misses < 20 * 4
        assert (nbytes, waves) == (misses * layers[0].layout.bundle_bytes, 0)
    assert all(misses > 0 for _, misses, _, _ in counts["prefill"])
    assert board.get("steps") == 21


def test_bundles_are_brought_ahead_and_taken(model: Callable[[str, str], Path]) -> None:
    """By the gates of a real model, random as they are; and what comes so changes no answer (above)."""
    llm, layers = paged(model("qwen3_moe", "bf16"))
    assert layers[0].paging.scratch.foresight is not None
    generate(llm, SHORT, 60)
    board = layers[0].paging.board
    assert 0 < board.get("used_ahead") <= board.get("brought_ahead")
    assert board.get("used_ahead") < board.get("misses")


def test_captures_that_only_the_host_could_page_for_are_refused(model: Callable[[str, str], Path]) -> None:
    from vvllm_shared.errors import ConfigError

    arguments = FULL | {
        "compilation_config": FULL["compilation_config"] | {"cudagraph_capture_sizes": [1, 64]}
    }
    with pytest.raises(ConfigError, match="at most 8 run in one") as refused:
        ask(model("qwen3_moe", "bf16"), [[SHORT]], {"slots": 8}, **arguments)
    assert '"cudagraph_capture_sizes": [1, 2, 4, 8]' in refused.value.hint
