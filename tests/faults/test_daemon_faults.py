"""What becomes of clients, processes and files when the engine or the daemon is killed, stopped or told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon_helpers import Background, DaemonProcess, daemon, wait_for
from vvllm_msd.watchdog import FIRST_STEPS
from zoo import ZooModel

pytestmark = [pytest.mark.engine, pytest.mark.faults]

PROMPT = "A lighthouse by the sea and"
WATCHDOG_SECONDS = 3


Faulty = Callable[[], DaemonProcess]


@pytest.fixture
def own_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runtime directory of one test; `tmp_path` would be too long for a socket."""
    return tmp_path_factory.mktemp("f") / "run"


@pytest.fixture(scope="module")
def faulty(zoo_model: ZooModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    """A ready daemon that a test may hurt: the last one, or the next in its directory if a test has ended that."""
    directory = tmp_path_factory.mktemp("f")
    root, config = directory / "run", directory / "vvllm-msd.toml"
    config.write_text(f"[server]\nwatchdog_seconds = {WATCHDOG_SECONDS}\nmax_model_len = 8192\n")
    running: list[DaemonProcess] = []
    with contextlib.ExitStack() as stack:

        def ready() -> DaemonProcess:
            if not running or running[-1].process.poll() is not None:
                options = ("--config", str(config))
                running.append(
                    stack.enter_context(daemon(root, zoo_model("qwen3_moe"), *options, policy="lfru"))
                )
            return running[-1].wait_until_ready()

        yield ready


def test_sigkill_while_serving_leaves_no_process_and_the_next_start_works(faulty: Faulty) -> None:
    first = faulty()
    answer = first.complete(PROMPT, 32).text
    stream = first.stream(PROMPT, 4000).read(20)
    assert len(first.processes()) >= 4
    first.kill()
    first.assert_gone()
    stream.close()
    assert first.socket.exists()
    left = list((first.root / "private" / "rpc").iterdir())
    assert left
    second = faulty()
    assert second is not first
    assert second.complete(PROMPT, 32).text == answer
    assert not any(path.exists() for path in left)


def test_a_stop_that_nobody_waits_for_logs_no_failure(faulty: Faulty) -> None:
    """Left to itself vLLM cancels two tasks in an order that makes one report the other's end, now and then."""
    running = faulty()
    running.complete(PROMPT, 8)
    assert running.stop() == 0
    assert '"stopped"' in running.log
    assert "Traceback" not in running.log
    assert "EngineDeadError" not in running.log


def test_a_killed_engine_is_told_to_its_client_and_replaced(faulty: Faulty) -> None:
    running = faulty()
    alone = running.complete(PROMPT, 32).text
    before = running.status()
    stream = running.stream(PROMPT, 4000).read(20)
    os.kill(before["engine_pid"], signal.SIGKILL)
    killed_at = time.monotonic()
    stream.read()
    assert time.monotonic() - killed_at < 5.0
    assert stream.error is not None
    assert stream.error["code"] == "engine_died"
    assert "try again" in stream.error["hint"]
    stream.close()
    refused = running.complete(PROMPT, 4)
    assert refused.status == 503
    assert refused.json["status"]["stage"] == "restarting"
    running.wait_until_ready(generation=before["generation"] + 1)
    assert running.complete(PROMPT, 32).text == alone
    assert running.status()["error"]["code"] == "engine_died"


def test_an_engine_that_hangs_is_caught_by_the_watchdog(faulty: Faulty) -> None:
    running = faulty()
    assert running.complete(PROMPT, FIRST_STEPS).status == 200
    restarts = len(running.events("restarting"))
    stream = running.stream(PROMPT, 4000).read(20)
    os.kill(running.status()["engine_pid"], signal.SIGSTOP)
    stopped_at = time.monotonic()
    stream.read()
    assert WATCHDOG_SECONDS - 1 < time.monotonic() - stopped_at < WATCHDOG_SECONDS + 6
    assert stream.error is not None
    assert "no progress" in stream.error["message"]
    stream.close()
    running.wait_for(lambda: len(running.events("restarting")) == restarts + 1, 10.0)
    assert running.status()["stage"] == "restarting"


def test_sigterm_during_a_restart_ends_it_at_once(faulty: Faulty) -> None:
    running = faulty()
    os.kill(running.status()["engine_pid"], signal.SIGKILL)
    running.wait_for(lambda: running.status()["stage"] == "restarting", 10.0)
    assert running.stop(8.0) == 0


@pytest.mark.parametrize("stage", ["importing", pytest.param("loading", marks=pytest.mark.slow)])
def test_sigterm_during_the_start_ends_it_at_once(own_root: Path, zoo_model: ZooModel, stage: str) -> None:
    with daemon(own_root, zoo_model("qwen3_moe")) as starting:
        wait_for_stage(starting, stage)
        starting.process.send_signal(signal.SIGTERM)
        assert starting.process.wait(8) == 0, starting.log
        starting.assert_gone()
        assert not starting.socket.exists()


@pytest.mark.parametrize("stage", ["importing", "loading"])
def test_sigkill_during_the_start_leaves_no_process(own_root: Path, zoo_model: ZooModel, stage: str) -> None:
    with daemon(own_root, zoo_model("qwen3_moe")) as starting:
        wait_for_stage(starting, stage)
        starting.kill()
        starting.assert_gone()


def wait_for_stage(starting: DaemonProcess, stage: str) -> None:
    """ "importing": the daemon listens, vLLM is being imported; "loading": an engine process exists."""
    starting.wait_for_log('"engine_loading"')
    if stage == "loading":
        starting.wait_for(lambda: any("spawn_main" in line for line in starting.processes().values()), 120.0)


@pytest.mark.slow
def test_a_second_sigterm_ends_the_drain_and_tells_the_client(own_root: Path, zoo_model: ZooModel) -> None:
    with daemon(own_root, zoo_model("qwen3_moe")) as running:
        running.wait_until_ready()
        stream = running.stream(PROMPT, 20_000).read(20)
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: bool(running.events("draining")), 5.0)
        rest = Background(stream.read)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(15) == 0
        assert rest.result().error["code"] == "busy"
        stream.close()
        running.assert_gone()


@pytest.mark.slow
def test_an_engine_that_dies_too_often_ends_the_daemon_with_70(own_root: Path, zoo_model: ZooModel) -> None:
    config = own_root.with_suffix(".toml")
    config.write_text("[server]\nmax_restarts = 0\n")
    with daemon(own_root, zoo_model("qwen3_moe"), "--config", str(config)) as running:
        running.wait_until_ready()
        os.kill(running.status()["engine_pid"], signal.SIGKILL)
        assert running.process.wait(20) == 70
        running.assert_gone()
        assert "gives up" in running.log


@pytest.mark.slow
@pytest.mark.parametrize("option", ["no_such_option=1", "tokenizer=nobody/nothing"])
def test_what_vllm_refuses_is_a_configuration_error(own_root: Path, zoo_model: ZooModel, option: str) -> None:
    """The second is an OSError of vLLM's."""
    with daemon(own_root, zoo_model("qwen3_moe"), "--engine", option) as refused:
        assert refused.process.wait(120) == 78
        assert refused.log.rpartition("vvllm-msd: ")[2].startswith("vLLM ")
        assert "Traceback" not in refused.log
        refused.assert_gone()
