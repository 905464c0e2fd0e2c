"""The policy process itself, as the command: the daemon and the engine are sockets of the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zmq
from policy_tools import LAYERS, PEERS, runtime_directory

from vvllm_shared import limits
from vvllm_shared.ipc import endpoint
from vvllm_shared.messages import (
    ALL_LAYERS,
    PROTOCOL,
    Advise,
    DecodeTrace,
    Heartbeat,
    Hello,
    Message,
    PrefillTrace,
    Ready,
    Refused,
    ResidencySnapshot,
    ToDaemon,
)
from vvllm_shared.paths import RuntimePaths
from vvllm_shared.wire import decode, encode

pytestmark = pytest.mark.faults

COMMAND = [sys.executable, "-m", "vvllm_policy", "serve"]


class Daemon:
    """A ROUTER socket where the daemon's would be."""

    def __init__(self, paths: RuntimePaths, boot_id: str) -> None:
        self.boot_id = boot_id
        self.address = b""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(endpoint(paths.residency))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def next(self, kind: type[Message], seconds: float = 20.0) -> Any:
        """The next message of a kind; others are passed over."""
        deadline = time.monotonic() + seconds
        while self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            self.address, frame = self._socket.recv_multipart()
            message = decode(frame, ToDaemon)
            if isinstance(message, kind):
                return message
        pytest.fail(f"no {kind.__name__} came")

    def drain(self) -> int:
        """Pass over what has come so far: how many messages."""
        count = 0
        while self._socket.poll(0):
            self._socket.recv_multipart()
            count += 1
        return count

    def say(self, *parts: bytes) -> None:
        self._socket.send_multipart((self.address, *parts))

    def hello(self, epoch: int = 1) -> Heartbeat:
        """Greet, and wait until it speaks in the new session."""
        self.say(encode(Hello(PROTOCOL, self.boot_id, epoch, "fingerprint", LAYERS)))
        while (beat := self.next(Heartbeat)).epoch != epoch:
            pass
        assert isinstance(beat, Heartbeat)
        return beat


@contextmanager
def bound_daemon(paths: RuntimePaths, boot_id: str = "boot-1") -> Iterator[Daemon]:
    daemon = Daemon(paths, boot_id)
    try:
        yield daemon
    finally:
        daemon.close()


class Policy:
    """The running command."""

    def __init__(self, paths: RuntimePaths, *options: str) -> None:
        command = [*COMMAND, "--runtime-dir", str(paths.root), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, list[dict[str, Any]]]:
        """Its exit code, and what it logged."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, list[dict[str, Any]]]:
        _, stderr = self.process.communicate(timeout=20)
        return self.process.returncode, [json.loads(line) for line in stderr.splitlines()]

    def counts(self) -> dict[str, Any]:
        """What it counted in its life, which ends here."""
        code, events = self.stop()
        assert code == 0
        (stopped,) = [event for event in events if event["event"] == "policy_stopped"]
        return stopped


@pytest.fixture
def paths() -> Iterator[RuntimePaths]:
    with runtime_directory() as paths:
        yield paths


@pytest.fixture
def policy(paths: RuntimePaths) -> Iterator[Policy]:
    policy = Policy(paths, "--policy", "lfru")
    yield policy
    policy.process.kill()
    policy.process.communicate()


@pytest.fixture
def daemon(paths: RuntimePaths) -> Iterator[Daemon]:
    with bound_daemon(paths) as daemon:
        yield daemon


@pytest.fixture
def push(paths: RuntimePaths, policy: Policy, daemon: Daemon) -> Iterator[Any]:
    """The engine's socket, in a session."""
    daemon.next(Ready)
    daemon.hello()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.connect(endpoint(paths.traces))
        yield socket


def decode_trace(seq: int, expert: int = 5, **changes: Any) -> DecodeTrace:
    ids = np.full((8, len(LAYERS), 1, 2), expert, "<i2")
    ids[..., 1] = -1
    fields = {
        "boot_id": "boot-1",
        "step": 8 * seq,
        "steps": 8,
        "layers": len(LAYERS),
        "tokens": 1,
        "top_k": 2,
    }
    return DecodeTrace(**({"seq": seq, "ids": ids.tobytes()} | fields | changes))


def settle(daemon: Daemon) -> None:
    """Wait until what was sent has been taken: the loop has turned for at least a heartbeat since."""
    daemon.drain()
    daemon.next(Heartbeat)
    daemon.next(Heartbeat)


