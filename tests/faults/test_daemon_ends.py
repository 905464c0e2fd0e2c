"""Ends that come from outside, while the engine is still being started: quick, and with nothing left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from daemon_helpers import DaemonProcess, daemon
from zoo import ZooModel

pytestmark = pytest.mark.faults


@pytest.fixture
def starting(tmp_path_factory: pytest.TempPathFactory, zoo_model: ZooModel) -> object:
    with daemon(tmp_path_factory.mktemp("e") / "run", zoo_model("qwen3_moe")) as running:
        running.wait_for_log('"engine_loading"')
        yield running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_stop_stops_it(starting: DaemonProcess, number: signal.Signals) -> None:
    """SIGHUP is what a closed terminal sends."""
    starting.process.send_signal(number)
    assert starting.process.wait(20) == 0
    starting.assert_gone()
    assert not starting.socket.exists()
    assert '"stopped"' in starting.log


def test_a_daemon_whose_socket_was_removed_ends_and_says_so(starting: DaemonProcess) -> None:
    """Nobody could reach it, and it would keep the next one from starting."""
    starting.socket.unlink()
    assert starting.process.wait(20) == 70
    starting.assert_gone()
    assert f"The socket {starting.socket} was removed" in starting.log
    assert "Traceback" not in starting.log


def test_another_file_at_the_sockets_place_is_left_alone(starting: DaemonProcess) -> None:
    starting.socket.unlink()
    Path(starting.socket).write_text("mine")
    assert starting.process.wait(20) == 70
    assert starting.socket.read_text() == "mine"
