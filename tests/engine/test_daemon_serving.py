"""A real daemon with a real engine: what clients get, and what clients cannot do to each other."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_helpers import Background, DaemonProcess, UnixConnection, daemon, wait_for
from zoo import ZooModel

pytestmark = pytest.mark.engine

PROMPTS = tuple(f"Story number {i} about a lighthouse and" for i in range(8))
TOKENS = 64


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, zoo_model: ZooModel) -> Iterator[DaemonProcess]:
    root = tmp_path_factory.mktemp("d") / "run"
    with daemon(root, zoo_model("qwen3_moe"), "--max-model-len", "4096", policy="lfru") as running:
        yield running.wait_until_ready()


def steps(served: DaemonProcess) -> int:
    return int(served.status()["cache"]["steps"])


def assert_idle_within(served: DaemonProcess, seconds: float) -> None:
    """No request runs in the engine: its step counter stands still."""

    def stands_still() -> bool:
        before = steps(served)
        time.sleep(0.15)
        return steps(served) == before

    wait_for(stands_still, seconds)


def test_status_names_the_paged_layers_and_counts_the_cache(served: DaemonProcess) -> None:
    before = served.status()
    assert served.complete("Hello", 8).status == 200
    after = served.status()
    cache = after["cache"]
    assert (cache["layers"], cache["experts"], cache["slots"]) == (2, 16, 8)
    assert cache["hits"] + cache["misses"] > before["cache"]["hits"] + before["cache"]["misses"]
    of_each = cache["by_layer"]
    assert {phase: len(layers) for phase, layers in of_each.items()} == {"decode": 2, "prefill": 2}
    for place, name in enumerate(("hits", "misses", "bytes_paged")):
        assert sum(layer[place] for layers in of_each.values() for layer in layers) == cache[name]
    assert all(sum(layer[:2]) > 0 for layers in of_each.values() for layer in layers)
    assert after["stage"] == "ready"
    assert after["engine_pid"] in served.processes()


def test_the_model_is_served_under_its_directory_s_name(served: DaemonProcess) -> None:
    assert [model["id"] for model in served.request("GET", "/v1/models").json["data"]] == ["qwen3_moe"]


def test_clients_that_are_killed_or_stopped_change_no_other_s_answer(served: DaemonProcess) -> None:
    alone = [served.complete(prompt, TOKENS).text for prompt in PROMPTS[:6]]
    victims = [served.client_process(prompt, 2000) for prompt in PROMPTS[6:]]
    try:
        for victim in victims:
            assert victim.stdout is not None
            assert victim.stdout.read(1)
        victims[0].kill()
        victims[1].send_signal(signal.SIGSTOP)
        others = [Background(lambda p=prompt: served.complete(p, TOKENS)) for prompt in PROMPTS[:6]]
        assert [other.result().text for other in others] == alone
    finally:
        for victim in victims:
            victim.kill()
            victim.communicate()
    assert_idle_within(served, 5.0)


def test_a_client_that_vanishes_stops_its_request_at_once(served: DaemonProcess) -> None:
    stream = served.stream(PROMPTS[0], 3000).read(20)
    stream.close()
    left = time.monotonic()
    wait_for(lambda: served.status()["requests"] == 0, 2.0)
    assert time.monotonic() - left < 1.0
    assert_idle_within(served, 1.0)


def test_a_prompt_over_the_model_s_length_is_refused_with_the_numbers(served: DaemonProcess) -> None:
    reply = served.complete("word " * 5000, 8)
    assert reply.status == 400
    assert "4096" in reply.json["error"]["message"]
    assert served.complete("Hello", 4).status == 200


def live_policy(served: DaemonProcess) -> int:
    """The pid of the policy process, once it advises the engine."""
    wait_for(
        lambda: served.status()["policy"]["state"] == "live", 30.0, lambda: str(served.status()["policy"])
    )
    return int(served.status()["policy"]["pid"])


def test_traces_reach_the_policy_process_and_its_advice_the_engine(served: DaemonProcess) -> None:
    live_policy(served)
    before = served.status()["cache"]

    def counted() -> bool:
        """A message for all layers comes first; those for single layers say what their routers chose."""
        assert served.complete(PROMPTS[0], 256).status == 200
        status = served.status()
        assert status["cache"]["advice_applied"] >= before["advice_applied"]
        return (
            status["cache"]["traces_sent"] > before["traces_sent"] and status["policy"]["advice_applied"] > 1
        )

    wait_for(counted, 60.0, lambda: str(served.status()))


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_policy_process_that_is_lost_changes_no_output_and_is_replaced(
    served: DaemonProcess, fault: signal.Signals
) -> None:
    old = live_policy(served)
    alone = served.complete(PROMPTS[0], 400).text
    stream = served.stream(PROMPTS[0], 400).read(20)
    os.kill(old, fault)
    assert stream.read().text == alone
    assert stream.error is None
    stream.close()
    wait_for(lambda: served.status()["policy"]["pid"] not in (None, old), 25.0)
    assert live_policy(served) != old
    assert old not in served.processes()


def test_no_process_of_the_engine_has_the_daemon_s_socket_or_lock(served: DaemonProcess) -> None:
    inodes = {
        line.split()[6]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if line.endswith(str(served.socket))
    }
    assert inodes
    ours = served.processes()
    assert len(ours) >= 4, ours  # daemon, EngineCore, worker, policy
    for pid in set(ours) - {served.process.pid}:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            assert not re.fullmatch(rf"socket:\[({'|'.join(inodes)})\]", target), (ours[pid], target)
            assert not target.endswith("/private/lock"), (ours[pid], target)


def test_a_second_daemon_is_refused_and_the_first_serves_on(
    served: DaemonProcess, zoo_model: ZooModel
) -> None:
    with daemon(served.root, zoo_model("qwen3_moe")) as second:
        assert second.process.wait(60) == 75
        assert f"pid {served.process.pid}" in second.log
    assert served.complete("Hello", 4).status == 200


def test_events_begin_with_the_status(served: DaemonProcess) -> None:
    connection = UnixConnection(served.socket)
    with contextlib.closing(connection):
        connection.request("GET", "/vvllm/events")
        with connection.getresponse() as response:
            assert response.readline() == b"event: status\n"
            assert b'"stage": "ready"' in response.readline()


def test_ctrl_c_lets_a_running_answer_end_and_leaves_nothing(served: DaemonProcess) -> None:
    """The last test here: it ends the daemon."""
    alone = served.complete(PROMPTS[0], 300).text
    stream = served.stream(PROMPTS[0], 300).read(10)
    served.press_ctrl_c()
    wait_for(lambda: bool(served.events("draining")), 5.0)
    assert served.complete(PROMPTS[0], 4).status == 503
    assert stream.read().text == alone
    assert stream.error is None
    stream.close()
    assert served.process.wait(30) == 0
    served.assert_gone()
    assert not served.socket.exists()
    assert list((served.root / "private" / "rpc").iterdir()) == []
