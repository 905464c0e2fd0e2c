"""Where the daemon listens, and what to tell a user who cannot reach it there."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vvllm_shared import limits, paths
from vvllm_shared.errors import (
    BusyError,
    ConfigError,
    DaemonAbsentError,
    PermissionDeniedError,
    UsageError,
    VvllmError,
)

_START = "Start one with `vvllm-msd serve --model DIR`, or `systemctl start vvllm-msd` where it is installed"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket in the file system."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def host(self) -> str:
        """What the request's Host header says."""
        return "localhost"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port, on the loopback interface by the daemon's default."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"http://{self.host}"

    @property
    def host(self) -> str:
        """What the request's Host header says."""
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


Address = UnixAddress | TcpAddress


def find_addresses(
    socket: str | os.PathLike[str] | None = None, env: Mapping[str, str] = os.environ
) -> list[Address]:
    """Where to look for the daemon, in order: `socket` alone, or `$VVLLM_HOST` alone, or the usual sockets.

    Raises:
        UsageError: `socket` cannot be a socket's path.
        ConfigError: `$VVLLM_HOST` is neither `unix:///PATH` nor `http://HOST:PORT`.
    """
    if socket is not None:
        return [UnixAddress(_fitting(Path(socket), "--socket", UsageError))]
    if host := env.get("VVLLM_HOST"):
        return [_parse_host(host)]
    return [UnixAddress(path) for path in paths.client_sockets(env)]


def unreachable(failures: Sequence[tuple[Address, OSError]]) -> VvllmError:
    """The error for a daemon that none of the tried addresses led to.

    A forbidden socket says most, then one without a daemon behind it, then any other fault, then absence.
    """
    tried = _tried([address for address, _ in failures])
    ranked = sorted(failures, key=lambda failure: _RANK.get(failure[1].errno or 0, 2))
    address, cause = ranked[0]
    match cause.errno:
        case errno.EACCES | errno.EPERM:
            return PermissionDeniedError(
                f"You are not allowed to use the daemon's socket {address}{tried}.",
                "Join its group (`sudo usermod -aG vvllm-ms $USER`, then log in again), "
                "or start a daemon of your own.",
            )
        case errno.ECONNREFUSED if isinstance(address, UnixAddress) and _is_no_socket(address.path):
            return UsageError(f"{address} is not a socket{tried}.", "Give the daemon's http.sock.")
        case errno.ECONNREFUSED if isinstance(address, UnixAddress):
            return DaemonAbsentError(
                f"The socket {address} is there, but no daemon listens on it: it was left behind{tried}.",
                f"{_START}; it replaces the socket.",
            )
        case errno.ENOENT | errno.ENOTDIR:
            return DaemonAbsentError(
                "No daemon is running: there is no socket at "
                + " or ".join(str(a) for a, _ in failures)
                + ".",
                f"{_START}; for a daemon elsewhere give --socket PATH or VVLLM_HOST.",
            )
    if cause.errno == errno.EAGAIN or isinstance(cause, TimeoutError):
        full = (
            "has too many connections waiting" if cause.errno == errno.EAGAIN else "does not take connections"
        )
        return BusyError(f"The daemon at {address} {full}{tried}.", "Try again in a moment.")
    reason = cause.strerror or str(cause)
    return DaemonAbsentError(f"No daemon could be reached at {address}: {reason}{tried}.", f"{_START}.")


_RANK = {errno.EACCES: 0, errno.EPERM: 0, errno.ECONNREFUSED: 1, errno.ENOENT: 3, errno.ENOTDIR: 3}


def _is_no_socket(path: Path) -> bool:
    return path.exists() and not path.is_socket()


def _tried(addresses: Sequence[Address]) -> str:
    return f" (tried: {', '.join(map(str, addresses))})" if len(addresses) > 1 else ""


def _parse_host(host: str) -> Address:
    from urllib.parse import urlsplit

    refusal = ConfigError(
        f"VVLLM_HOST is {host!r}, which names no daemon.",
        "Set it to unix:///PATH/OF/http.sock or http://127.0.0.1:PORT, without a path or user name.",
    )
    try:
        parts = urlsplit(host)
        name, port = parts.hostname, parts.port
    except ValueError:
        raise refusal from None
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return UnixAddress(_fitting(Path(host.removeprefix("unix://")), "VVLLM_HOST", ConfigError))
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme == "http" and name and port and plain:
        return TcpAddress(name, port)
    raise refusal


def _fitting(path: Path, option: str, error: type[VvllmError]) -> Path:
    """The path, if the kernel can take it as a socket's."""
    raw = os.fsencode(path)
    if path == Path() or b"\0" in raw or len(raw) > limits.SOCKET_PATH_BYTES:
        raise error(
            f"{option} names no possible socket: its path is {len(raw)} bytes long.",
            f"The path of a Unix socket has 1 to {limits.SOCKET_PATH_BYTES} bytes.",
        )
    return path
