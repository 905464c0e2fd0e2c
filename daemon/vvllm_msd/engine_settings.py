"""What the engine is started with: our defaults for small cards, under what the configuration says.

vLLM's own defaults are for servers that fill a large GPU with many requests. Every value here can be overridden,
and the daemon prints all of them with their source.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vvllm_msd.config import DaemonConfig
from vvllm_msd.device_options import graph_options
from vvllm_msd.prefill_chunk import Widths, chunk_tokens
from vvllm_shared.errors import CheckpointError, ConfigError
from vvllm_shared.limits import GIB

MAX_MODEL_LEN = 32_768

Named = tuple[tuple[str, str], ...]
"""(text, parser): the first parser whose text stands in the model's chat template is taken; "" always does."""


@dataclass(frozen=True)
class Family:
    """Model types whose output has the same form, and vLLM's names of the parsers that read it.

    The chat template decides within a family: a parser that waits for the end of thinking would take the whole
    answer of a model that does not think.
    """

    model_types: tuple[str, ...]
    reasoning: Named
    tools: Named

    def has(self, model_type: str) -> bool:
        """`model_type` is one of these, or a variant ("glm4_moe" has "glm4_moe_lite")."""
        return any(f"{model_type}_".startswith(f"{known}_") for known in self.model_types)


FAMILIES = {
    "qwen3": Family(
        ("qwen3_moe", "qwen3_next", "qwen3_vl_moe"),
        (("<think>", "qwen3"),),
        (("<function=", "qwen3_coder"), ("<tool_call>", "hermes")),
    ),
    "qwen3_5": Family(("qwen3_5",), (("<think>", "qwen3"),), (("<function=", "qwen3_coder"),)),
    "gemma4": Family(("gemma4",), (("", "gemma4"),), (("", "gemma4"),)),
    "deepseek": Family(
        ("deepseek_v2", "deepseek_v3"),
        # From V3.1 on the request says whether the model thinks; R1 always does, V3 never.
        (("thinking", "deepseek_v3"), ("<think>", "deepseek_r1")),
        (("```json", "deepseek_v3"), ("tool▁call▁begin", "deepseek_v31")),
    ),
    # These two come without a template: vLLM has their encoding built in.
    "deepseek_v32": Family(("deepseek_v32",), (("", "deepseek_v3"),), (("", "deepseek_v32"),)),
    "deepseek_v4": Family(("deepseek_v4",), (("", "deepseek_v4"),), (("", "deepseek_v4"),)),
    "gpt_oss": Family(("gpt_oss",), (("", "openai_gptoss"),), (("", "openai"),)),
    "glm4": Family(("glm4_moe", "glm4v_moe"), (("<think>", "glm45"),), (("<tool_call>", "glm45"),)),
}
"""The one table from a model's type to the parsers of its output."""


@dataclass(frozen=True)
class ModelFacts:
    """What of a checkpoint decides the settings.

    Attributes:
        model_type: as in its `config.json`.
        experts: routed experts of its smallest MoE layer.
        top_k: experts that a token uses in each layer.
        max_model_len: positions that it was made for; None where it does not say.
        chat_template: "" where it has none.
        multimodal: it has a vision part.
        slot_bytes: what one slot in each layer takes together, at least; 0 where that is not known.
        hidden_size, expert_width: of its layers and of one routed expert; 0 where it does not say.
    """

    model_type: str
    experts: int
    top_k: int
    max_model_len: int | None
    chat_template: str = ""
    multimodal: bool = False
    slot_bytes: int = 0
    hidden_size: int = 0
    expert_width: int = 0


@dataclass(frozen=True)
class Setting:
    """One value, as it is printed: `source` is default, file, env or flag."""

    name: str
    value: object
    source: str


