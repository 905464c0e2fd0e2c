"""The daemon's configuration: where values come from, and what each kind of mistake is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vvllm_msd.config import KEYS, DaemonConfig, Given, load
from vvllm_shared import limits
from vvllm_shared.errors import ConfigError, Exit


def flag(key: str, value: str) -> Given:
    return Given(key, value, "flag", "--" + key.rpartition(".")[2])


MODEL = flag("model", "/m")


def from_file(tmp_path: Path, text: str, *flags: Given, **env: str) -> DaemonConfig:
    path = tmp_path / "vvllm-msd.toml"
    path.write_text(text, encoding="utf-8")
    return load(flags, path, env)


def test_defaults() -> None:
    config = load([MODEL], env={"HOME": "/nowhere"})
    assert (config.model, config.cache.slots, config.cache.cache_gb) == ("/m", None, None)
    assert (config.server.max_num_seqs, config.server.drain_seconds, config.server.watchdog_seconds) == (
        4,
        20,
        60,
    )
    assert (config.server.vision, config.policy.name, config.log.json) == (False, "lfru", None)
    assert (config.source("model"), config.source("cache.slots")) == ("flag", "default")


def test_a_flag_beats_the_environment_beats_the_file(tmp_path: Path) -> None:
    text = 'model = "/file"\n[server]\nmax_num_seqs = 1\nmax_model_len = 100\ndrain_seconds = 1\n'
    env = {"VVLLM_SERVER_MAX_NUM_SEQS": "2", "VVLLM_SERVER_MAX_MODEL_LEN": "200"}
    config = from_file(tmp_path, text, flag("server.max_num_seqs", "3"), **env)
    assert (config.server.max_num_seqs, config.server.max_model_len, config.server.drain_seconds) == (
        3,
        200,
        1,
    )
    sources = [config.source(f"server.{name}") for name in ("max_num_seqs", "max_model_len", "drain_seconds")]
    assert sources == ["flag", "env", "file"]


def test_the_first_usual_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "vvllm-ms" / "vvllm-msd.toml"
    file.parent.mkdir()
    file.write_text('model = "/usual"', encoding="utf-8")
    assert load(env={"XDG_CONFIG_HOME": str(tmp_path)}).model == "/usual"


def test_every_key_can_come_from_the_environment() -> None:
    text = {"bool": "true", "int": "8", "float": "2", "str": "x"}
    special = {"policy.name": "layer", "log.level": "debug"}
    for key in KEYS:
        kind = next((name for name in text if name in str(KEYS[key])), "str")
        name = "VVLLM_" + key.replace(".", "_").upper()
        config = load([] if key == "model" else [MODEL], env={name: special.get(key, text[kind])})
        assert config.source(key) == "env", key


def test_engine_options_are_read_as_toml_values(tmp_path: Path) -> None:
    text = 'model = "/m"\n[engine]\ndtype = "float32"\nkernel_config = { a = 1 }\n'
    options = (
        flag("engine.seed", "3"),
        flag("engine.quantization", "fp8"),
        flag("engine.enforce_eager", "false"),
    )
    config = from_file(tmp_path, text, *options, VVLLM_ENGINE_BLOCK_SIZE="16")
    assert config.engine == {
        "dtype": "float32", "kernel_config": {"a": 1}, "seed": 3, "quantization": "fp8",
        "enforce_eager": False, "block_size": 16,
    }  # fmt: skip
    assert (config.source("engine.dtype"), config.source("engine.block_size")) == ("file", "env")


def test_variables_that_are_no_keys_are_left_alone() -> None:
    env = {"VVLLM_RUNTIME_DIR": "/r", "VVLLM_HOST": "unix:///s", "VVLLM_BOARD": "/b", "VVLLM_BACKEND": "cpu"}
    assert load([MODEL], env=env | {"VLLM_LOGGING_LEVEL": "INFO"}).sources == {"model": "flag"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('modle = "x"', ["modle", "vvllm-msd.toml", "Did you mean model?"]),
        ("[server]\nmax_num_seq = 4", ["server.max_num_seq", "Did you mean server.max_num_seqs?"]),
        ("[sever]\nmax_num_seqs = 4", ["sever"]),
        ("server = 4", ["server", "must be a table", "[server]"]),
        (
            "[server]\nmax_num_seqs = '4'",
            ["server.max_num_seqs = '4'", "vvllm-msd.toml", "expected int", "got str"],
        ),
        ("[server]\nmax_num_seqs = 4.5", ["server.max_num_seqs = 4.5", "expected int", "got float"]),
        ("[server]\nmax_num_seqs = true", ["expected int", "got bool"]),
        ("[server]\nmax_num_seqs = 0", ["server.max_num_seqs = 0", ">= 1"]),
        ("[server]\nvision = 1", ["server.vision = 1", "expected bool"]),
        ("[server]\ndrain_seconds = nan", ["server.drain_seconds"]),
        ("[server]\nwatchdog_seconds = -1", ["server.watchdog_seconds", ">= 0"]),
        ("[cache]\nslots = 993", ["cache.slots = 993", f"<= {limits.SLOTS}"]),
        ("[cache]\nslots = 0", ["cache.slots = 0", ">= 1"]),
        ("[cache]\ncache_gb = 0", ["cache.cache_gb", "> 0"]),
        ("[cache]\ncache_gb = inf", ["cache.cache_gb"]),
        ("[cache]\ncache_gb = 1025", ["cache.cache_gb = 1025", "<= 1024"]),
        ("[policy]\nname = 'lru'", ["policy.name = 'lru'", "one of lfru, layer, off"]),
        ("[log]\nlevel = 'loud'", ["log.level", "loud"]),
        ("[cache]\nslots = 8\ncache_gb = 1.0", ["Both cache.slots and cache.cache_gb", "vvllm-msd.toml"]),
        ("model = ", ["vvllm-msd.toml", "not TOML"]),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, text)
    assert caught.value.exit_code == Exit.CONFIG
    for part in says:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"VVLLM_SERVER_MAX_NUM_SEQ": "4"}, "Did you mean VVLLM_SERVER_MAX_NUM_SEQS?"),
        ({"VVLLM_SLOTS": "4"}, "VVLLM_SLOTS"),
        ({"VVLLM_CACHE_SLOTS": "many"}, "cache.slots = 'many' (VVLLM_CACHE_SLOTS)"),
        ({"VVLLM_CACHE_SLOTS": ""}, "cache.slots"),
        ({"VVLLM_LOG_JSON": "perhaps"}, "log.json"),
        ({"VVLLM_CACHE_SLOTS": "4", "VVLLM_CACHE_CACHE_GB": "1"}, "Both"),
    ],
)
def test_mistakes_in_the_environment(env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load([MODEL], env=env)


def test_both_sizes_as_flags() -> None:
    with pytest.raises(ConfigError, match="Both"):
        load([MODEL, flag("cache.slots", "8"), flag("cache.cache_gb", "2")], env={})


def test_a_size_of_higher_priority_replaces_the_other_one(tmp_path: Path) -> None:
    config = from_file(tmp_path, 'model = "/m"\n[cache]\ncache_gb = 2.0', flag("cache.slots", "8"))
    assert (config.cache.slots, config.cache.cache_gb) == (8, None)
    assert (config.source("cache.slots"), config.source("cache.cache_gb")) == ("flag", "default")


def test_no_model() -> None:
    with pytest.raises(ConfigError, match="No model"):
        load(env={})


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load([MODEL], tmp_path / "absent.toml", {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        load([MODEL], tmp_path / "binary.toml", {})


def test_a_deep_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        from_file(tmp_path, "model = " + "[" * 100_000)
