"""The daemon's configuration: typed, from a TOML file, the environment and flags, in rising priority.

Every key lives in one dataclass below and has the same name everywhere: `[server] max_num_seqs` in the file
is `VVLLM_SERVER_MAX_NUM_SEQS` in the environment. Unknown keys are errors, so that a typing mistake never
passes as a default.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from vvllm_shared import limits
from vvllm_shared.errors import ConfigError
from vvllm_shared.paths import config_files

NOT_KEYS = frozenset({"VVLLM_RUNTIME_DIR", "VVLLM_HOST", "VVLLM_BOARD", "VVLLM_BACKEND"})
"""Variables of ours that are no configuration keys."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


@dataclass(frozen=True)
class CacheConfig:
    """How many experts stay in VRAM: `slots` per layer or `cache_gb` GiB, never both.

    Without either it is three times the model's top_k: the smallest number that is not warned about.
    """

    slots: Annotated[int, msgspec.Meta(ge=1, le=limits.SLOTS)] | None = None
    cache_gb: Annotated[float, msgspec.Meta(gt=0, le=limits.CACHE_GB)] | None = None


@dataclass(frozen=True)
class ServerConfig:
    """What clients may ask for, and how patient the daemon is."""

    max_num_seqs: Count = 4
    """Requests that decode together; the others wait."""
    max_model_len: Count | None = None
    """Tokens of prompt and answer; by default 32,768, or less where the model has less."""
    vision: bool = False
    """Load the vision part of a multimodal model."""
    reasoning_parser: str | None = None
    """vLLM's name of it, "off", or by default the one of the model's family."""
    tool_parser: str | None = None
    """As `reasoning_parser`; with one, the model may call tools by itself."""
    drain_seconds: Seconds = 20.0
    """How long running requests may go on after SIGTERM."""
    watchdog_seconds: Seconds = 60.0
    """The engine is restarted after so long without progress while requests run (ten times as long in its first
    32 steps, which compile kernels); 0 never."""
    max_restarts: Annotated[int, msgspec.Meta(ge=0)] = 5
    """Engines that may die, or fail to start, in a row before the daemon gives up."""


@dataclass(frozen=True)
class PolicyConfig:
    """Which policy the policy process runs; "off" starts none and the pager's LRU decides alone."""

    name: Literal["lfru", "layer", "off"] = "lfru"


@dataclass(frozen=True)
class LogConfig:
    """Logging; `json` defaults to JSON unless stderr is a terminal."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    json: bool | None = None


@dataclass(frozen=True)
class DaemonConfig:
    """All that the daemon is told. Made by `load`.

    Attributes:
        model: directory of a checkpoint, or "demo".
        engine: fields of vLLM's `AsyncEngineArgs`, handed through.
        sources: for each key that was given ("server.max_num_seqs"), by what: file, env or flag.
    """

    model: str
    cache: CacheConfig = field(default_factory=CacheConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    log: LogConfig = field(default_factory=LogConfig)
    engine: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def source(self, key: str) -> str:
        """What gave `key` its value: default, file, env or flag."""
        return self.sources.get(key, "default")


SECTIONS: dict[str, type[CacheConfig | ServerConfig | PolicyConfig | LogConfig]] = {
    "cache": CacheConfig,
    "server": ServerConfig,
    "policy": PolicyConfig,
    "log": LogConfig,
}
KEYS: dict[str, Any] = {"model": str} | {
    f"{section}.{name}": hint
    for section, table in SECTIONS.items()
    for name, hint in get_type_hints(table, include_extras=True).items()
}
"""Every key with its type; `engine.*` is open and checked against vLLM when the engine is set up."""


@dataclass(frozen=True)
class Given:
    """One value as somebody gave it.

    Attributes:
        source: file, env or flag.
        where: the file's path, the variable's or the flag's name, for messages.
        text: the value is a string that still has to be read as its key's type.
    """

    key: str
    value: Any
    source: Literal["file", "env", "flag"]
    where: str
    text: bool = True


def load(
    flags: Sequence[Given] = (), file: Path | None = None, env: Mapping[str, str] = os.environ
) -> DaemonConfig:
    """The configuration from file, environment and flags, the later winning key by key.

    Args:
        flags: what the command line gave.
        file: the file that `--config` named; None takes the first of the usual ones that exists.

    Raises:
        ConfigError: an unreadable file, an unknown key, a wrong type, or keys that exclude each other.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in (*SECTIONS, "engine", "")}
    sources: dict[str, str] = {}
    for given in (*_from_file(file, env), *_from_env(env), *flags):
        section, _, name = given.key.rpartition(".") if given.key in KEYS else given.key.partition(".")
        # One size replaces the other only where it has the higher priority; two in one place are an error.
        if given.key in _SIZES:
            other = _SIZES[given.key]
            if sources.get(other) == given.source:
                raise _both_sizes(given.where)
            values["cache"].pop(other.partition(".")[2], None)
            sources.pop(other, None)
        values[section][name] = _convert(given)
        sources[given.key] = given.source
    if "model" not in values[""]:
        raise ConfigError(
            "No model is configured.",
            'Pass --model DIR (or --model demo), or set model = "DIR" in the configuration file.',
        )
    return DaemonConfig(
        model=values[""]["model"],
        cache=CacheConfig(**values["cache"]),
        server=ServerConfig(**values["server"]),
        policy=PolicyConfig(**values["policy"]),
        log=LogConfig(**values["log"]),
        engine=values["engine"],
        sources=sources,
    )


