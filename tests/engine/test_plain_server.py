"""vLLM's own server, no daemon: the pager is a plugin that `additional_config` switches on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon_helpers import UnixConnection, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def completion(socket: Path) -> tuple[str, list[float]]:
    connection = UnixConnection(socket)
    body = {
        "model": "m",
        "prompt": "Once upon a time",
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
    }
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    choice = json.loads(connection.getresponse().read())["choices"][0]
    connection.close()
    return choice["text"], choice["logprobs"]["token_logprobs"]


def serve(model: Path, *options: str) -> tuple[str, list[float], str]:
    """One answer of a plain server, and its log."""
    with tempfile.TemporaryDirectory(prefix="vv-") as directory:
        socket, log = Path(directory) / "s", Path(directory) / "log"
        # Other tests set vLLM's variables in this process: for engines of theirs, not for a plain server.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VVLLM_", "VLLM_"))}
        kept["VLLM_NO_USAGE_STATS"] = "1"
        with log.open("wb") as sink:
            server = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "vllm.entrypoints.openai.api_server",
                        "--uds",
                        socket,
                        "--model",
                        model,
                    ),
                    *("--served-model-name", "m", "--enforce-eager", "--max-model-len", "512"),
                    *("--kv-cache-memory-bytes", str(64 << 20), *options),
                ],
                env=kept,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        try:

            def ready() -> bool:
                assert server.poll() is None, log.read_text()[-3000:]
                try:
                    connection = UnixConnection(socket)
                    connection.request("GET", "/health")
                    return connection.getresponse().status == 200
                except OSError:
                    return False

            wait_for(ready, 200, log.read_text)
            return *completion(socket), log.read_text()
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def test_the_answer_is_stocks(zoo_model: Callable[[str], Path]) -> None:
    model = zoo_model("qwen3_moe")
    text, logprobs, log = serve(model, "--additional-config", '{"expert_cache": {"slots": 5}}')
    assert "Paged experts: 2 layers, 5 of 16 experts in slots" in log
    assert "less than three times" in log
    stock_text, stock_logprobs, stock_log = serve(model)
    assert (text, logprobs) == (stock_text, stock_logprobs)
    assert "Paged experts" not in stock_log
