"""What the engine is started with: defaults, sizes, and the parsers of each family."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vvllm_msd.config import CacheConfig, DaemonConfig, Given, load
from vvllm_msd.engine_settings import ModelFacts, engine_settings, read_facts
from vvllm_shared.errors import CheckpointError, ConfigError
from vvllm_shared.limits import GIB

FACTS = ModelFacts("qwen3_moe", experts=128, top_k=8, max_model_len=262_144)


def config(**keys: str) -> DaemonConfig:
    flags = [Given(key.replace("__", "."), value, "flag", key) for key, value in keys.items()]
    return load([Given("model", "/m", "flag", "--model"), *flags], env={})


def test_defaults_for_small_cards() -> None:
    settings = engine_settings(config(), FACTS)
    assert settings.options == {
        "language_model_only": True,
        "max_num_seqs": 4,
        "max_model_len": 32_768,
    }
    assert settings.on_gpu == {"cudagraph_capture_sizes": [1, 2, 4]}
    assert settings.expert_cache == {"slots": 24}
    assert settings.warnings == ()


def test_a_model_with_fewer_positions() -> None:
    assert engine_settings(config(), ModelFacts("x", 16, 2, 4096)).options["max_model_len"] == 4096
    assert engine_settings(config(), ModelFacts("x", 16, 2, None)).options["max_model_len"] == 32_768


def test_all_is_printed_with_its_source() -> None:
    settings = engine_settings(
        config(server__max_num_seqs="2", engine__seed="7", cache__cache_gb="2.5"), FACTS
    )
    printed = {setting.name: (setting.value, setting.source) for setting in settings.settings}
    assert printed["max_num_seqs"] == (2, "flag")
    assert printed["seed"] == (7, "flag")
    assert printed["cache_gb"] == (2.5, "flag")
    assert printed["max_model_len"] == (32_768, "default")
    # Known only with the platform, and printed then.
    assert not printed.keys() & {"enforce_eager", "cudagraph_capture_sizes", "moe_backend"}


def test_an_override_is_printed_once() -> None:
    settings = engine_settings(config(engine__enforce_eager="false"), FACTS)
    printed = [(s.value, s.source) for s in settings.settings if s.name == "enforce_eager"]
    assert printed == [(False, "flag")]


@pytest.mark.parametrize(
    ("cache", "slot_bytes", "requests", "largest"),
    [
        ({"cache__slots": "24"}, 0, "32", 12),
        ({"cache__slots": "24"}, GIB, "5", 5),
        ({"cache__cache_gb": "24"}, GIB, "32", 10),  # 24 slots at most; 21 are sure
        ({"cache__cache_gb": "9"}, GIB, "32", 4),
        ({"cache__cache_gb": "500"}, GIB, "99", 64),
        ({"cache__cache_gb": "24"}, 0, "32", 4),
        ({"cache__cache_gb": "24"}, 0, "3", 3),
    ],
)
def test_the_largest_graph_is_one_that_the_slots_serve(
    cache: dict[str, str], slot_bytes: int, requests: str, largest: int
) -> None:
    given = config(server__max_num_seqs=requests, **cache)
    sizes = engine_settings(given, replace(FACTS, slot_bytes=slot_bytes)).on_gpu["cudagraph_capture_sizes"]
    assert (sizes[:2], sizes[-1]) == ([1, 2], largest)


@pytest.mark.parametrize(
    ("slots", "says"),
    [("7", "each token of this model needs 8 experts"), ("129", "this model has 128 experts")],
)
def test_slots_that_cannot_work(slots: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_settings(config(cache__slots=slots), FACTS)


@pytest.mark.parametrize(("slots", "warned"), [("8", True), ("23", True), ("24", False), ("128", False)])
def test_few_slots_are_warned_about(slots: str, warned: bool) -> None:
    settings = engine_settings(config(cache__slots=slots), FACTS)
    assert settings.expert_cache == {"slots": int(slots)}
    assert bool(settings.warnings) == warned


ONE_GIB_SLOTS = replace(FACTS, slot_bytes=GIB)


@pytest.mark.parametrize(("size", "warned"), [("8", True), ("23.9", True), ("24", False), ("500", False)])
def test_a_small_cache_is_warned_about(size: str, warned: bool) -> None:
    settings = engine_settings(config(cache__cache_gb=size), ONE_GIB_SLOTS)
    assert settings.expert_cache == {"cache_gb": float(size)}
    assert ["three times the 8 experts" in warning for warning in settings.warnings] == [True] * warned


def test_a_cache_that_cannot_work_names_one_that_can() -> None:
    with pytest.raises(ConfigError, match="7 slots a layer, and each token of this model needs 8") as refused:
        engine_settings(config(cache__cache_gb="7.99"), ONE_GIB_SLOTS)
    assert refused.value.hint == "Give at least 8, better 24."


@given(st.integers(1, 2**40))
def test_the_size_that_a_refusal_names_is_enough(slot_bytes: int) -> None:
    facts = replace(FACTS, slot_bytes=slot_bytes)
    with pytest.raises(ConfigError) as refused:
        engine_settings(config(cache__cache_gb=str(slot_bytes / GIB)), facts)
    found = re.search(r"at least ([\d.e+]+), better", refused.value.hint)
    assert found
    engine_settings(replace(config(), cache=CacheConfig(cache_gb=float(found[1]))), facts)


def test_a_model_with_few_experts_can_have_them_all() -> None:
    settings = engine_settings(config(), ModelFacts("mixtral", 8, 4, None))
    assert (settings.expert_cache, settings.warnings) == ({"slots": 8}, ())


def test_vision() -> None:
    with pytest.raises(ConfigError, match="no vision part"):
        engine_settings(config(server__vision="true"), FACTS)
    seeing = ModelFacts("qwen3_5_moe", 128, 8, None, multimodal=True)
    assert engine_settings(config(server__vision="true"), seeing).options["language_model_only"] is False


@pytest.mark.parametrize(
    ("model_type", "template", "reasoning", "tools"),
    [
        ("qwen3_moe", "<think> <tool_call>", "qwen3", "hermes"),
        ("qwen3_moe", "<tool_call>", None, "hermes"),  # an instruct model: it does not think
        ("qwen3_moe", "<tool_call> <function=", None, "qwen3_coder"),
        ("qwen3_next", "<think>", "qwen3", None),
        ("qwen3_5_moe", "<think> <function=", "qwen3", "qwen3_coder"),
        ("gemma4", "", "gemma4", "gemma4"),
        ("deepseek_v3", "<think>", "deepseek_r1", None),
        ("deepseek_v3", "thinking <think> <｜tool▁call▁begin｜>", "deepseek_v3", "deepseek_v31"),  # noqa: RUF001
        ("deepseek_v3", "<｜tool▁call▁begin｜> ```json", None, "deepseek_v3"),  # noqa: RUF001
        ("deepseek_v32", "", "deepseek_v3", "deepseek_v32"),
        ("gpt_oss", "", "openai_gptoss", "openai"),
        ("glm4_moe", "<think> <tool_call>", "glm45", "glm45"),
        ("mixtral", "<think> <tool_call>", None, None),
        ("qwen3_moe", "", None, None),
    ],
)
def test_parsers(model_type: str, template: str, reasoning: str | None, tools: str | None) -> None:
    options = engine_settings(config(), ModelFacts(model_type, 128, 8, None, template)).options
    assert options.get("reasoning_parser") == reasoning
    assert options.get("tool_call_parser") == tools
    assert options.get("enable_auto_tool_choice", False) == (tools is not None)


def test_parsers_can_be_chosen_and_switched_off() -> None:
    thinking = ModelFacts("qwen3_moe", 128, 8, None, "<think> <tool_call>")
    options = engine_settings(
        config(server__reasoning_parser="off", server__tool_parser="hf"), thinking
    ).options
    assert "reasoning_parser" not in options
    assert options["tool_call_parser"] == "hf"


def test_the_size_of_a_prefill_step_is_set_where_the_checkpoint_says_enough() -> None:
    """At the shape of Qwen3-30B-A3B in four bits."""
    facts = replace(FACTS, slot_bytes=48 * 2_650_000, hidden_size=2048, expert_width=768)
    given = config(cache__slots="32")
    assert engine_settings(given, facts).on_gpu["max_num_batched_tokens"] == 4096
    assert "max_num_batched_tokens" not in engine_settings(given, FACTS).on_gpu
    whole = replace(given, engine={"enable_chunked_prefill": False})
    assert "max_num_batched_tokens" not in engine_settings(whole, facts).on_gpu


# Reading the facts


def checkpoint(directory: Path, **files: object) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def test_facts_of_a_text_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 9, "moe_intermediate_size": 32}
    checkpoint(tmp_path, config={"model_type": "qwen3_moe", "max_position_embeddings": 100, **sizes})
    facts = read_facts(tmp_path, 128, 8)
    assert facts == ModelFacts("qwen3_moe", 128, 8, 100, hidden_size=64, expert_width=32)


def test_facts_of_a_multimodal_model(tmp_path: Path) -> None:
    text = {"model_type": "qwen3_5_moe_text", "max_position_embeddings": 7}
    checkpoint(tmp_path, config={"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}})
    facts = read_facts(tmp_path, 256, 8)
    assert (facts.model_type, facts.max_model_len, facts.multimodal) == ("qwen3_5_moe", 7, True)


def test_every_form_of_chat_template_is_found(tmp_path: Path) -> None:
    checkpoint(tmp_path, config={}, tokenizer_config={"chat_template": "one"})
    assert "one" in read_facts(tmp_path, 1, 1).chat_template
    variants = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    checkpoint(tmp_path, tokenizer_config={"chat_template": variants})
    (tmp_path / "chat_template.jinja").write_text("four", encoding="utf-8")
    for text in ("two", "three", "four"):
        assert text in read_facts(tmp_path, 1, 1).chat_template


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_a_damaged_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_facts(tmp_path, 1, 1)