_SIZES = {"cache.slots": "cache.cache_gb", "cache.cache_gb": "cache.slots"}


def _both_sizes(where: str) -> ConfigError:
    return ConfigError(
        f"Both cache.slots and cache.cache_gb are given ({where}).",
        "Give one of them: a number of slots per layer, or GiB of VRAM for experts.",
    )


def _from_file(file: Path | None, env: Mapping[str, str]) -> list[Given]:
    path = file or next((path for path in config_files(env) if path.exists()), None)
    if path is None:
        return []
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"The configuration file {path} is not TOML: {error}.", "Correct it there."
        ) from error
    given: list[Given] = []
    for name, value in table.items():
        if name in SECTIONS or name == "engine":
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{name} in {path} must be a table.", f"Write [{name}] and its keys below it."
                )
            given += [
                Given(f"{name}.{key}", item, "file", str(path), text=False) for key, item in value.items()
            ]
        else:
            given.append(Given(name, value, "file", str(path), text=False))
    return given


def _from_env(env: Mapping[str, str]) -> list[Given]:
    names = {"VVLLM_" + key.replace(".", "_").upper(): key for key in KEYS}
    given = []
    for variable in sorted(name for name in env if name.startswith("VVLLM_") and name not in NOT_KEYS):
        if variable.startswith("VVLLM_ENGINE_"):
            key = "engine." + variable.removeprefix("VVLLM_ENGINE_").lower()
        elif variable in names:
            key = names[variable]
        else:
            raise ConfigError(
                f"The environment variable {variable} is no configuration key.",
                did_you_mean(variable, names) or "Unset it.",
            )
        given.append(Given(key, env[variable], "env", variable))
    return given


def _convert(given: Given) -> Any:
    """The value as its key's type; text of an engine field is read as a TOML value where it is one."""
    if given.key.startswith("engine."):
        return _toml_value(given.value) if given.text else given.value
    if given.key not in KEYS:
        known = (*KEYS, "engine")
        raise ConfigError(
            f"Unknown key {given.key} ({given.where}).",
            did_you_mean(given.key, known) or f"Known are: {', '.join(known)}.",
        )
    kind = KEYS[given.key]
    try:
        return msgspec.convert(given.value, kind, strict=not given.text)
    except msgspec.ValidationError as error:
        expected = str(error).replace("`", "").replace("Expected", "expected")
        if get_origin(kind) is Literal:
            expected = f"expected one of {', '.join(get_args(kind))}"
        raise ConfigError(
            f"{given.key} = {given.value!r} ({given.where}) has a wrong value: {expected}.",
            "Correct it there.",
        ) from error


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known name, or "" when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]}?" if close else ""
