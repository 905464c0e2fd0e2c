"""Where the engine's traces arrive. It sends without waiting, so what cannot be taken in time is lost and counted."""

from __future__ import annotations

import fcntl
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from vvllm_policy.observations import Observation, observe
from vvllm_shared import ipc, limits, logs
from vvllm_shared.errors import BusyError, ProtocolError
from vvllm_shared.messages import LayerShape, Trace
from vvllm_shared.wire import decode

_log = logs.get()
_PEERS = 64
"""Senders whose bad messages are remembered; the oldest is forgotten."""


@dataclass
class TraceCounts:
    """What became of the messages."""

    taken: int = 0
    lost: int = 0
    """Gaps in the sender's numbers."""
    bad: int = 0
    ignored: int = 0
    """From a sender that sent too many bad ones."""
    foreign: int = 0
    """From another user."""
    stale: int = 0
    """Of another run of the daemon, or before it said hello."""


class TraceInbox:
    """The PULL socket of the policy process.

    Args:
        context: ZeroMQ's; the caller ends it after `close`.
        path: where to bind, under a lock on a file beside it.

    Raises:
        BusyError: another policy process holds the lock.
        PermissionDeniedError: the directory is not private.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        ipc.check_private(path.parent)
        self.counts = TraceCounts()
        self._path = path
        self._boot_id = ""
        self._layers: Sequence[LayerShape] = ()
        self._next_seq: int | None = None
        self._bad_by_pid: OrderedDict[int, int] = OrderedDict()
        self._lock = _lock(path.with_name(path.name + ".lock"))
        self.socket = context.socket(zmq.PULL)
        try:
            ipc.bound(self.socket, limits.TRACE_QUEUE)
            ipc.bind(self.socket, path)
        except BaseException:
            self.socket.close()
            os.close(self._lock)
            raise

    def begin(self, boot_id: str, layers: Sequence[LayerShape]) -> None:
        """Take traces of this run of the daemon and this model from now on, with a clean slate for all senders."""
        self._boot_id, self._layers = boot_id, layers
        self._next_seq = None
        self._bad_by_pid.clear()

    def receive(self) -> Observation | None:
        """Take one waiting message; None where there is nothing in it for a policy."""
        received = ipc.receive(self.socket)
        if received is None:
            return None
        frame, single = received
        peer = ipc.Peer.of(frame)
        if peer is None or not peer.ours:
            self._count_foreign(peer)
            return None
        if self._bad_by_pid.get(peer.pid, 0) >= limits.BAD_MESSAGES:
            self.counts.ignored += 1
            return None
        try:
            if not single:
                raise ProtocolError("A message has more than one part.")
            return self._read(decode(frame.bytes, Trace))
        except ProtocolError as error:
            self._mark_bad(peer.pid, error)
            return None

    def close(self) -> None:
        """Remove the socket's file and let go of the lock."""
        self.socket.close()
        self._path.unlink(missing_ok=True)
        os.close(self._lock)

    def _read(self, trace: Trace) -> Observation | None:
        if trace.boot_id != self._boot_id:
            self.counts.stale += 1
            return None
        observation = observe(trace, self._layers)
        # A number below the expected one is a new engine's first: no gap.
        if self._next_seq is not None and trace.seq > self._next_seq:
            self.counts.lost += trace.seq - self._next_seq
        self._next_seq = trace.seq + 1
        self.counts.taken += 1
        return observation

    def _count_foreign(self, peer: ipc.Peer | None) -> None:
        self.counts.foreign += 1
        if self.counts.foreign == 1:
            _log.warning("traces_of_another_user_refused", peer=str(peer))

    def _mark_bad(self, pid: int, error: ProtocolError) -> None:
        self.counts.bad += 1
        self._bad_by_pid[pid] = self._bad_by_pid.get(pid, 0) + 1
        if self._bad_by_pid[pid] == limits.BAD_MESSAGES:
            _log.warning(
                "trace_sender_ignored", pid=pid, bad_messages=limits.BAD_MESSAGES, reason=error.sentence
            )
        if len(self._bad_by_pid) > _PEERS:
            self._bad_by_pid.popitem(last=False)


def _lock(path: Path) -> int:
    """Take the lock file; the descriptor holds it until it is closed or the process ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BusyError(
            f"Another policy process serves in {path.parent}: it holds {path.name}.",
            "One is enough; the daemon starts it by itself.",
        ) from None
    return fd