@dataclass(frozen=True)
class EngineSettings:
    """All that the engine is told.

    Attributes:
        options: fields of vLLM's `AsyncEngineArgs` and of its front end; the configuration's `[engine]`
            overrides them.
        expert_cache: the pager's options, {"slots": n} or {"cache_gb": x}.
        on_gpu: more of them where the engine runs on a GPU, which is known once vLLM is imported.
        settings: what to print; not `on_gpu`.
        warnings: sentences for the user.
    """

    options: dict[str, Any]
    on_gpu: dict[str, Any]
    expert_cache: dict[str, int | float]
    settings: tuple[Setting, ...]
    warnings: tuple[str, ...]


def engine_settings(config: DaemonConfig, facts: ModelFacts) -> EngineSettings:
    """Settings of the engine for `config` and the checkpoint of `facts`.

    Raises:
        ConfigError: fewer slots (or a cache too small for those) than the model needs at once, more than it has
            experts, or vision without eyes.
    """
    if config.server.vision and not facts.multimodal:
        raise ConfigError(
            "server.vision is true, and this model has no vision part.", "Remove server.vision."
        )
    cache, warnings = _expert_cache(config, facts)
    options: dict[str, Any] = {
        "language_model_only": not config.server.vision,
        "max_num_seqs": config.server.max_num_seqs,
        "max_model_len": config.server.max_model_len
        or min(MAX_MODEL_LEN, facts.max_model_len or MAX_MODEL_LEN),
    }
    if reasoning := _parser(config.server.reasoning_parser, facts, lambda family: family.reasoning):
        options["reasoning_parser"] = reasoning
    if tools := _parser(config.server.tool_parser, facts, lambda family: family.tools):
        options |= {"tool_call_parser": tools, "enable_auto_tool_choice": True}
    slots = _sure_slots(cache, facts)
    on_gpu: dict[str, Any] = graph_options(config.engine, slots, facts.top_k, config.server.max_num_seqs)
    # Without chunks a step takes a whole prompt, and vLLM itself makes room for the longest.
    chunked = config.engine.get("enable_chunked_prefill") is not False
    if chunked and facts.slot_bytes and facts.hidden_size and facts.expert_width:
        widths = Widths(facts.experts, facts.top_k, facts.hidden_size, facts.expert_width)
        chunk = chunk_tokens(widths, slots, facts.slot_bytes, options["max_model_len"])
        on_gpu["max_num_batched_tokens"] = max(chunk, config.server.max_num_seqs)
    return EngineSettings(options, on_gpu, cache, _settings(config, options, cache), warnings)


