"""`vvllm-ctl` as users and scripts run it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_daemon import STATUS, ScriptedDaemon, refusal

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_ready_daemon(daemon: ScriptedDaemon, run: Run) -> None:
    done = run("vvllm-ctl", "status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "stage     ready",
        "model     tiny-moe",
        "daemon    pid 11 · engine 12 · engine start no. 1 · up 1 h 2 min",
        "requests  3",
        "slots     4 of 8 experts in each of 2 layers · 1.0 MiB each, 8.0 MiB in all",
        "cache     100 hits, 10 misses (90.9% hits) · 10.0 MiB paged in",
        "decode    70 hits, 5 misses (93.3% hits)",
        "prefill   30 hits, 5 misses (85.7% hits)",
        "waves     5 token, 6 pair in 7 steps",
        "policy    live · lfru · pid 13 · advised 1,234 times · restarted 2 times",
        "versions  vllm 0.32.0 · vvllm-ms 0.1.0",
    ]


def test_json_is_the_daemons_own(daemon: ScriptedDaemon, run: Run) -> None:
    done = run("vvllm-ctl", "status", "--json", "--socket", str(daemon.path))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == STATUS
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("stage", "code"),
    [
        ("ready", 0),
        ("starting", 75),
        ("loading", 75),
        ("processing", 75),
        ("warming", 75),
        ("restarting", 75),
        ("draining", 75),
        ("failed", 70),
        ("of a newer daemon", 75),
    ],
)
def test_only_ready_is_success(daemon: ScriptedDaemon, run: Run, stage: str, code: int) -> None:
    daemon.routes["/vvllm/status"] = refusal({**STATUS, "stage": stage}, 200)
    assert run("vvllm-ctl", "status").returncode == code
    assert run("vvllm-ctl", "status", "--json").returncode == code


def test_loading_shows_how_far(daemon: ScriptedDaemon, run: Run) -> None:
    loading = {"stage": "loading", "progress": 0.42, "detail": "layer 20 of 48", "cache": {}, "policy": None}
    daemon.routes["/vvllm/status"] = refusal(loading, 200)
    done = run("vvllm-ctl", "status")
    assert done.stdout.splitlines()[0] == "stage     loading 42%: layer 20 of 48"
    assert "policy" not in done.stdout


def test_a_failed_daemon_says_why(daemon: ScriptedDaemon, run: Run) -> None:
    error = {"message": "Shard 3 is truncated.", "hint": "Download it again."}
    daemon.routes["/vvllm/status"] = refusal({**STATUS, "stage": "failed", "error": error}, 200)
    lines = run("vvllm-ctl", "status").stdout.splitlines()
    assert lines[1:3] == ["error     Shard 3 is truncated.", "          Download it again."]


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"stage": 3, "cache": {"hits": "x"}, "versions": {}, "uptime_s": None},
        {"cache": {"by_layer": []}},
        {"cache": {"by_layer": {"decode": [[1], 2, ["x", None]], "prefill": None}}},
    ],
)
def test_a_status_with_holes_is_shown(daemon: ScriptedDaemon, run: Run, content: Any) -> None:
    daemon.routes["/vvllm/status"] = refusal(content, 200)
    done = run("vvllm-ctl", "status")
    assert done.returncode == 75
    assert done.stdout.startswith("stage")


def test_no_daemon(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    done = run("vvllm-ctl", "status", "--socket", path)
    assert (done.returncode, done.stdout) == (69, "")
    assert path in done.stderr
    done = run("vvllm-ctl", "status", "--socket", path, "--json")
    assert (done.returncode, done.stderr) == (69, "")
    assert json.loads(done.stdout)["error"]["code"] == "daemon_absent"


def test_an_answer_that_is_no_status(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes["/vvllm/status"] = refusal([1], 200)
    done = run("vvllm-ctl", "status")
    assert done.returncode == 70
    assert "does not understand" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["stauts"], ["status", "--jsn"], ["status", "now"], ["status", "--json", "--socket", ""]],
)
def test_mistakes(run: Run, arguments: list[str]) -> None:
    done = run("vvllm-ctl", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "vvllm-ctl" in done.stderr
