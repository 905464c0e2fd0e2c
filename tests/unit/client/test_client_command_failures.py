"""`vvllm-client` when something is wrong: mistakes, no daemon, refusals, broken answers, signals, closed pipes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_daemon import HELLO, WAIT, Connection, ScriptedDaemon, answer, chunk, refusal

from vvllm_shared.errors import BusyError, EngineDiedError, PermissionDeniedError, UnsupportedError

CHAT = "/v1/chat/completions"

Run = Callable[..., subprocess.CompletedProcess[str]]
Popen = Callable[..., "subprocess.Popen[bytes]"]


# --- Mistakes


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens", "0"],
        ["--max-tokens", "-3"],
        ["--max-tokens", "many"],
        ["--temperature", "nan"],
        ["--temperature", "-1"],
        ["--top-p", "2"],
        ["--seed", "-1"],
        ["--stop", ""],
        ["--raw", "--system", "x"],
        ["--raw", "--think"],
        ["--raw", "--no-think"],
        ["--socket", ""],
        ["--max-tok", "3"],
        ["--wait", "3"],
        ["second prompt"],
    ],
)
def test_a_mistake_is_refused_before_anything_is_sent(
    daemon: ScriptedDaemon, run: Run, arguments: list[str]
) -> None:
    done = run("vvllm-client", "hi", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "vvllm-client: error: " in done.stderr
    assert daemon.seen == []


def test_a_vvllm_host_that_names_nothing(run: Run) -> None:
    done = run("vvllm-client", "hi", env={"VVLLM_HOST": "127.0.0.1"})
    assert done.returncode == 78
    assert "VVLLM_HOST" in done.stderr


# --- The four ways of not reaching the daemon


def test_no_socket(run: Run, tmp_path: Path) -> None:
    done = run("vvllm-client", "hi", "--socket", str(tmp_path / "none.sock"))
    assert done.returncode == 69
    assert f"No daemon is running: there is no socket at {tmp_path}/none.sock." in done.stderr
    assert "vvllm-msd serve" in done.stderr


def test_the_usual_places_are_named(run: Run, tmp_path: Path) -> None:
    if Path("/run/vvllm-ms/http.sock").exists():
        pytest.skip("a system-wide daemon is installed here")
    done = run("vvllm-client", "hi")
    assert done.returncode == 69
    assert f"{tmp_path}/vvllm-ms/http.sock or /run/vvllm-ms/http.sock" in done.stderr


def test_a_socket_that_a_dead_daemon_left(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    done = run("vvllm-client", "hi", "--socket", str(path))
    assert done.returncode == 69
    assert f"The socket {path} is there, but no daemon listens on it" in done.stderr


DROP_ROOTS_RIGHTS = """
import ctypes
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH; PR_CAPBSET_DROP
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
"""


def test_a_socket_that_is_forbidden(daemon: ScriptedDaemon, run: Run) -> None:
    assert daemon.path is not None
    daemon.path.chmod(0)
    done = run("vvllm-client", "hi", before=DROP_ROOTS_RIGHTS)
    assert done.returncode == 77
    assert f"You are not allowed to use the daemon's socket {daemon.path}" in done.stderr
    assert "usermod -aG vvllm-ms" in done.stderr


LOADING = {
    **BusyError("The model is not ready.").as_json(),
    "status": {"stage": "loading", "progress": 0.42, "detail": "layer 20 of 48"},
}


def test_a_daemon_that_loads(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes["/v1/models"] = refusal(LOADING, 503, Retry_After="5")
    done = run("vvllm-client", "hi")
    assert done.returncode == 75
    assert f"The daemon at {daemon.path} is loading the model (42%): layer 20 of 48." in done.stderr
    assert "Try again in 5 s." in done.stderr


# --- What goes wrong later


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (refusal({"error": {"message": "Too long.", "code": 400}}, 400), 65),
        (refusal({"error": {"message": "Too large."}}, 413), 65),
        (refusal({"error": {"message": "No such field."}}, 422), 65),
        (refusal(PermissionDeniedError("Not you.").as_json(), 403), 77),
        (refusal({"error": {"message": "Full."}}, 429), 75),
        (refusal(EngineDiedError("It died.").as_json(), 503), 70),
        (refusal(UnsupportedError("Not here.").as_json(), 422), 78),
        (refusal({"detail": "?"}, 500), 1),
        (answer([chunk("Hel"), EngineDiedError("It died.", "Again.").as_json()]), 1),
        (answer(HELLO, done=False), 1),
        (answer([chunk("Hel")]), 1),
        (lambda connection: None, 69),
    ],
)
def test_the_exit_code_says_what_went_wrong(daemon: ScriptedDaemon, run: Run, script: Any, code: int) -> None:
    daemon.routes[CHAT] = script
    done = run("vvllm-client", "hi")
    assert done.returncode == code
    assert done.stderr.startswith("vvllm-client: ")
    done = run("vvllm-client", "hi", "--json")
    *_, error, end = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, done.stderr) == (code, "")
    assert error["type"] == "error"
    assert error["error"]["message"]
    assert end == {"type": "end", "finish_reason": None, "exit_code": code}


def test_an_error_after_a_part_of_the_answer(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[CHAT] = answer(
        [chunk("Hel"), EngineDiedError("The engine died.", "Send it again.").as_json()]
    )
    done = run("vvllm-client", "hi")
    assert (done.returncode, done.stdout) == (1, "Hel")
    assert done.stderr == "vvllm-client: The engine died.\n  Send it again.\n"


def endless(closed: threading.Event) -> Callable[[Connection], None]:
    def script(connection: Connection) -> None:
        connection.start_stream()
        connection.send_event(chunk("Hel"))
        if connection.wait_closed():
            closed.set()

    return script


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ctrl_c_closes_the_connection(daemon: ScriptedDaemon, popen: Popen, options: list[str]) -> None:
    closed = threading.Event()
    daemon.routes[CHAT] = endless(closed)
    # A test run in the background may ignore SIGINT, and children inherit that.
    process = popen("vvllm-client", "hi", *options, before="import signal; signal.signal(2, signal.SIG_DFL)")
    assert process.stdout is not None
    first = process.stdout.read(3) if not options else process.stdout.readline() + process.stdout.readline()
    assert b"Hel" in first
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT)
    assert process.returncode == 130
    assert err == b""
    assert closed.wait(WAIT)
    assert out == b"" or json.loads(out) == {"type": "end", "finish_reason": None, "exit_code": 130}


def test_ctrl_c_while_nothing_has_come_yet(daemon: ScriptedDaemon, popen: Popen) -> None:
    asked, closed = threading.Event(), threading.Event()

    def script(connection: Connection) -> None:
        asked.set()
        if connection.wait_closed():
            closed.set()

    daemon.routes[CHAT] = script
    process = popen("vvllm-client", "hi", before="import signal; signal.signal(2, signal.SIG_DFL)")
    assert asked.wait(WAIT)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT) == 130
    assert closed.wait(WAIT)


def test_a_closed_pipe_is_quiet_and_aborts(daemon: ScriptedDaemon, popen: Popen) -> None:
    closed = threading.Event()

    def script(connection: Connection) -> None:
        connection.start_stream()
        connection.send_event(chunk("Hel"))
        try:
            while not reader_gone.wait(0.01):
                pass
            for _ in range(1000):
                connection.send_event(chunk("lo"))
                closed.wait(0.01)
        except OSError:
            closed.set()

    reader_gone = threading.Event()
    daemon.routes[CHAT] = script
    process = popen("vvllm-client", "hi")
    assert process.stdout is not None
    assert process.stdout.read(3) == b"Hel"
    process.stdout.close()
    reader_gone.set()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(WAIT) == 141
    assert closed.wait(WAIT)


def test_a_full_disk_is_told(daemon: ScriptedDaemon, run: Run) -> None:
    daemon.routes[CHAT] = answer()
    with open("/dev/full", "wb") as full:
        done = run("vvllm-client", "hi", stdout=full)
    assert done.returncode == 1
    assert "cannot be written: No space left on device" in done.stderr