def test_it_waits_for_a_daemon_and_survives_another_one(paths: RuntimePaths, policy: Policy) -> None:
    time.sleep(0.7)
    for boot_id in ("boot-1", "boot-2"):
        with bound_daemon(paths, boot_id) as daemon:
            ready = daemon.next(Ready)
            assert (ready.protocol, ready.pid, ready.policy) == (PROTOCOL, policy.process.pid, "lfru")
            assert daemon.hello().boot_id == boot_id
            assert daemon.next(Advise).boot_id == boot_id
    assert policy.stop()[0] == 0


def test_a_new_epoch_starts_over(daemon: Daemon, policy: Policy) -> None:
    daemon.next(Ready)
    for epoch in (1, 2, 7):
        assert daemon.hello(epoch).seq == 1
        advise = daemon.next(Advise)
        assert (advise.epoch, advise.layer) == (epoch, ALL_LAYERS)


def test_heartbeats_come_twice_a_second(daemon: Daemon, policy: Policy) -> None:
    daemon.next(Ready)
    daemon.hello()
    began = time.monotonic()
    numbers = [daemon.next(Heartbeat).seq for _ in range(4)]
    assert 1.4 < time.monotonic() - began < 10
    assert numbers == sorted(set(numbers))


def test_traces_become_advice(push: Any, daemon: Daemon, policy: Policy) -> None:
    """The chosen expert gets the bias; the same advice is not said twice."""
    assert daemon.next(Advise).bias is None
    for seq in range(40):
        push.send(encode(decode_trace(seq)))
    biases = {}
    while len(biases) < len(LAYERS):
        advise = daemon.next(Advise)
        biases[advise.layer] = advise.bias
    assert all(int(np.argmax(bias)) == 5 for bias in biases.values())
    counts = np.zeros((len(LAYERS), 8), "<i4")
    counts[:, 2] = 500
    push.send(encode(PrefillTrace("boot-1", 40, 0, 500, len(LAYERS), 8, counts.tobytes())))
    while int(np.argmax(daemon.next(Advise).bias)) != 2:
        pass
    push.send(encode(ResidencySnapshot("boot-1", 41, 0, len(LAYERS), 4, b"\xff" * 8 * len(LAYERS))))
    settle(daemon)
    stopped = policy.counts()
    assert (stopped["taken"], stopped["lost"], stopped["bad"]) == (42, 0, 0)


def test_gaps_and_other_boot_ids_are_counted(push: Any, daemon: Daemon, policy: Policy) -> None:
    for seq in (0, 1, 5, 6, 10):
        push.send(encode(decode_trace(seq)))
    push.send(encode(decode_trace(0)))  # a new engine counts from zero
    push.send(encode(decode_trace(1)))
    for _ in range(limits.BAD_MESSAGES + 1):
        push.send(encode(decode_trace(2, boot_id="another")))
    settle(daemon)
    stopped = policy.counts()
    assert (stopped["taken"], stopped["lost"], stopped["stale"], stopped["bad"]) == (7, 6, 17, 0)


BAD_TRACES = {
    "garbage": [b"\xc1\xff"],
    "other direction": [encode(Refused("x"))],
    "two parts": [encode(decode_trace(0)), b"more"],
    "64 parts": [encode(decode_trace(0))] * 64,
    "expert out of range": [encode(decode_trace(0, expert=8))],
    "other layers": [encode(decode_trace(0, layers=1, ids=b"\0" * 32))],
}


def test_bad_traces_are_counted_and_good_ones_between_them_taken(
    push: Any, daemon: Daemon, policy: Policy
) -> None:
    for seq, parts in enumerate(BAD_TRACES.values()):
        push.send_multipart(parts)
        push.send_multipart(parts)
        push.send(encode(decode_trace(seq)))
    settle(daemon)
    stopped = policy.counts()
    assert (stopped["bad"], stopped["taken"]) == (2 * len(BAD_TRACES), len(BAD_TRACES))


