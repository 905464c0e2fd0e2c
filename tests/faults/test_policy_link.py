"""The daemon's side: real policy processes that are killed, stopped, wrong or hostile, and the link goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import structlog
import zmq
from policy_peers import BAD, MARKER, STALE
from policy_tools import LAYERS, PEERS, alive, resident_bytes, runtime_directory, until

from vvllm_msd.config import LogConfig
from vvllm_msd.policy_link import PolicyLink, serve_command
from vvllm_msd.policy_process import Timing
from vvllm_shared import limits
from vvllm_shared.errors import PermissionDeniedError
from vvllm_shared.ipc import endpoint
from vvllm_shared.messages import (
    ALL_LAYERS,
    PROTOCOL,
    Advise,
    LayerShape,
    Ready,
    Refused,
    ToPolicy,
)
from vvllm_shared.paths import RuntimePaths
from vvllm_shared.wire import decode, encode

pytestmark = pytest.mark.faults

QUICK = Timing(replace_after=3.0, first_delay=0.1, apply_pause=0.05)
Make = Callable[..., "Linked"]


class Linked:
    """A link, what it handed over, and what it logged."""

    def __init__(self, paths: RuntimePaths, policy: str, **options: Any) -> None:
        self.paths = paths
        self.applied: list[Advise] = []
        self.calls = 0
        self.logged: list[dict[str, Any]] = []
        options.setdefault("timing", QUICK)
        self.link = PolicyLink(
            paths, policy, "boot-1", options.pop("apply", self.apply), self._logger(), **options
        )

    async def apply(self, advice: list[Advise]) -> None:
        self.calls += 1
        self.applied += advice

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.logged if event["event"] == name]

    def __getitem__(self, field: str) -> Any:
        return getattr(self.link.status(), field)

    def _logger(self) -> Any:
        def keep(_logger: object, level: str, event: dict[str, Any]) -> str:
            self.logged.append(event | {"level": level})
            raise structlog.DropEvent

        return structlog.wrap_logger(None, processors=[keep], wrapper_class=structlog.BoundLogger)


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_directory() as paths:
        yield paths


@pytest.fixture
async def make(paths: RuntimePaths) -> AsyncIterator[Make]:
    made: list[Linked] = []

    async def start(policy: str = "layer", engine: bool = True, **options: Any) -> Linked:
        linked = Linked(paths, policy, **options)
        made.append(linked)
        await linked.link.start()
        if engine:
            linked.link.set_engine(LAYERS, "fingerprint")
        return linked

    yield start
    for linked in made:
        pid = linked["pid"]
        await linked.link.stop()
        assert pid is None or not alive(pid)
        assert not linked.events("policy_link_failed")
    assert not paths.residency.exists()


@pytest.mark.parametrize("log", [LogConfig(json=True), LogConfig(json=False), LogConfig("error")])
async def test_the_policy_process_logs_as_the_daemon_does(
    make: Make, paths: RuntimePaths, log: LogConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    linked = await make(command=serve_command(paths, "layer", log))
    await until(lambda: linked["state"] == "live")
    await linked.link.stop()
    lines = capfd.readouterr().err.splitlines()
    assert bool(lines) == (log.level == "info")
    assert [line.startswith("{") for line in lines] == [bool(log.json)] * len(lines)


def peer(paths: RuntimePaths, role: str, *arguments: object) -> list[str]:
    return [sys.executable, PEERS, role, str(paths.residency), *map(str, arguments)]


@pytest.mark.parametrize("policy", ["layer", "lfru"])
async def test_a_policy_process_advises_the_engine(make: Make, policy: str) -> None:
    linked = await make(policy, engine=False)
    await until(lambda: linked["reason"] == "no engine runs")
    assert (linked["state"], linked["epoch"], linked.applied) == ("fallback", 0, [])
    linked.link.set_engine(LAYERS, "fingerprint")
    await until(lambda: linked["state"] == "live" and linked.applied)
    assert [advise.layer for advise in linked.applied] == [ALL_LAYERS]
    assert (linked.applied[0].heat_weight > 0) == (policy == "lfru")
    assert linked["epoch"] == linked.applied[0].epoch == 1
    assert linked["reason"] == ""
    assert alive(linked["pid"])


async def test_a_new_engine_is_a_new_epoch_and_without_one_nothing_is_applied(make: Make) -> None:
    linked = await make("lfru")
    await until(lambda: linked.applied)
    pid = linked["pid"]
    linked.link.engine_gone()
    linked.applied.clear()
    assert (linked["state"], linked["reason"]) == ("fallback", "no engine runs")
    await asyncio.sleep(
        QUICK.replace_after + 1.0
    )  # without an engine, a heartbeat of the old epoch is a sign of life
    assert linked.applied == []
    linked.link.set_engine(LAYERS[:2], "another")
    await until(lambda: linked["state"] == "live" and linked.applied)
    assert (linked["epoch"], linked["pid"], linked["restarts"]) == (2, pid, 0)


async def test_sigkill_brings_a_new_process_and_a_new_epoch(make: Make) -> None:
    linked = await make()
    await until(lambda: linked["state"] == "live" and linked.applied)
    first = linked["pid"]
    os.kill(first, signal.SIGKILL)
    await until(lambda: linked["pid"] not in (first, None) and linked["state"] == "live")
    assert (linked["restarts"], linked["epoch"]) == (1, 2)
    assert linked.events("policy_ended")[0]["reason"] == "killed by SIGKILL"
    await until(lambda: [advise.epoch for advise in linked.applied] == [1, 2])


async def test_a_stopped_process_is_fallback_then_live_again_or_replaced(make: Make) -> None:
    linked = await make()
    await until(lambda: linked["state"] == "live")
    first = linked["pid"]
    os.kill(first, signal.SIGSTOP)
    stopped = time.monotonic()
    await until(lambda: linked["state"] == "fallback")
    assert 0.9 < time.monotonic() - stopped < 10
    assert "no heartbeat" in linked["reason"]
    os.kill(first, signal.SIGCONT)
    await until(lambda: linked["state"] == "live")
    assert linked["pid"] == first
    os.kill(first, signal.SIGSTOP)
    await until(lambda: linked["pid"] not in (first, None) and linked["state"] == "live")
    assert not alive(first)
    assert "no heartbeat" in linked.events("policy_ended")[0]["reason"]


async def test_a_process_that_never_speaks_is_replaced(make: Make) -> None:
    linked = await make(
        command=["sleep", "1000"], timing=Timing(heartbeat=0.1, start_within=0.5, first_delay=0.1)
    )
    first = linked["pid"] or (await until(lambda: linked["pid"])) or linked["pid"]
    await until(lambda: linked["pid"] not in (first, None))
    assert not alive(first)
    assert linked["state"] == "fallback"


async def test_a_daemon_that_was_held_up_blames_nobody(make: Make) -> None:
    linked = await make()
    await until(lambda: linked["state"] == "live")
    first = linked["pid"]
    time.sleep(QUICK.replace_after + 1.0)  # noqa: ASYNC251 - the event loop itself hangs
    await asyncio.sleep(1.0)
    assert (linked["state"], linked["pid"], linked["restarts"]) == ("live", first, 0)
    assert not linked.events("policy_fallback")


async def test_wrong_messages_are_refused_and_counted_and_the_next_right_one_works(
    make: Make, paths: RuntimePaths
) -> None:
    linked = await make(command=peer(paths, "policy", *BAD, *STALE))
    await until(lambda: linked.applied)
    assert [advise.heat_weight for advise in linked.applied] == [MARKER]
    assert (linked["bad_messages"], linked["advice_stale"]) == (len(BAD), len(STALE))
    assert len(linked.events("policy_message_refused")) == 1
    assert (linked["state"], linked["restarts"]) == ("live", 0)


async def test_another_version_is_told_both(make: Make, paths: RuntimePaths) -> None:
    linked = await make(command=peer(paths, "policy", "other version"))
    await until(lambda: linked.events("policy_message_refused"))
    assert "protocol 2" in linked.events("policy_message_refused")[0]["reason"]
    assert f"protocol {PROTOCOL}" in linked.events("policy_message_refused")[0]["reason"]


async def test_too_many_bad_messages_end_the_process(make: Make, paths: RuntimePaths) -> None:
    linked = await make(command=peer(paths, "policy", *["garbage"] * limits.BAD_MESSAGES))
    await until(lambda: linked["restarts"])
    assert f"sent {limits.BAD_MESSAGES} bad messages" in linked.events("policy_ended")[0]["reason"]


async def test_a_frame_over_the_limit_costs_the_connection_only(make: Make, paths: RuntimePaths) -> None:
    """ZeroMQ closes the sender's connection; nothing of the frame arrives."""
    linked = await make()
    await until(lambda: linked["state"] == "live")
    first = linked["pid"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint(paths.residency))
        for _ in range(4):
            socket.send(bytes(limits.FRAME_BYTES + 1))
        await asyncio.sleep(0.5)
    assert (linked["state"], linked["pid"], linked["bad_messages"]) == ("live", first, 0)


