"""`vvllm-msd verify` as users run it, and what it says when an answer differs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vvllm_msd import verify
from vvllm_msd.verify_engine import Answer, Job

pytestmark = pytest.mark.engine


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vvllm_msd", "verify", *map(str, arguments)],
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
    assert {row["engine"] for row in report["rows"]} == {"paged, token waves", "paged, pair waves"}
    assert all(row["equal"] for row in report["rows"] if row["required"])
    assert all(row["positions"] > 16 for row in report["rows"])


@pytest.mark.slow
def test_against_itself(zoo_model: Callable[[str], Path]) -> None:
    run = command("--model", zoo_model("qwen3_moe"), "--slots", 8, "--reference", "self")
    assert run.returncode == 0, run.stderr
    assert "reference: self" in run.stdout
    assert "paged, 4 slots" in run.stdout
    assert run.stdout.rstrip().endswith("EQUAL")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--slots", 3), 78, "one token needs 4 experts at a time"),
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


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda a: Answer([*a.tokens[:-1], 499], a.logprobs, a.prompt_logprobs), "tokens differ"),
        (
            lambda a: Answer(
                a.tokens,
                [{t: p + 0.25 for t, p in a.logprobs[0].items()}, *a.logprobs[1:]],
                a.prompt_logprobs,
            ),
            "differ by up to 0.25",
        ),
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
    """The engines are stood in for by recorded answers: what is tested is the comparison."""

    def answers(job: Job) -> list[Answer]:
        one = Answer([1, 2], [{1: -0.5, 9: -2.0}, {2: -0.25}], [{3: -1.0}])
        paged = "additional_config" in job.engine
        prompts = [prompt for batch in job.batches for prompt in batch]
        return [change(one) if paged and i == 1 else one for i in range(len(prompts))]

    monkeypatch.setattr(verify, "run_engine", answers)
    args: dict[str, Any] = {
        "model": str(zoo_model("qwen3_moe")),
        "slots": 8,
        "cache_gb": None,
        "layers": None,
    }
    code = verify.main(argparse.Namespace(**args, reference="stock", json=False))
    out = capsys.readouterr().out
    assert code == 1
    assert verdict in out
    assert "NOT EQUAL" in out
