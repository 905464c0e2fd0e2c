"""`vvllm-msd demo`: the whole path on a small model: daemon, prompt, stream, the cache's hits and misses, stop."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vvllm_msd.status import Stage
from vvllm_shared.errors import DaemonAbsentError, EngineDiedError, Exit
from vvllm_shared.limits import MIB
from vvllm_shared.paths import RuntimePaths, runtime_paths
from vvllm_shared.processes import die_with_parent

PROMPT = "Calculate 347 * 892 step by step"
SLOTS = 8
"""Of the demo model's 32 experts per layer, so that there is something to page."""
_LISTEN_SECONDS = 120.0
"""The daemon makes the model first."""
_STOP_SECONDS = 40.0


def main(_args: argparse.Namespace) -> int:
    """Run the demo; 0 only if every part of it worked.

    Raises:
        VvllmError: the daemon did not come up.
    """
    print("A small Mixture-of-Experts model with random weights: its text means nothing.", flush=True)
    base = runtime_paths().root.parent
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=base) as directory:
        paths = RuntimePaths(Path(directory))
        paths.check_lengths()
        with _daemon(paths) as daemon:
            _wait_until_ready(paths, daemon)
            prompt = ["--stats", PROMPT, "--max-tokens", "64"]
            print("$", shlex.join(["vvllm-client", *prompt]), flush=True)
            shown = subprocess.run(
                [_script("vvllm-client"), *prompt],
                env=_environment(paths),
                stdin=subprocess.DEVNULL,  # a pipe would be read to its end before the prompt
                check=False,
            )
            _show_cache(_get(paths, "/vvllm/status"))
    print("Stopped.", flush=True)
    return shown.returncode or daemon.returncode or int(Exit.OK)


def _script(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / name)


def _environment(paths: RuntimePaths) -> dict[str, str]:
    """Without the user's own settings of a daemon: the demo is the same everywhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VVLLM_")}
    return kept | {"VVLLM_RUNTIME_DIR": str(paths.root)}


@contextmanager
def _daemon(paths: RuntimePaths) -> Iterator[subprocess.Popen[bytes]]:
    """The daemon while the block runs, then SIGTERM. What it logged is shown if it failed."""
    log = paths.root / "log"
    command = [
        _script("vvllm-msd"),
        "serve",
        "--config",
        os.devnull,
        "--model",
        "demo",
        "--slots",
        str(SLOTS),
    ]
    with log.open("wb") as sink:
        daemon = subprocess.Popen(
            [*command, "--log-level", "warning"],
            env=_environment(paths),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,  # Ctrl-C is ours: we stop it
            preexec_fn=die_with_parent,  # noqa: PLW1509 - there is no other thread here
        )
    try:
        yield daemon
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        if daemon.returncode:
            lines = log.read_text(errors="replace").splitlines()[-20:]
            print(f"The daemon ended with exit code {daemon.returncode}; its last lines:", *lines, sep="\n  ")


def _wait_until_ready(paths: RuntimePaths, daemon: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    while not paths.http.exists():
        if daemon.poll() is not None or time.monotonic() - began > _LISTEN_SECONDS:
            raise DaemonAbsentError("The daemon did not start to listen.")
        time.sleep(0.05)
    stage = ""
    for event in _events(paths):
        if (now := str(event.get("stage", stage))) != stage:
            stage = now
            print(f"{time.monotonic() - began:5.1f} s  {stage}", flush=True)
        if stage == Stage.READY:
            return
        if stage == Stage.FAILED:
            error = event["error"]
            raise EngineDiedError(f"The daemon did not become ready: {error['message']}", error["hint"])
    raise EngineDiedError("The daemon ended before it was ready.")


def _show_cache(status: dict[str, Any]) -> None:
    cache = status["cache"]
    used = cache["hits"] + cache["misses"]
    print(
        f"Experts in VRAM: {cache['slots']} of {cache['experts']} in each of {cache['layers']} layers. "
        f"Hits {cache['hits']}, misses {cache['misses']} "
        f"({cache['hits'] / max(used, 1):.0%} hits), paged in {cache['bytes_paged'] / MIB:.1f} MiB.",
        flush=True,
    )


class _Connection(http.client.HTTPConnection):
    """HTTP over the daemon's socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def _get(paths: RuntimePaths, path: str) -> dict[str, Any]:
    connection = _Connection(paths.http)
    try:
        connection.request("GET", path)
        return dict(json.load(connection.getresponse()))
    finally:
        connection.close()


def _events(paths: RuntimePaths) -> Iterator[dict[str, Any]]:
    """What `/vvllm/events` says, until the daemon ends."""
    connection = _Connection(paths.http)
    try:
        connection.request("GET", "/vvllm/events")
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        connection.close()
