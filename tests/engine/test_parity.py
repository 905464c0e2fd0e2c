"""The promise: the same output as stock vLLM, whatever is resident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from parity import LONG, MEDIUM, SHORT, ask, largest_difference, prompt

import zoo
from vvllm_msd import demo_model
from vvllm_msd.verify_engine import Answer

pytestmark = pytest.mark.engine

ALONE = [[SHORT], [MEDIUM]]
TOGETHER = [[prompt(4 + 3 * i, 10 + i) for i in range(4)]]
"""Four requests that decode together need more experts than the smallest caches have slots."""


@pytest.fixture(scope="module")
def stock(zoo_model: Callable[[str], Path]) -> Callable[[str], list[Answer]]:
    """Stock's answers to the prompts above, one engine per family."""

    @cache
    def answers(family: str) -> list[Answer]:
        return ask(zoo_model(family), ALONE + TOGETHER, None)

    return answers


def sizes(model: Path) -> tuple[int, int]:
    """(experts, top_k) of a tiny model."""
    config = json.loads((model / "config.json").read_text())
    experts = next(config[k] for k in ("num_experts", "n_routed_experts", "num_local_experts") if k in config)
    return experts, config["num_experts_per_tok"]


@pytest.mark.parametrize("size", ["top_k", "three_top_k", "half"])
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_tokens_and_logprobs_equal_stock(
    family: str,
    size: str,
    zoo_model: Callable[[str], Path],
    stock: Callable[[str], list[Answer]],
    record_parity: Callable[..., None],
) -> None:
    """Every logprob of every position of prompts and answers, with poison in every slot that holds nothing."""
    experts, top_k = sizes(zoo_model(family))
    slots = {"top_k": top_k, "three_top_k": min(3 * top_k, experts), "half": experts // 2}[size]
    paged = ask(zoo_model(family), ALONE + TOGETHER, {"slots": slots, "poison": True})
    assert paged == stock(family)
    record_parity(family, "bf16", slots=[slots], experts=experts)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_long_prompt_in_token_waves_equals_stock(family: str, zoo_model: Callable[[str], Path]) -> None:
    paged = {"slots": 4, "poison": True, "pair_waves_above": 512}
    assert ask(zoo_model(family), [[LONG]], paged) == ask(zoo_model(family), [[LONG]], None)


def test_pair_waves_equal_stock_in_fp32(tmp_path: Path) -> None:
    model = zoo.make("qwen3_moe", tmp_path / "fp32", dtype="float32")
    args: dict[str, Any] = {"dtype": "float32"}
    paged = ask(model, [[LONG]], {"slots": 5, "poison": True}, **args)
    assert paged == ask(model, [[LONG]], None, **args)


def test_pair_waves_of_one_expert_a_token_equal_stock(tmp_path: Path) -> None:
    """Llama 4 weighs the input of an expert, not its output; with one expert nothing is added, also in bf16."""
    from transformers import Llama4TextConfig

    shape = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "intermediate_size_mlp": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 4096,
        "attention_chunk_size": 2048,
        "use_qk_norm": False,
        "architectures": ["Llama4ForCausalLM"],
    }
    model = demo_model.write(Llama4TextConfig(**demo_model.COMMON | shape), tmp_path / "llama4")
    reference = ask(model, [[LONG], [MEDIUM, SHORT]], None)
    for above in (0, 64):
        paged = {"slots": 4, "poison": True, "pair_waves_above": above}
        assert ask(model, [[LONG], [MEDIUM, SHORT]], paged) == reference


def test_pair_waves_in_bf16_repeat_themselves_whatever_is_resident(
    zoo_model: Callable[[str], Path], record_property: Callable[[str, object], None]
) -> None:
    """Rounding of partial results makes them differ from stock a little, never from each other."""
    model = zoo_model("qwen3_moe")
    cold = ask(model, [[LONG]], {"slots": 5, "poison": True})
    warm = ask(model, [[MEDIUM], [LONG], [LONG]], {"slots": 5})
    assert warm[1] == warm[2] == cold[0]
    reference = ask(model, [[LONG]], None)
    record_property("largest_logprob_difference_to_stock", largest_difference(cold[0], reference[0]))
    # One decoder layer's rounding cannot move the first positions far.
    first = Answer([], [], cold[0].prompt_logprobs[:8])
    assert largest_difference(first, Answer([], [], reference[0].prompt_logprobs[:8])) < 0.5


@pytest.mark.slow
def test_compiled_engine_equals_compiled_stock(zoo_model: Callable[[str], Path]) -> None:
    """vLLM's default on the CPU: Dynamo traces the model around the opaque paged layers."""
    model = zoo_model("qwen2_moe")
    args: dict[str, Any] = {"enforce_eager": False}
    paged = ask(model, ALONE, {"slots": 5, "poison": True}, **args)
    assert paged == ask(model, ALONE, None, **args)


ASK = """
import sys
from pathlib import Path
from parity import SHORT, ask
print("ANSWERS", ask(Path(sys.argv[1]), [[SHORT]], None))
"""


def test_without_expert_cache_vllm_is_as_without_us(zoo_model: Callable[[str], Path]) -> None:
    path = os.pathsep.join(str(d) for d in (Path(__file__).parent, Path(zoo.__file__).parent))
    outputs = []
    for plugins in ("", "vvllm_pager"):
        run = subprocess.run(
            [sys.executable, "-c", ASK, str(zoo_model("qwen3_moe"))],
            env=os.environ | {"VLLM_PLUGINS": plugins, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        outputs.append([line for line in run.stdout.splitlines() if line.startswith("ANSWERS")])
    assert outputs[0]
    assert outputs[0] == outputs[1]
