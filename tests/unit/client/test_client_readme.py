"""The README's example of the Python API runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripted_daemon import ScriptedDaemon, answer

README = Path(__file__).parents[3] / "README.md"


def test_the_example(
    daemon: ScriptedDaemon,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon.routes["/v1/chat/completions"] = answer()
    monkeypatch.setenv("XDG_RUNTIME_DIR", environment["XDG_RUNTIME_DIR"])
    for name in ("VVLLM_HOST", "VVLLM_RUNTIME_DIR", "RUNTIME_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})  # noqa: S102
    assert capsys.readouterr().out == "Hello"
