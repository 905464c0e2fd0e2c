"""ZeroMQ over ipc between processes of one user: the rules that ZeroMQ leaves to us.

A second bind on an ipc path takes the path from its owner without a word, MAXMSGSIZE counts per part of a
message, and anyone who may open the socket file is a peer. So: sockets lie in a 0700 directory, only the holder
of a lock binds, a message has one part, and each message's sender (SO_PEERCRED) is looked at.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from vvllm_shared import limits
from vvllm_shared.errors import ConfigError, PermissionDeniedError


@dataclass(frozen=True)
class Peer:
    """The process that sent a message, as the kernel saw it connect or listen."""

    uid: int
    pid: int

    @classmethod
    def of(cls, frame: zmq.Frame) -> Peer | None:
        """The sender of a frame; None where the kernel's word is missing."""
        try:
            _, uid, _, pid = str(frame.get("Peer-Address")).split(":")
            return cls(int(uid), int(pid))
        except (zmq.ZMQError, ValueError):
            return None

    @property
    def ours(self) -> bool:
        """Whether it runs as the user that we are."""
        return self.uid == os.geteuid()


def check_private(directory: Path) -> None:
    """Refuse a directory for sockets that others could enter.

    Raises:
        PermissionDeniedError: it is not there, not a directory, not ours, or not closed to others.
    """
    try:
        found = directory.lstat()
    except OSError as error:
        raise PermissionDeniedError(
            f"The directory {directory} for internal sockets cannot be used: {error.strerror}.",
            "The daemon makes it; start the daemon first, or name its runtime directory.",
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionDeniedError(
            f"{directory} must be a directory of user {os.geteuid()} with mode 0700; it belongs to user "
            f"{found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}.",
            "Remove it, or choose another runtime directory: whoever may enter it may send messages.",
        )


def bound(socket: zmq.Socket[Any], queue: int) -> None:
    """Bound what waits in a socket: `queue` messages of at most FRAME_BYTES each way, none after closing."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.FRAME_BYTES)


def bind(socket: zmq.Socket[Any], path: Path) -> None:
    """Bind in place of a socket file that a dead owner left. The caller holds the lock that says it is dead.

    Raises:
        ConfigError: something else than a socket lies at the path.
    """
    if os.path.lexists(path):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(
                f"{path} is in the way of a socket and is not one.",
                "Move it away, or choose another runtime directory.",
            )
        path.unlink()
    old = os.umask(0o077)
    try:
        socket.bind(endpoint(path))
    finally:
        os.umask(old)


def receive(socket: zmq.Socket[bytes]) -> tuple[zmq.Frame, bool] | None:
    """Take one waiting message: its first part, and whether it is the only one. None where nothing waits.

    Further parts are read away one by one; ZeroMQ holds all of a message before it shows the first.
    """
    try:
        frame = part = socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    while part.more:
        part = socket.recv(zmq.NOBLOCK, copy=False)
    return frame, not frame.more


def endpoint(path: Path) -> str:
    """ZeroMQ's name of a socket file."""
    return f"ipc://{path}"
