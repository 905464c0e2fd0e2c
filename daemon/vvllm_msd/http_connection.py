"""One HTTP connection: uvicorn's protocol with the bounds that uvicorn lacks, and the peer's identity.

uvicorn bounds neither the time that a request takes to arrive nor the time that an answer waits to be read,
and says nothing of who is at the other end. Here a request that arrives too slowly gets 408, one that cannot
be parsed 400 or 431, a connection too many 503, and a client that stops reading loses its connection, which
its running request sees as a disconnect.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vvllm_shared import limits
from vvllm_shared.errors import BadRequestError, BusyError, TooLargeError, VvllmError

_SO_PEERGROUPS = 59  # asm-generic/socket.h; Python has no name for it
_GROUPS_BYTES = 1024  # the most that Python's getsockopt takes: 256 groups


@dataclass(frozen=True)
class HttpLimits:
    """The bounds of one gateway; the defaults are the project's, tests use shorter ones."""

    header_bytes: int = limits.HEADER_BYTES
    body_bytes: int = limits.BODY_BYTES
    read_seconds: float = limits.READ_SECONDS
    write_stall_seconds: float = limits.WRITE_STALL_SECONDS
    connections: int = limits.CONNECTIONS
    leave_seconds: float = 2.0
    """How long an application may take to notice that its client is gone before it is cancelled."""


DEFAULT_LIMITS = HttpLimits()


class HeadersTooLargeError(TooLargeError):
    """Request line and headers over their limit."""

    http_status = 431

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request's headers are over the limit of {limit} bytes.", "Send less.")


class SlowRequestError(BadRequestError):
    """A request that does not arrive in time."""

    code, http_status = "too_slow", 408

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request took longer than {seconds:g} s to arrive.", "Send it at once.")


@dataclass(frozen=True)
class Peer:
    """Who connected, as the kernel recorded it at connect(2)."""

    pid: int
    uid: int
    gids: frozenset[int]

    @classmethod
    def of(cls, sock: Any) -> Peer:
        """The other end of a connected Unix socket.

        Raises:
            OSError: the kernel does not say.
        """
        pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        try:
            raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
        except OSError:  # ERANGE: more groups than fit
            raw = b""
        return cls(pid, uid, frozenset((gid, *struct.unpack(f"{len(raw) // 4}I", raw))))


@dataclass
class Arrival:
    """What the gateway's application learns of the connection, as `scope["state"]["arrival"]`.

    Attributes:
        peer: None where the kernel does not say.
        began: the loop's time at the first byte of the request that is being read.
    """

    peer: Peer | None
    began: float


def raw_response(error: VvllmError, *headers: str) -> bytes:
    """A whole HTTP/1.1 answer for a connection that ends with it."""
    body = json.dumps(error.as_json()).encode()
    lines = [
        f"HTTP/1.1 {error.http_status} {HTTPStatus(error.http_status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class HttpConnection(H11Protocol):
    """uvicorn's h11 protocol within `bounds`."""

    def __init__(self, *args: Any, bounds: HttpLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._read_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._admitted = True

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Refuse a connection too many; else note the peer and start the clock of the first request."""
        if len(self.connections) >= self._bounds.connections:
            self.transport = transport
            self._admitted = False
            error = BusyError(f"All {self._bounds.connections} connections of the daemon are in use.")
            self._refuse(error, "retry-after: 1")
            return
        super().connection_made(transport)
        # With a mark of zero "writing is paused" means "the client has not read what was sent".
        transport.set_write_buffer_limits(high=0)
        try:
            peer = Peer.of(transport.get_extra_info("socket"))
        except OSError:
            peer = None
        self._arrival = Arrival(peer, self.loop.time())
        self.app_state = {"arrival": self._arrival}
        self._watch_reading(begun=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks. A connection too many has none, and uvicorn never knew it."""
        if not self._admitted:
            return
        self._watch_reading(begun=False)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Run the clock from a request's first byte to its last."""
        if self._read_timer is None and self.conn.their_state is h11.IDLE:
            self._watch_reading(begun=True)
        super().data_received(data)
        self._watch_reading(begun=self._is_reading())

    def on_response_complete(self) -> None:
        """A pipelined request may have begun while the last one was answered: its time counts from now."""
        self._arrival.began = self.loop.time()
        super().on_response_complete()
        self._watch_reading(begun=self._is_reading())

    def _is_reading(self) -> bool:
        """Some of a request has arrived, and some has not."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def _watch_reading(self, begun: bool) -> None:
        if begun and self._read_timer is None:
            self._arrival.began = self.loop.time()
            self._read_timer = self.loop.call_later(self._bounds.read_seconds, self._too_slow)
        elif not begun and self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _too_slow(self) -> None:
        """The request is not complete in time. Where its exchange runs, that one answers (same deadline)."""
        self._read_timer = None
        if self.conn.their_state is h11.IDLE:
            self._refuse(SlowRequestError(self._bounds.read_seconds))
        elif self.cycle.response_complete:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read: start its clock."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._bounds.write_stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read all."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, or headers over their limit; called while h11's error is handled."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        cause = sys.exc_info()[1]
        if isinstance(cause, h11.RemoteProtocolError) and cause.error_status_hint == 431:
            self._refuse(HeadersTooLargeError(self._bounds.header_bytes))
        else:
            self._refuse(BadRequestError(f"The request is not valid HTTP/1.1: {cause}."))

    def _refuse(self, error: VvllmError, *headers: str) -> None:
        self.transport.write(raw_response(error, *headers))
        self.transport.close()
