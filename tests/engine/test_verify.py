"""`vvllm-msd verify` as users run it, and what it says when an answer differs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import zoo
from vvllm_msd import checkpoint, cut_model, engine_arguments, verify, verify_engine
from vvllm_msd.scratch import scratch_directory
from vvllm_msd.verify_engine import Answer, Job, Result
from vvllm_shared.errors import CheckpointError, EngineDiedError, UnsupportedError
from vvllm_shared.messages import LayerShape

pytestmark = pytest.mark.engine

VERIFY = [sys.executable, "-m", "vvllm_msd", "verify"]


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*VERIFY, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_equal_on_the_first_layers_of_a_model(zoo_model: Callable[[str], Path]) -> None:
    run = command("--model", zoo_model("glm4_moe"), "--slots", 5, "--layers", 2, "--json")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert (report["equal"], report["reference"], report["layers"]) == (True, "stock", 2)
    assert (report["device"], report["dtype"]) == ("cpu", "bfloat16")
    assert [(layer["slots"], layer["experts"]) for layer in report["paged"]] == [(5, 16)]
    assert {row["engine"] for row in report["rows"]} == {"paged, token waves", "paged, pair waves"}
    assert all(row["equal"] for row in report["rows"] if row["required"])
    assert all(row["positions"] > 16 for row in report["rows"])


@pytest.mark.slow
def test_against_itself(zoo_model: Callable[[str], Path]) -> None:
    run = command("--model", zoo_model("qwen3_moe"), "--slots", 8, "--reference", "self")
    assert run.returncode == 0, run.stderr
    assert "reference: self" in run.stdout
    assert "2 paged layers, 8 slots for 16 experts each" in run.stdout
    assert "paged, 4 slots" in run.stdout
    assert run.stdout.rstrip().endswith("EQUAL")


@pytest.mark.slow
def test_latent_attention_gets_the_blocks_that_the_cpu_computes(zoo_model: Callable[[str], Path]) -> None:
    run = command("--model", zoo_model("deepseek_v2"), "--slots", 5, "--layers", 2)
    assert run.returncode == 0, run.stderr
    assert "1 paged layers, 5 slots for 16 experts each" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--slots", 3, "--reference", "self"), 78, "one token needs 4 experts at a time"),
        (("--slots", 4, "--layers", 9), 2, "the model has"),
        (("--slots", 4, "--reference", "offload"), 78, "needs a GPU"),
    ],
)
def test_mistakes(
    arguments: tuple[object, ...], code: int, sentence: str, zoo_model: Callable[[str], Path]
) -> None:
    run = command("--model", zoo_model("qwen3_moe"), *arguments)
    assert (run.returncode, run.stdout) == (code, "")
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr


def test_layers_without_experts_are_refused(zoo_model: Callable[[str], Path]) -> None:
    run = command("--model", zoo_model("glm4_moe"), "--slots", 4, "--layers", 1)
    assert (run.returncode, run.stdout) == (2, "")
    assert "nothing to page" in run.stderr
    assert "Give 2 … 2." in run.stderr


def test_a_pager_that_is_not_loaded_is_not_equal_to_stock(zoo_model: Callable[[str], Path]) -> None:
    run = command(
        "--model", zoo_model("qwen3_moe"), "--slots", 8, "--reference", "self", VLLM_PLUGINS="others"
    )
    assert (run.returncode, run.stdout) == (78, "")
    assert "2 MoE layers" in run.stderr
    assert "VLLM_PLUGINS" in run.stderr


@pytest.mark.slow
def test_an_engine_with_nothing_to_page_is_refused(tmp_path: Path) -> None:
    dense = zoo.make("deepseek_v2", tmp_path / "dense", num_hidden_layers=1)
    engine = {
        "enforce_eager": True,
        "max_model_len": 128,
        "kv_cache_memory_bytes": 64 << 20,
        "additional_config": {"expert_cache": {"slots": 4}},
    }
    with pytest.raises(UnsupportedError, match="No layer"):
        verify.run_engine(Job(str(dense), [[[5, 6, 7]]], 1, engine), tmp_path)


# The engine's process, stood in for by a script: what is tested is the way of its answer.

RESULT = "Result([Answer([1], [{7: -0.5, 8: float('nan')}] * 20_000, [])], 'cpu', 'bfloat16', [])"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def install(lines: str) -> None:
        script = tmp_path / "python"
        script.write_text(
            f"#!{sys.executable}\nimport os, sys, msgspec\nfrom vvllm_msd.verify_engine import *\n"
            f"result = msgspec.msgpack.encode({RESULT})\nout = int(sys.argv[3])\n{lines}\n"
        )
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))

    return install


@pytest.mark.timeout(60)
def test_much_on_both_channels_blocks_nobody(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    stand_in(
        "with os.fdopen(out, 'wb') as pipe: pipe.write(result)\nfor _ in range(5000): print('x' * 99, file=sys.stderr)"
    )
    result = verify.run_engine(Job("model", [[[1] * 200_000]], 1, {}), tmp_path)
    assert len(result.answers[0].logprobs) == 20_000
    first = result.answers[0].logprobs[0]
    assert first[7] == -0.5
    assert first[8] != first[8]


@pytest.mark.parametrize("answer", ["b''", "result[:-1]"])
def test_an_engine_that_dies_is_told_of_with_its_last_words(
    answer: str, stand_in: Callable[[str], None], tmp_path: Path
) -> None:
    stand_in(f"os.write(out, {answer})\nprint('no such device', file=sys.stderr)\nos._exit(3)")
    with pytest.raises(EngineDiedError, match="code 3") as death:
        verify.run_engine(Job("model", [[[1] * 200_000]], 1, {}), tmp_path)
    assert "no such device" in death.value.hint


# What a verify that is ended leaves behind.


@contextmanager
def running(model: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A verify and the pid of its engine's process."""
    with subprocess.Popen(
        [*VERIFY, "--model", str(model), "--slots", "8", "--layers", "2"],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            yield process, int(eventually(lambda: children.read_text().split())[0])
        finally:
            process.kill()


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_engine_ends_with_the_command_and_its_directory_is_removed(
    number: signal.Signals, zoo_model: Callable[[str], Path], tmp_path: Path
) -> None:
    def directories() -> list[Path]:
        return list(tmp_path.glob("vvllm-ms/vvllm-verify-*/"))

    model = zoo_model("glm4_moe")
    with running(model, tmp_path) as (process, engine):
        assert len(directories()) == 1
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        eventually(lambda: not runs(engine), seconds=5)
    assert process.returncode == (143 if number == signal.SIGTERM else -9)
    assert said == ""
    assert len(directories()) == (0 if number == signal.SIGTERM else 1)
    command("--model", model, "--slots", 8, "--layers", 9, XDG_CACHE_HOME=str(tmp_path))
    assert directories() == []


def test_the_directory_of_a_living_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stray = tmp_path / "vvllm-ms" / "run-of-nobody"
    stray.mkdir(parents=True)
    other = tmp_path / "vvllm-ms" / "demo"
    other.mkdir()
    with scratch_directory("run-") as mine:
        assert not stray.exists()
        (mine / "file").touch()
        with scratch_directory("run-") as second:
            assert (mine / "file").exists()
            assert second != mine
    assert not mine.exists()
    assert other.exists()


# The comparison, with recorded answers in place of the engines.


def recorded(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Answer], Answer],
    device: str = "cpu",
    dtype: str = "bfloat16",
    only: Callable[[Job], bool] = lambda _: True,
) -> list[Job]:
    """Engines of which the paged ones differ in the second prompt; the jobs that they get."""
    jobs: list[Job] = []

    def answers(job: Job, _scratch: Path) -> Result:
        jobs.append(job)
        one = Answer([1, 2], [{1: -0.5, 9: -2.0}, {2: -0.25}], [{3: -1.0}])
        prompts = [prompt for batch in job.batches for prompt in batch]
        layers = [LayerShape("model.layers.0.mlp.experts", 16, 8, 4, 100)] if job.paged else []
        found = [change(one) if job.paged and only(job) and i == 1 else one for i in range(len(prompts))]
        return Result(found, device, dtype, layers)

    monkeypatch.setattr(verify, "run_engine", answers)
    return jobs


