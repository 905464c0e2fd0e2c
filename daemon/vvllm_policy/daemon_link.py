"""The policy process's end of the line to the daemon: handshake, heartbeat, advice."""

from __future__ import annotations

import os
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from vvllm_policy.policies import LayerAdvice
from vvllm_shared import ipc, limits, logs
from vvllm_shared.errors import ProtocolError
from vvllm_shared.messages import (
    PROTOCOL,
    Advise,
    Heartbeat,
    Hello,
    Message,
    Ready,
    Refused,
    ToPolicy,
)
from vvllm_shared.wire import VersionError, decode, encode

_log = logs.get()


class DaemonLink:
    """A DEALER socket connected to the daemon, which need not be there yet and may come again as another one.

    `socket` and `monitor` are to be polled; `receive` and `watch` take what they hold.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, policy: str) -> None:
        self.hello: Hello | None = None
        """The session; None until the daemon has said hello, and again when the connection breaks."""
        self._policy = policy
        self._seq = 0
        self.bad = 0
        self.socket = context.socket(zmq.DEALER)
        ipc.bound(self.socket, limits.ADVICE_QUEUE)
        # Nothing waits for a daemon that is not there: it would arrive late, in front of the handshake.
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(ipc.endpoint(path))

    def watch(self) -> bool:
        """Take one event of the connection: True where one was made; where one broke, the session is over."""
        made = recv_monitor_message(self.monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if not made:
            self.hello = None
        return made

    def receive(self) -> Hello | None:
        """Take one waiting message: the hello that begins a session, or None.

        Raises:
            ProtocolError: the daemon refused this process, or is of another version.
        """
        received = ipc.receive(self.socket)
        if received is None:
            return None
        frame, single = received
        peer = ipc.Peer.of(frame)
        try:
            if peer is None or not peer.ours or not single:
                raise ProtocolError(f"A message of {peer} is of another user, or has more than one part.")
            message = decode(frame.bytes, ToPolicy)
        except VersionError:
            raise
        except ProtocolError as error:
            self._count_bad(error)
            return None
        if isinstance(message, Refused):
            raise ProtocolError(
                f"The daemon refused this policy process: {message.reason}",
                "The daemon starts its own policy process; end this one.",
            )
        self.hello, self._seq = message, 0
        return message

    def beat(self) -> None:
        """Show that the loop turns: a heartbeat in a session, a greeting before it."""
        if self.hello is None:
            self._send(Ready(PROTOCOL, os.getpid(), self._policy))
        else:
            self._send(Heartbeat(self.hello.boot_id, self.hello.epoch, self._count()))

    def advise(self, advice: LayerAdvice) -> bool:
        """Send advice in the session. False where it must be sent again later: the daemon lags or has gone."""
        if self.hello is None:
            return False
        return self._send(
            Advise(
                boot_id=self.hello.boot_id,
                epoch=self.hello.epoch,
                seq=self._count(),
                layer=advice.layer,
                heat_weight=advice.heat_weight,
                age_weight=advice.age_weight,
                heat_decay=advice.heat_decay,
                bias=None if advice.bias is None else list(advice.bias),
            )
        )

    def close(self) -> None:
        """Close both sockets; the monitor first, or the context would wait for it for ever."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()

    def _count(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, message: Message) -> bool:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _count_bad(self, error: ProtocolError) -> None:
        self.bad += 1
        if self.bad == 1:
            _log.warning("message_of_the_daemon_ignored", reason=error.sentence)