async def test_a_flood_costs_bounded_memory_time_and_calls(make: Make, paths: RuntimePaths) -> None:
    linked = await make(command=peer(paths, "flood"), engine=False)
    linked.link.set_engine([LayerShape(f"l{i}", limits.EXPERTS, 4, 2, 1) for i in range(8)], "fingerprint")
    await until(lambda: linked.calls)
    linked.applied.clear()
    # Time of this process, not of the clock: other processes may keep the machine busy.
    before, calls, cpu, worst = resident_bytes(), linked.calls, time.process_time(), 0.0
    start = time.monotonic()
    for _ in range(150):
        began = time.process_time()
        await asyncio.sleep(0.02)
        worst = max(worst, time.process_time() - began)
        linked.applied.clear()
    cpu = time.process_time() - cpu
    assert linked["state"] == "live"
    assert resident_bytes() - before < 64 * limits.MIB
    assert linked.calls - calls <= (time.monotonic() - start) / QUICK.apply_pause + 1
    assert cpu < 1.5, "the event loop reads too much"
    assert worst < 0.2, "the event loop was held up"


async def test_one_call_at_a_time_and_the_newest_advice_wins(make: Make, paths: RuntimePaths) -> None:
    """However long the engine takes, what waits is one advice a layer, and the heartbeat goes on."""
    calls: list[list[Advise]] = []
    release = asyncio.Event()

    async def apply(advice: list[Advise]) -> None:
        calls.append(advice)
        await release.wait()

    linked = await make(command=peer(paths, "flood"), apply=apply)
    await until(lambda: calls)
    await asyncio.sleep(2.0)
    assert len(calls) == 1
    assert linked["state"] == "live"
    assert linked["advice_applied"] == 0
    release.set()
    await until(lambda: len(calls) >= 2)
    assert sorted(advise.layer for advise in calls[1]) == [0, 1, 2]
    assert min(advise.seq for advise in calls[1]) > max(advise.seq for advise in calls[0]) + 10


