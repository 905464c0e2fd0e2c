"""A real `vvllm-msd serve` for tests, the processes that belong to it, and clients that can misbehave.

Run as a script, this is a client process of its own that a test can stop or kill:
`python daemon_helpers.py SOCKET JSON` streams one completion and prints its text.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MARK = "DAEMON_TEST_MARK"


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float = 120.0) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass
class Reply:
    """One whole answer."""

    status: int
    json: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return str(self.json["choices"][0]["text"])


@dataclass
class Stream:
    """A streamed completion as it arrives: its text so far, and the error that ended it, if one did."""

    response: http.client.HTTPResponse
    connection: UnixConnection
    text: str = ""
    error: dict[str, Any] | None = None

    def read(self, characters: int | None = None) -> Stream:
        """Read until so much text is there; None reads to the end."""
        while characters is None or len(self.text) < characters:
            line = self.response.readline()
            if not line or line.strip() == b"data: [DONE]":
                break
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    self.error = self.error or event["error"]
                else:
                    self.text += event["choices"][0]["text"]
        return self

    def close(self) -> None:
        self.response.close()
        self.connection.close()


def completion(prompt: str, tokens: int, **options: Any) -> dict[str, Any]:
    """A greedy completion that runs to `tokens` whatever the model says."""
    return {
        "model": "qwen3_moe",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **options,
    }


class DaemonProcess:
    """One `vvllm-msd serve`. Its log is a file; its processes carry a mark in their environment."""

    def __init__(self, root: Path, model: Path, *args: str, policy: str = "off") -> None:
        self.root = root
        self.socket = root / "http.sock"
        self.log_path = root.with_suffix(f".{uuid.uuid4().hex[:8]}.log")
        self._mark = uuid.uuid4().hex
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VVLLM_")}
        # SPT_NOENV: vLLM renames its processes, which would overwrite the mark.
        environment = kept | {"VVLLM_RUNTIME_DIR": str(root), _MARK: self._mark, "SPT_NOENV": "1"}
        script = Path(sysconfig.get_path("scripts")) / "vvllm-msd"
        command = [script, "serve", "--config", os.devnull, "--model", model, "--slots", "8", "--json-log"]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--policy", policy, *args],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    # What it says

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its log events of one name. (A line without its end is still being written.)"""
        lines = (line for line in self.log.splitlines(keepends=True) if line[:1] == "{" and line[-1:] == "\n")
        return [event for event in map(json.loads, lines) if event.get("event") == name]

    def status(self) -> dict[str, Any]:
        return self.request("GET", "/vvllm/status").json

    def request(self, method: str, path: str, body: object = None) -> Reply:
        connection = UnixConnection(self.socket)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return Reply(response.status, json.loads(response.read()), dict(response.getheaders()))

    def complete(self, prompt: str, tokens: int, **options: Any) -> Reply:
        return self.request("POST", "/v1/completions", completion(prompt, tokens, **options))

    def stream(self, prompt: str, tokens: int) -> Stream:
        connection = UnixConnection(self.socket)
        body = json.dumps(completion(prompt, tokens, stream=True))
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        return Stream(connection.getresponse(), connection)

    def client_process(self, prompt: str, tokens: int) -> subprocess.Popen[str]:
        """A client of its own, streaming to a pipe."""
        body = json.dumps(completion(prompt, tokens, stream=True))
        return subprocess.Popen(
            [sys.executable, __file__, str(self.socket), body], stdout=subprocess.PIPE, text=True
        )

    # Waiting

    def wait_until_ready(self, generation: int = 1, seconds: float = 200.0) -> DaemonProcess:
        def ready() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                status = self.status()
                return status["stage"] == "ready" and status["generation"] >= generation
            return False

        self.wait_for(ready, seconds)
        return self

    def wait_for_log(self, text: str, seconds: float = 120.0) -> None:
        self.wait_for(lambda: text in self.log, seconds)

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        """Poll until `condition`; fail with the log when it does not come, or the daemon ends before it."""

        def checked() -> bool:
            came = condition()
            assert came or self.process.poll() is None, self.log
            return came

        wait_for(checked, seconds, lambda: self.log)

    # Its processes

    def processes(self) -> dict[int, str]:
        """Pid and command line of every living process that was started by it, itself included."""
        mark = f"{_MARK}={self._mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            # Gone meanwhile, or a zombie, which has no environment.
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def assert_gone(self, seconds: float = 5.0) -> None:
        """No process of it lives any more."""
        wait_for(lambda: not self.processes(), seconds, lambda: str(self.processes()))

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM; its exit code. Nothing of it lives afterwards."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        self.assert_gone()
        return code

    def press_ctrl_c(self) -> None:
        """SIGINT for its whole process group, as from a terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL, of the daemon alone."""
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def daemon(root: Path, model: Path, *args: str, policy: str = "off") -> Iterator[DaemonProcess]:
    """A daemon that is dead after the block, whatever happened in it."""
    running = DaemonProcess(root, model, *args, policy=policy)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()
        with contextlib.suppress(AssertionError):
            running.assert_gone()
        for pid in running.processes():
            os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float, explain: Callable[[], str] = str) -> None:
    """Poll until `condition`; fail with `explain()` when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {explain()[-4000:]}"
        time.sleep(0.02)


class Background(threading.Thread):
    """A call in a thread; `result()` joins it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._outcome: Any = None
        self.start()

    def run(self) -> None:
        self._outcome = self._call()

    def result(self, seconds: float = 120.0) -> Any:
        self.join(seconds)
        assert not self.is_alive(), "still running"
        return self._outcome


def _main() -> None:
    connection = UnixConnection(Path(sys.argv[1]))
    connection.request("POST", "/v1/completions", sys.argv[2], {"content-type": "application/json"})
    stream = Stream(connection.getresponse(), connection)
    shown = 0
    while stream.read(shown + 1) and len(stream.text) > shown:
        print(stream.text[shown:], end="", flush=True)
        shown = len(stream.text)
    stream.close()


if __name__ == "__main__":
    _main()