def _sure_slots(cache: dict[str, int | float], facts: ModelFacts) -> int:
    """Slots that the pager will surely make of `cache`: it refuses fewer than top_k."""
    if "slots" in cache:
        return int(cache["slots"])
    # What a slot takes at least is known; how much more a kernel wants (padding, scales) the pager finds out.
    slots = int(cache["cache_gb"] * GIB) // facts.slot_bytes if facts.slot_bytes else 0
    return max(facts.top_k, min(slots * 7 // 8, facts.experts))


def _expert_cache(config: DaemonConfig, facts: ModelFacts) -> tuple[dict[str, int | float], tuple[str, ...]]:
    comfortable = min(3 * facts.top_k, facts.experts)
    if config.cache.cache_gb is not None:
        return {"cache_gb": config.cache.cache_gb}, _cache_gb_warnings(
            config.cache.cache_gb, comfortable, facts
        )
    slots = config.cache.slots or comfortable
    if slots < facts.top_k:
        raise ConfigError(
            f"cache.slots is {slots}, and each token of this model needs {facts.top_k} experts at once.",
            f"Give at least {facts.top_k}, better {comfortable}.",
        )
    if slots > facts.experts:
        raise ConfigError(
            f"cache.slots is {slots}, and this model has {facts.experts} experts per layer.",
            f"Give at most {facts.experts}.",
        )
    if slots < comfortable:
        return {"slots": slots}, (_few(f"cache.slots is {slots}", comfortable, facts),)
    return {"slots": slots}, ()


def _cache_gb_warnings(cache_gb: float, comfortable: int, facts: ModelFacts) -> tuple[str, ...]:
    """What to say of a size in GiB. The pager, which knows the bundles, has the last word on the number of slots.

    Raises:
        ConfigError: it gives too few slots, however the engine lays the experts out.
    """
    if not facts.slot_bytes:
        return ()
    slots = int(cache_gb * GIB) // facts.slot_bytes
    given = f"cache.cache_gb is {cache_gb:g}, which is {slots} slots a layer"
    if slots < facts.top_k:
        least, better = (_gib_up(count * facts.slot_bytes) for count in (facts.top_k, comfortable))
        raise ConfigError(
            f"{given}, and each token of this model needs {facts.top_k} experts at once.",
            f"Give at least {least}, better {better}.",
        )
    return (_few(given, comfortable, facts),) if slots < comfortable else ()


def _gib_up(count: int) -> str:
    """Bytes in GiB, rounded up, so that they hold what they are for."""
    return f"{math.ceil(count / GIB * 1000) / 1000:.3f}".rstrip("0").rstrip(".")


def _few(given: str, comfortable: int, facts: ModelFacts) -> str:
    return (
        f"{given}: with less than three times the {facts.top_k} experts of a token "
        f"({comfortable}) most of them are paged in anew for every token."
    )


def _parser(chosen: str | None, facts: ModelFacts, named: Callable[[Family], Named]) -> str | None:
    """The parser that the configuration chose, else the family's."""
    if chosen is not None:
        return None if chosen == "off" else chosen
    family = next((f for f in FAMILIES.values() if f.has(facts.model_type)), None)
    candidates = named(family) if family else ()
    return next((parser for text, parser in candidates if text in facts.chat_template), None)


_KEYS = {
    "language_model_only": "server.vision",
    "max_num_seqs": "server.max_num_seqs",
    "max_model_len": "server.max_model_len",
    "reasoning_parser": "server.reasoning_parser",
    "tool_call_parser": "server.tool_parser",
    "enable_auto_tool_choice": "server.tool_parser",
    "slots": "cache.slots",
    "cache_gb": "cache.cache_gb",
}
"""Which key of ours an engine option comes from; the others have only `engine.*`."""


def _settings(
    config: DaemonConfig, options: dict[str, Any], cache: dict[str, int | float]
) -> tuple[Setting, ...]:
    values = cache | options | config.engine
    return tuple(
        Setting(
            name, value, config.source(f"engine.{name}" if name in config.engine else _KEYS.get(name, ""))
        )
        for name, value in values.items()
    )


def read_facts(directory: Path, experts: int, top_k: int, slot_bytes: int = 0) -> ModelFacts:
    """The facts of the checkpoint in `directory`, of which `experts`, `top_k` and `slot_bytes` are known.

    Raises:
        CheckpointError: a `config.json` or `tokenizer_config.json` that cannot be read.
    """
    config = _json(directory / "config.json")
    text = config.get("text_config") or config
    lengths = (table.get("max_position_embeddings") for table in (text, config))
    widths = (text.get(key) for key in ("moe_intermediate_size", "intermediate_size"))
    hidden = text.get("hidden_size")
    return ModelFacts(
        model_type=str(config.get("model_type", "")),
        experts=experts,
        top_k=top_k,
        max_model_len=next((length for length in lengths if isinstance(length, int)), None),
        chat_template=_chat_template(directory),
        multimodal="vision_config" in config,
        slot_bytes=slot_bytes,
        hidden_size=hidden if isinstance(hidden, int) else 0,
        expert_width=next((width for width in widths if isinstance(width, int)), 0),
    )


def _chat_template(directory: Path) -> str:
    """The model's chat template, all variants of it in one text; "" where it has none."""
    files = [path.read_text(encoding="utf-8") for path in sorted(directory.glob("*.jinja"))]
    path = directory / "tokenizer_config.json"
    found = _json(path).get("chat_template") if path.is_file() else None
    variants = found if isinstance(found, list) else [{"template": found or ""}]
    return "\n".join([*files, *(str(variant.get("template", "")) for variant in variants)])


def _json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "Download the file again.") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is not a JSON object.", "Download the file again.")
    return table