def arguments(model: Path) -> argparse.Namespace:
    given: dict[str, Any] = {"model": str(model), "slots": 8, "cache_gb": None, "layers": None}
    return argparse.Namespace(**given, reference="stock", json=False)


def moved(answer: Answer, by: float = 0.25) -> Answer:
    first, *rest = answer.logprobs
    return Answer(answer.tokens, [{t: p + by for t, p in first.items()}, *rest], answer.prompt_logprobs)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda a: Answer([*a.tokens[:-1], 499], a.logprobs, a.prompt_logprobs), "tokens differ"),
        (moved, "differ by up to 0.25"),
        (lambda a: moved(a, float("nan")), "differ by up to inf"),
        (
            lambda a: Answer(a.tokens, a.logprobs, [{t: p - 0.5 for t, p in a.prompt_logprobs[0].items()}]),
            "differ by up to 0.5",
        ),
    ],
)
def test_one_position_that_differs_is_a_failure(
    change: Callable[[Answer], Answer],
    verdict: str,
    zoo_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded(monkeypatch, change)
    code = verify.main(arguments(zoo_model("qwen3_moe")))
    out = capsys.readouterr().out
    assert code == 1
    assert verdict in out
    assert "NOT EQUAL" in out
    assert "1 paged layers, 8 slots for 16 experts each" in out


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_pair_waves_round_only_on_the_cpu(
    dtype: str,
    code: int,
    tmp_path: Path,
    zoo_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def in_pair_waves(job: Job) -> bool:
        return "pair_waves_above" not in job.engine_on_cpu["additional_config"]["expert_cache"]

    recorded(monkeypatch, moved, "cpu", dtype, in_pair_waves)
    # One expert a token leaves nothing to add, and nothing to round.
    assert not verify.compare(zoo_model("qwen3_moe"), 1, {"slots": 8}, "stock", tmp_path).equal
    assert verify.main(arguments(zoo_model("qwen3_moe"))) == code
    assert ("rounding; not required" in capsys.readouterr().out) == (code == 0)


@pytest.mark.parametrize(
    ("device", "reference", "engines"),
    [
        ("cpu", "stock", ["paged, token waves", "paged, pair waves"]),
        ("cuda", "stock", ["paged"]),
        ("cuda", "offload", ["paged"]),
        ("cuda", "self", ["paged, 4 slots", "paged, free slots poisoned"]),
    ],
)
def test_the_engines_of_each_device(
    device: str,
    reference: str,
    engines: list[str],
    zoo_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All decode in graphs on a GPU, where an engine that is given pair_waves_above is refused."""
    jobs = recorded(monkeypatch, lambda answer: answer, device)
    given = arguments(zoo_model("qwen3_moe"))
    given.reference, given.json = reference, True
    assert verify.main(given) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert list(dict.fromkeys(row["engine"] for row in rows)) == engines
    assert [job.paged for job in jobs] == [reference == "self"] + [True] * len(engines)
    for job in jobs:
        assert job.engine_on_cuda == {
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4],
            }
        }
        assert job.engine_on_cpu["enforce_eager"] is True
        assert "enforce_eager" not in job.engine
        if job.paged:
            assert "pair_waves_above" not in job.engine["additional_config"]["expert_cache"]
    assert jobs[-1].engine["additional_config"]["expert_cache"] == {"slots": 8, "poison": True}


# What the engines are started with.


def test_verify_and_daemon_give_their_engines_the_same_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environments(flashinfer: object, **given: str) -> tuple[dict[str, str], dict[str, str]]:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: flashinfer)
        daemon, own = dict(given), dict(given)
        engine_arguments.set_environment(tmp_path, 7, daemon)
        monkeypatch.setattr(os, "environ", own)
        verify_engine.set_environment()
        return daemon, own

    for flashinfer in (None, object()):
        daemon, own = environments(flashinfer)
        assert own.pop("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        assert own.items() <= daemon.items()
        assert {"HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"} <= own.keys()
        assert ("VLLM_USE_FLASHINFER_SAMPLER" in own) == (flashinfer is None)
    _, own = environments(None, VLLM_LOGGING_LEVEL="DEBUG")
    assert own["VLLM_LOGGING_LEVEL"] == "DEBUG"


def renamed(model: Path, into: Path, part: str | None, key: str, segment: str) -> Path:
    """`model` with its text config in `part`, its number of layers in `key`, its layers in `segment`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, into)
    config = json.loads((into / "config.json").read_text())
    config[key] = config.pop("num_hidden_layers")
    whole = config if part is None else {"architectures": config.pop("architectures"), part: config}
    (into / "config.json").write_text(json.dumps(whole))
    tensors = load_file(into / "model.safetensors")
    tensors = {name.replace("model.layers.", f"model.{segment}."): t for name, t in tensors.items()}
    tensors["visual.blocks.7.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return into


@pytest.mark.parametrize(
    ("part", "key", "segment"),
    [
        (None, "num_hidden_layers", "layers"),
        ("text_config", "n_layers", "blocks"),
        ("llm_config", "num_layers", "h"),
        ("language_config", "num_hidden_layers", "layers"),
    ],
)
def test_cut_in_the_words_of_many_families(
    part: str | None, key: str, segment: str, zoo_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors import safe_open

    model = renamed(zoo_model("qwen3_moe"), tmp_path / "model", part, key, segment)
    into = tmp_path / "cut"
    into.mkdir()
    cut_model.cut(checkpoint.validate(model), 1, into)
    found = checkpoint.validate(into)
    assert (found.layers, found.moe_layers) == (1, (0,))
    with safe_open(into / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    assert not any(name.startswith(f"model.{segment}.1.") for name in names)
    assert {"visual.blocks.7.norm.weight", "model.norm.weight"} <= names


def test_a_config_that_lacks_a_size_is_told_of(zoo_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = shutil.copytree(zoo_model("qwen3_moe"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    del config["vocab_size"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has no vocab_size"):
        verify.main(arguments(model))
