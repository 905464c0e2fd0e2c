"""The ROUTER socket between the daemon and its policy process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from vvllm_shared import ipc, limits
from vvllm_shared.errors import ProtocolError
from vvllm_shared.messages import ToDaemon, ToPolicy
from vvllm_shared.wire import decode, encode


@dataclass(frozen=True)
class Incoming:
    """One message, not yet decoded."""

    address: bytes
    """Where an answer goes."""
    peer: ipc.Peer | None
    frame: bytes
    single: bool
    """Whether it has one part, as every message of ours."""

    def decode(self) -> ToDaemon:
        """The message.

        Raises:
            VersionError: it is a handshake of another version.
            ProtocolError: it is not a message of a policy process.
        """
        if not self.single:
            raise ProtocolError("A message has more than one part.")
        return decode(self.frame, ToDaemon)


class PolicySocket:
    """Bound from the start; `close` removes the file.

    Args:
        path: the socket's file, in a private directory whose lock the caller holds.
        log: a structlog logger.

    Raises:
        PermissionDeniedError: the directory is not private.
        ConfigError: the path is taken by something else than a socket.
    """

    def __init__(self, path: Path, log: Any) -> None:
        ipc.check_private(path.parent)
        self._path = path
        self._log = log
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            ipc.bound(self._socket, limits.ADVICE_QUEUE)
            # Without it, messages to a peer that has gone vanish silently.
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            ipc.bind(self._socket, path)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    async def receive(self) -> Incoming:
        """Wait for the next message."""
        address = await self._socket.recv()
        frame = part = await self._socket.recv(copy=False)
        while part.more:
            part = await self._socket.recv(copy=False)
        return Incoming(address, ipc.Peer.of(frame), frame.bytes, single=not frame.more)

    def send(self, address: bytes, message: ToPolicy) -> None:
        """Send at once or not at all: the peer asks again when it has not been answered."""
        sent = asyncio.ensure_future(self._socket.send_multipart((address, encode(message)), zmq.NOBLOCK))
        sent.add_done_callback(self._note)

    def close(self) -> None:
        """Close at once; what was not sent is lost."""
        self._socket.close(linger=0)
        self._context.term()
        self._path.unlink(missing_ok=True)

    def _note(self, sent: asyncio.Future[Any]) -> None:
        if not sent.cancelled() and (error := sent.exception()):
            self._log.info("policy_not_reached", reason=str(error))