def test_a_sender_of_many_bad_traces_is_ignored_and_others_are_not(
    push: Any, daemon: Daemon, policy: Policy, paths: RuntimePaths
) -> None:
    extra = 5
    frames = ["c1ff", encode(decode_trace(0)).hex()]
    sender = [sys.executable, PEERS, "send", str(paths.traces), str(os.geteuid()), str(int(zmq.PUSH))]
    subprocess.run([*sender, str(limits.BAD_MESSAGES + extra), *frames], check=True, timeout=20)
    push.send(encode(decode_trace(1)))
    settle(daemon)
    code, events = policy.stop()
    assert code == 0
    stopped = events[-1]
    # Its good ones between the bad ones counted, one fewer than those, and the other sender's one.
    assert (stopped["bad"], stopped["taken"]) == (limits.BAD_MESSAGES, limits.BAD_MESSAGES)
    assert stopped["ignored"] == 2 * extra + 1
    assert len([event for event in events if event["event"] == "trace_sender_ignored"]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_traces_of_another_user_are_refused(
    push: Any, daemon: Daemon, policy: Policy, paths: RuntimePaths
) -> None:
    for path, mode in ((paths.root, 0o711), (paths.private, 0o711), (paths.traces, 0o666)):
        path.chmod(mode)
    sender = [sys.executable, PEERS, "send", str(paths.traces), "65534", str(int(zmq.PUSH))]
    subprocess.run([*sender, "20", encode(decode_trace(0)).hex()], check=True, timeout=20)
    settle(daemon)
    code, events = policy.stop()
    assert code == 0
    assert (events[-1]["foreign"], events[-1]["taken"]) == (20, 0)
    assert len([event for event in events if event["event"] == "traces_of_another_user_refused"]) == 1


def test_a_flood_of_traces_does_not_stop_the_heartbeat(push: Any, daemon: Daemon, policy: Policy) -> None:
    frame, end, sent = encode(decode_trace(0)), time.monotonic() + 3.0, 0
    daemon.drain()
    while time.monotonic() < end:
        try:
            push.send(frame, zmq.NOBLOCK)
            sent += 1
        except zmq.Again:
            time.sleep(0.001)
    assert sent > 1000
    assert daemon.drain() >= 3


def test_bad_messages_of_the_daemon_are_ignored(daemon: Daemon, policy: Policy) -> None:
    daemon.next(Ready)
    daemon.say(b"\xc1")
    daemon.say(encode(Heartbeat("b", 1, 1)))
    daemon.say(encode(Refused("two parts")), b"more")
    daemon.hello()
    assert policy.counts()["bad_from_daemon"] == 3


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (encode(Refused("there is one already")), ["there is one already"]),
        (b"\x82\xa4type\xa5hello\xa8protocol\x02", ["protocol 2", f"protocol {PROTOCOL}"]),
    ],
)
def test_a_refusal_ends_it_with_the_reason(
    daemon: Daemon, policy: Policy, frame: bytes, words: list[str]
) -> None:
    daemon.next(Ready)
    daemon.say(frame)
    code, events = policy.wait()
    assert code == 70
    (failed,) = [event for event in events if event["event"] == "policy_failed"]
    assert all(word in failed["reason"] for word in words)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_at_once(
    push: Any, policy: Policy, paths: RuntimePaths, number: signal.Signals, code: int
) -> None:
    began = time.monotonic()
    assert policy.stop(number)[0] == code
    assert time.monotonic() - began < 5.0
    assert not paths.traces.exists()


def test_it_takes_the_place_of_one_that_was_killed(
    policy: Policy, daemon: Daemon, paths: RuntimePaths
) -> None:
    daemon.next(Ready)
    policy.stop(signal.SIGKILL)
    assert paths.traces.is_socket()
    second = Policy(paths)
    while daemon.next(Ready).pid != second.process.pid:
        pass
    assert second.stop()[0] == 0


def run(paths: RuntimePaths, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [*COMMAND, "--runtime-dir", str(paths.root), *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    return done.returncode, done.stderr


def test_what_it_cannot_work_with_it_refuses(paths: RuntimePaths) -> None:
    assert run(paths, "--policy", "belady")[0] == 2
    paths.traces.write_text("a file")
    code, stderr = run(paths)
    assert (code, "is not one" in stderr) == (78, True)
    assert paths.traces.read_text() == "a file"
    paths.private.chmod(0o755)
    code, stderr = run(paths)
    assert (code, "0755" in stderr) == (77, True)
    assert run(RuntimePaths(paths.root / "none"))[0] == 77
    assert run(RuntimePaths(paths.root / ("x" * 100)))[0] == 78


def test_it_loads_neither_torch_nor_vllm() -> None:
    script = "import sys, vvllm_policy.cli; print({'torch', 'vllm', 'vvllm_msd', 'vvllm_pager'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