async def test_an_engine_that_fails_to_apply_is_logged_once(make: Make, paths: RuntimePaths) -> None:
    async def apply(advice: list[Advise]) -> None:
        raise ConnectionError("the engine has gone")

    linked = await make(command=peer(paths, "flood"), apply=apply)
    await until(lambda: linked.events("advice_not_applied"))
    await asyncio.sleep(0.5)
    assert len(linked.events("advice_not_applied")) == 1
    assert (linked["state"], linked["advice_applied"]) == ("live", 0)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/nonexistent/vvllm-policy"], "No such file"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "exited with 3"),
    ],
)
async def test_what_cannot_live_is_given_up(make: Make, command: list[str], words: str) -> None:
    linked = await make(command=command, timing=Timing(first_delay=0.05, last_delay=0.1))
    await until(lambda: linked["state"] == "off")
    assert words in linked["reason"]
    assert (linked["pid"], linked["restarts"]) == (None, Timing.deaths - 1)
    assert len(linked.events("policy_given_up")) == 1


async def test_a_stable_life_makes_up_for_deaths(make: Make) -> None:
    linked = await make(timing=Timing(first_delay=0.05, last_delay=0.05, stable_after=0.2, deaths=2))
    for _ in range(2):
        await until(lambda: linked["state"] == "live")
        await asyncio.sleep(0.3)
        os.kill(linked["pid"], signal.SIGKILL)
        await until(lambda: linked["state"] != "live")
    await until(lambda: linked["state"] == "live")


