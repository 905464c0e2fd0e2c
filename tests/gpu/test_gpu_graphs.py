"""On a real GPU: decode inside CUDA graphs gives stock's tokens and logprobs, whatever pages and however."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from parity import LONG, MEDIUM, SHORT, ask, engine_args, prompt

import zoo
from checkpoints import formats
from vvllm_msd.verify_engine import set_environment

pytestmark = pytest.mark.gpu

EXPERTS = 32
TOP_K = {"qwen3_moe": 4, "qwen2_moe": 4, "glm4_moe": 4, "olmoe": 4, "mixtral": 2, "gpt_oss": 4}
OF = {"glm4_moe": "n_routed_experts", "mixtral": "num_local_experts", "gpt_oss": "num_local_experts"}
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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A tiny model of a family: bf16, or in one of `formats.FORMATS`, or mxfp4."""
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, scheme: str) -> Path:
        if (family, scheme) not in made:
            folder = tmp_path_factory.mktemp("graphs")
            shape = formats.SHAPE[family] | {OF.get(family, "num_experts"): EXPERTS}
            plain = zoo.make(family, folder / "bf16", **shape)
            made[family, scheme] = (
                plain if scheme == "bf16" else formats.quantize(plain, folder / scheme, scheme)
            )
        return made[family, scheme]

    return get


def backend(scheme: str) -> dict[str, Any]:
    return {"moe_backend": "triton" if scheme.startswith(("bf16", "fp8", "int8")) else "marlin"}


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        *(
            (family, scheme)
            for family in sorted(TOP_K)
            for scheme in ("bf16", "int4", "nvfp4")
            if family != "gpt_oss"
        ),
        *(("qwen3_moe", scheme) for scheme in sorted(formats.FORMATS.keys() - {"int4", "nvfp4"})),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_full_graphs_equal_stock(
    family: str, scheme: str, model: Callable[[str, str], Path], record_parity: Callable[..., None]
) -> None:
    """Slots = top_k (four requests take four rounds), 3 x top_k and a quarter; poison in every free slot."""
    path, arguments = model(family, scheme), FULL | backend(scheme)
    reference = ask(path, BATCHES, None, **arguments)
    sizes = sorted({TOP_K[family], 3 * TOP_K[family], EXPERTS // 4})
    for slots in sizes:
        assert ask(path, BATCHES, {"slots": slots, "poison": True}, **arguments) == reference, slots
    record_parity(family, scheme, slots=sizes, experts=EXPERTS)


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
