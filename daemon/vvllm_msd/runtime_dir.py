"""The daemon's runtime directory: private, locked against a second daemon, cleared of what a killed one left.

A socket's mode is set by the umask while it is bound and never changed afterwards, so that there is no moment in
which somebody else could connect.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vvllm_shared import limits
from vvllm_shared.errors import BusyError, ConfigError, PermissionDeniedError, VvllmError
from vvllm_shared.paths import RuntimePaths

_WRITABLE_BY_OTHERS = 0o022
_WITH_GROUP = 0o750


@dataclass(frozen=True)
class RuntimeDir:
    """A prepared runtime directory.

    Attributes:
        listener: the socket for clients, bound and listening, not blocking, not inherited by children.
        group: whose members may connect; None where only the owner may.
        made: device and inode of the socket's file.
    """

    paths: RuntimePaths
    listener: socket.socket
    group: int | None
    made: tuple[int, int] | None

    def reachable(self) -> bool:
        """Whether clients that look at the path still come to this listener."""
        return _identity(self.paths.http) == self.made


@contextmanager
def runtime_dir(paths: RuntimePaths) -> Iterator[RuntimeDir]:
    """Prepare the directory, hold its lock and listen inside the `with` block; then remove what was made.

    The directory is 0700; one that is 0750 already stays so, and its group may connect to the daemon.

    Raises:
        ConfigError: a path is too long, or something that is no socket stands where one must be made.
        PermissionDeniedError: the directory belongs to somebody else, or others can write to it.
        BusyError: another daemon is using it.
    """
    paths.check_lengths()
    with ExitStack() as stack:
        try:
            directory = _set_up(paths, stack)
        except OSError as error:
            raise _told(paths.root, error) from error
        yield directory


def _set_up(paths: RuntimePaths, stack: ExitStack) -> RuntimeDir:
    group = _prepare(paths.root, may_have_group=True)
    _prepare(paths.private)
    stack.enter_context(_locked(paths))
    _prepare(paths.rpc)
    _clear(paths)
    stack.callback(_clear, paths)
    _remove_stale_socket(paths.http)
    listener = stack.enter_context(_listening(paths.http, group))
    return RuntimeDir(paths, listener, group, _identity(paths.http))


def _prepare(directory: Path, may_have_group: bool = False) -> int | None:
    """Make `directory`, or check that it is ours alone. Returns the group that may search it, if any."""
    _make(directory)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionDeniedError(
            f"{directory} is {_kind(found.st_mode)}, not a directory.", "Remove it, or set VVLLM_RUNTIME_DIR."
        )
    if found.st_uid != os.geteuid():
        raise PermissionDeniedError(
            f"{directory} belongs to user {found.st_uid}, and the daemon runs as user {os.geteuid()}.",
            "Set VVLLM_RUNTIME_DIR to a directory of this user.",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & _WRITABLE_BY_OTHERS:
        raise PermissionDeniedError(
            f"Others may write to {directory} (mode {mode:04o}): they could take the daemon's sockets over.",
            f"Remove what you do not know there and run: chmod 700 {directory}",
        )
    if may_have_group and mode & 0o777 == _WITH_GROUP:
        return found.st_gid
    if mode != 0o700:
        directory.chmod(0o700)
    return None


def _make(directory: Path) -> None:
    """Like mkdir -p, but parents too are private, whatever the umask is."""
    if not directory.parent.exists():
        _make(directory.parent)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)


@contextmanager
def _locked(paths: RuntimePaths) -> Iterator[None]:
    """Hold the lock file, with our pid in it. The file stays: unlinking it would let two daemons hold two."""
    fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise BusyError(
                f"A daemon is already running in {paths.root}, pid {pid}.",
                f"Stop it (kill {pid}), or set VVLLM_RUNTIME_DIR for a second one.",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _clear(paths: RuntimePaths) -> None:
    """Remove what a daemon and its children leave in the private directory. The lock is ours: nobody uses it."""
    _unlink(paths.private.glob("*.sock"))
    remove_engine_files(paths)


def remove_engine_files(paths: RuntimePaths) -> None:
    """Remove vLLM's ipc files, which it leaves behind when it is killed. No engine runs now."""
    _unlink(paths.rpc.glob("*"))


def _unlink(files: Iterable[Path]) -> None:
    """Remove what can be removed: this tidies up, and must not replace the error that it follows."""
    for path in files:
        with suppress(OSError):
            path.unlink()


def _remove_stale_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"{path} is {_kind(mode)}; the daemon makes its socket there.", "Move it to another place."
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # EAGAIN: somebody listens, and the queue is full.
        if probe.connect_ex(str(path)) in (0, errno.EAGAIN):
            raise BusyError(
                f"Another process answers on {path}, though the daemon's lock is free.",
                "Stop it, or set VVLLM_RUNTIME_DIR to another directory.",
            )
    path.unlink()


@contextmanager
def _listening(path: Path, group: int | None) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177 if group is None else 0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        made = _identity(path)
        try:
            if group is not None:
                os.chown(path, -1, group, follow_symlinks=False)
            listener.setblocking(False)
            listener.listen(limits.CONNECTIONS)
            yield listener
        finally:
            if _identity(path) == made:
                path.unlink()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return "a directory" if stat.S_ISDIR(mode) else "a file"


def _told(root: Path, error: OSError) -> VvllmError:
    where = error.filename or root
    sentence = f"The runtime directory {root} cannot be used: {where}: {error.strerror}."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDeniedError(sentence, "Set VVLLM_RUNTIME_DIR to a directory of this user.")
    return ConfigError(sentence, "Set VVLLM_RUNTIME_DIR to another directory.")