async def test_a_second_policy_process_is_refused(make: Make, paths: RuntimePaths) -> None:
    linked = await make()
    await until(lambda: linked["state"] == "live")
    first = linked["pid"]
    command = [sys.executable, "-m", "vvllm_policy", "serve", "--runtime-dir", str(paths.root)]
    second = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, stderr = await asyncio.wait_for(second.communicate(), 20)
    assert second.returncode == 75
    assert b"Another policy process" in stderr
    # One that leaves the traces alone gets as far as the daemon, which did not start it.
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint(paths.residency))
        socket.send(encode(Ready(PROTOCOL, os.getpid(), "mine")))
        await until(lambda: socket.poll(0))
        answer = decode(socket.recv(), ToPolicy)
    assert isinstance(answer, Refused)
    assert str(os.getpid()) in answer.reason
    assert (linked["state"], linked["pid"], linked["bad_messages"]) == ("live", first, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_user_is_refused(make: Make, paths: RuntimePaths) -> None:
    linked = await make()
    await until(lambda: linked["state"] == "live")
    ready = encode(Ready(PROTOCOL, 1, "theirs")).hex()
    intrude = [*peer(paths, "send", 65534, int(zmq.DEALER), limits.BAD_MESSAGES + 1), ready]

    process = await asyncio.create_subprocess_exec(*intrude, stdout=subprocess.DEVNULL)
    await process.wait()
    assert linked["bad_messages"] == 0  # the 0700 directory: it never gets to the socket

    for path, mode in ((paths.root, 0o711), (paths.private, 0o711), (paths.residency, 0o666)):
        path.chmod(mode)
    process = await asyncio.create_subprocess_exec(*intrude, stdout=subprocess.DEVNULL)
    await process.wait()
    await until(lambda: linked["bad_messages"] == limits.BAD_MESSAGES + 1)
    assert "another user" in linked.events("policy_message_refused")[0]["reason"]
    assert (linked["state"], linked["restarts"]) == ("live", 0)


async def test_a_directory_that_others_may_enter_is_refused(paths: RuntimePaths) -> None:
    paths.private.chmod(0o750)
    linked = Linked(paths, "layer")
    with pytest.raises(PermissionDeniedError, match="0750"):
        await linked.link.start()
    await linked.link.stop()


async def test_a_socket_that_a_killed_daemon_left_is_replaced(make: Make, paths: RuntimePaths) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint(paths.residency))
    assert paths.residency.is_socket()
    linked = await make()
    await until(lambda: linked["state"] == "live")


@pytest.mark.parametrize("stopped", [False, True])
async def test_stop_leaves_no_process(make: Make, stopped: bool) -> None:
    linked = await make(timing=Timing(stop_grace=0.5))
    await until(lambda: linked["state"] == "live")
    pid = linked["pid"]
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    await linked.link.stop()
    assert time.monotonic() - began < 5.0
    assert not alive(pid)
    assert (linked["state"], linked["pid"]) == ("fallback", None)
    await linked.link.stop()  # again is no harm


async def test_the_policy_off_starts_nothing(make: Make, paths: RuntimePaths) -> None:
    linked = await make("off")
    await asyncio.sleep(0.2)
    assert (linked["state"], linked["pid"]) == ("off", None)
    assert list(paths.private.iterdir()) == []


def test_a_killed_daemon_leaves_no_policy_process(paths: RuntimePaths) -> None:
    daemon = f"""
import asyncio
from pathlib import Path
from vvllm_msd.policy_link import PolicyLink
from vvllm_shared.paths import RuntimePaths
import structlog

async def main():
    link = PolicyLink(RuntimePaths(Path({str(paths.root)!r})), "layer", "boot", None, structlog.get_logger())
    await link.start()
    while link.status().reason != "no engine runs":
        await asyncio.sleep(0.05)
    print("pid:", link.status().pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        pid = next(int(line.split()[1]) for line in lines if line.startswith("pid:"))
        assert alive(pid)
        process.kill()
    deadline = time.monotonic() + 5
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
