from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_daemon import ScriptedDaemon

BIN = Path(sys.executable).parent


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    """A scripted daemon where `environment` lets a client look for one."""
    scripted = ScriptedDaemon.at(tmp_path / "vvllm-ms" / "http.sock")
    yield scripted
    scripted.close()


@pytest.fixture
def tcp_daemon() -> Iterator[ScriptedDaemon]:
    """A scripted daemon on a port of the loopback interface."""
    scripted = ScriptedDaemon(socket.create_server(("127.0.0.1", 0)))
    yield scripted
    scripted.close()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What a command sees: nothing of the developer's own settings."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "LANG": "C.UTF-8",
    }


@pytest.fixture
def popen(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start an installed command; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(
        command: str, *args: str | bytes, env: dict[str, str] | None = None, before: str = "", **options: Any
    ) -> subprocess.Popen[bytes]:
        line: list[str | bytes] = [str(BIN / command), *args]
        if before:  # Python to run in the process before it becomes the command
            become = f"import os, sys\n{before}\nos.execv(sys.argv[1], sys.argv[1:])"
            line: list[str | bytes] = [sys.executable, "-S", "-c", become, *line]
        settings = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        process = subprocess.Popen(line, env={**environment, **(env or {})}, **settings)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def run(popen: Callable[..., subprocess.Popen[bytes]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run an installed command to its end, its output as text; `stdin` is bytes to pipe in."""

    def finish(
        command: str,
        *args: str | bytes,
        stdin: bytes | None = None,
        stdin_file: int = subprocess.DEVNULL,
        **options: Any,
    ) -> Any:
        options["stdin"] = subprocess.PIPE if stdin is not None else stdin_file
        process = popen(command, *args, **options)
        out, err = process.communicate(stdin, timeout=30)
        return subprocess.CompletedProcess(args, process.returncode, (out or b"").decode(), err.decode())

    return finish
