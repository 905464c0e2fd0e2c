"""A daemon that listens and then cannot start its engine says so to those who watch it, before it ends."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import zoo
from daemon_helpers import UnixConnection, daemon


@pytest.fixture
def short_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vv-") as directory:
        yield Path(directory)


@pytest.mark.parametrize(
    ("fault", "code", "status_code", "says"),
    [
        ("raise ModuleNotFoundError(name='vllm')", 78, "config", "module vllm is not installed"),
        ("1 // 0", 70, "internal", "ZeroDivisionError"),
    ],
)
def test_the_last_status_names_the_failure(
    fault: str,
    code: int,
    status_code: str,
    says: str,
    tmp_path: Path,
    short_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM is one here whose import waits for the test, and then fails."""
    package = tmp_path / "path" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import pathlib, time\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.05)\n"
        f"{fault}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    model = zoo.make("qwen3_moe", tmp_path / "model")
    with daemon(short_dir / "run", model, policy="lfru") as failing:
        failing.wait_for_log('"engine_loading"')
        connection = UnixConnection(failing.socket)
        with contextlib.closing(connection):
            connection.request("GET", "/vvllm/events")
            with connection.getresponse() as response:
                (tmp_path / "go").touch()
                lines = response.read().splitlines()
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]
        assert events[0]["stage"] == "starting"
        assert events[-1]["stage"] == "failed"
        assert events[-1]["error"]["code"] == status_code
        assert says in events[-1]["error"]["message"]
        assert failing.process.wait(20) == code, failing.log
        assert ("Traceback" in failing.log) == (code == 70)
        failing.assert_gone()
