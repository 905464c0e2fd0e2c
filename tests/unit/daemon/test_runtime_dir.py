"""The runtime directory: modes, the lock, what a killed daemon left, and what must not be there."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vvllm_msd.runtime_dir import remove_engine_files, runtime_dir
from vvllm_shared.errors import BusyError, ConfigError, Exit, PermissionDeniedError
from vvllm_shared.paths import RuntimePaths

HOLDER = """
import sys, time
from pathlib import Path
from vvllm_msd.runtime_dir import runtime_dir
from vvllm_shared.errors import VvllmError
from vvllm_shared.paths import RuntimePaths
try:
    with runtime_dir(RuntimePaths(Path(sys.argv[1]))) as directory:
        (directory.paths.rpc / "left").touch()
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except VvllmError as error:
    print(type(error).__name__, flush=True)
    sys.exit(error.exit_code)
"""

Holder = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def paths(short_dir: Path) -> RuntimePaths:
    return RuntimePaths(short_dir / "run")


@pytest.fixture
def hold(paths: RuntimePaths) -> Iterator[Holder]:
    """Start another process that holds the directory."""
    started: list[subprocess.Popen[str]] = []

    def start(seconds: float = 60) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(paths.root), str(seconds)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_modes_under_every_umask(paths: RuntimePaths, umask: int) -> None:
    before = os.umask(umask)
    try:
        with runtime_dir(paths) as directory:
            assert (mode(paths.root), mode(paths.private), mode(paths.rpc)) == (0o700, 0o700, 0o700)
            assert mode(paths.http) == 0o600
            assert directory.group is None
            assert os.umask(umask) == umask
    finally:
        os.umask(before)


def test_a_directory_with_a_group_lets_the_group_in(paths: RuntimePaths) -> None:
    paths.root.mkdir()
    paths.root.chmod(0o750)
    with runtime_dir(paths) as directory:
        assert directory.group == paths.root.stat().st_gid
        assert (mode(paths.root), mode(paths.http), mode(paths.private)) == (0o750, 0o660, 0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_the_socket_gets_the_directorys_group(paths: RuntimePaths) -> None:
    paths.root.mkdir()
    paths.root.chmod(0o750)
    os.chown(paths.root, -1, 4711)
    with runtime_dir(paths) as directory:
        assert directory.group == paths.http.stat().st_gid == 4711


@pytest.mark.parametrize("loose", [0o755, 0o711, 0o700])
def test_a_readable_directory_is_closed(paths: RuntimePaths, loose: int) -> None:
    paths.root.mkdir()
    paths.root.chmod(loose)
    with runtime_dir(paths):
        assert mode(paths.root) == 0o700


@pytest.mark.parametrize("loose", [0o777, 0o770, 0o1777, 0o702])
@pytest.mark.parametrize("which", ["root", "private", "rpc"])
def test_a_directory_that_others_can_write_to_is_refused(paths: RuntimePaths, which: str, loose: int) -> None:
    directory: Path = getattr(paths, which)
    directory.mkdir(parents=True)
    directory.chmod(loose)
    with pytest.raises(PermissionDeniedError, match="Others may write") as caught, runtime_dir(paths):
        pass
    assert caught.value.exit_code == Exit.PERMISSION


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_a_directory_of_somebody_else_is_refused(paths: RuntimePaths) -> None:
    paths.root.mkdir(mode=0o700)
    os.chown(paths.root, 65534, 65534)
    with pytest.raises(PermissionDeniedError, match="belongs to user 65534"), runtime_dir(paths):
        pass


def test_a_link_or_file_instead_of_the_directory_is_refused(paths: RuntimePaths, short_dir: Path) -> None:
    (short_dir / "real").mkdir(mode=0o700)
    paths.root.symlink_to(short_dir / "real")
    with pytest.raises(PermissionDeniedError, match="a symbolic link"), runtime_dir(paths):
        pass
    paths.root.unlink()
    paths.root.touch()
    with pytest.raises(PermissionDeniedError, match="a file"), runtime_dir(paths):
        pass


def test_what_is_no_socket_is_not_removed(paths: RuntimePaths, short_dir: Path) -> None:
    makers: dict[str, Callable[[], object]] = {
        "a file": paths.http.touch,
        "a directory": paths.http.mkdir,
        "a symbolic link": lambda: paths.http.symlink_to(short_dir / "elsewhere"),
    }
    paths.root.mkdir(mode=0o700)
    for kind, make in makers.items():
        make()
        with pytest.raises(ConfigError, match=kind), runtime_dir(paths):
            pass
        assert paths.http.is_symlink() or paths.http.exists()
        paths.http.rmdir() if kind == "a directory" else paths.http.unlink()


def test_a_long_path_is_refused_with_the_limit(short_dir: Path) -> None:
    paths = RuntimePaths(short_dir / ("x" * 100))
    with pytest.raises(ConfigError, match="Unix sockets allow 107"), runtime_dir(paths):
        pass
    assert not paths.root.exists()


def test_a_second_daemon_is_refused_by_pid(paths: RuntimePaths, hold: Holder) -> None:
    first = hold()
    assert said(first) == "held"
    with (
        pytest.raises(BusyError, match=f"already running in .*, pid {first.pid}") as caught,
        runtime_dir(paths),
    ):
        pass
    assert caught.value.exit_code == Exit.BUSY
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(paths.http))  # the first one's socket is as it was


def test_of_many_that_start_at_once_one_wins(hold: Holder) -> None:
    processes = [hold() for _ in range(5)]
    assert sorted(said(process) for process in processes) == ["BusyError"] * 4 + ["held"]
    assert sum(process.poll() is None for process in processes) >= 1


def test_what_a_killed_daemon_left_is_replaced(paths: RuntimePaths, hold: Holder) -> None:
    first = hold()
    assert said(first) == "held"
    first.send_signal(signal.SIGKILL)
    first.wait()
    stale = paths.private / "traces.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(stale))
    assert paths.http.exists()
    assert (paths.rpc / "left").exists()
    with runtime_dir(paths):
        assert not stale.exists()
        assert not (paths.rpc / "left").exists()
        assert paths.lock.read_text() == f"{os.getpid()}\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(paths.http))


def test_a_socket_that_answers_is_not_taken_over(paths: RuntimePaths) -> None:
    paths.root.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(paths.http))
        other.listen(1)
        with pytest.raises(BusyError, match="Another process answers"), runtime_dir(paths):
            pass
        assert paths.http.exists()


def test_only_the_lock_file_stays(paths: RuntimePaths) -> None:
    with runtime_dir(paths):
        (paths.rpc / "ipc").touch()
        (paths.private / "residency.sock").touch()
    assert [path.name for path in paths.root.rglob("*") if not path.is_dir()] == ["lock"]
    assert paths.lock.read_text() == ""
    with runtime_dir(paths):
        pass


def test_what_cannot_be_removed_after_an_engine_stays_without_an_error(paths: RuntimePaths) -> None:
    """It is called where an engine has just failed, whose error must come through."""
    with runtime_dir(paths):
        (paths.rpc / "directory").mkdir()
        (paths.rpc / "file").touch()
        (paths.rpc / "link").symlink_to("directory")
        remove_engine_files(paths)
        assert [path.name for path in paths.rpc.iterdir()] == ["directory"]
        paths.root.rename(paths.root.with_name("gone"))
        remove_engine_files(paths)


def test_a_socket_that_is_not_ours_any_more_stays(paths: RuntimePaths) -> None:
    with runtime_dir(paths):
        paths.http.unlink()
        paths.http.touch()
    assert paths.http.exists()


def test_a_directory_that_vanishes_meanwhile(paths: RuntimePaths) -> None:
    with runtime_dir(paths):
        paths.root.rename(paths.root.with_name("gone"))


def test_an_error_inside_is_not_the_directorys(paths: RuntimePaths) -> None:
    with pytest.raises(FileNotFoundError), runtime_dir(paths):
        raise FileNotFoundError(2, "of somebody else")


def test_children_inherit_neither_socket_nor_lock(paths: RuntimePaths) -> None:
    with runtime_dir(paths) as directory:
        assert not directory.listener.get_inheritable()
        links = subprocess.run(
            [sys.executable, "-c", "import os; [print(os.readlink(f'/proc/self/fd/{n}')) for n in range(3, 64)"
             " if os.path.lexists(f'/proc/self/fd/{n}')]"],
            capture_output=True, text=True, check=True, close_fds=False,
        ).stdout  # fmt: skip
        inode = os.fstat(directory.listener.fileno()).st_ino
        assert f"socket:[{inode}]" not in links
        assert str(paths.lock) not in links


def test_the_next_daemon_starts_at_once_when_the_last_has_ended(paths: RuntimePaths, hold: Holder) -> None:
    first = hold(0.2)
    assert said(first) == "held"
    first.wait()
    began = time.monotonic()
    with runtime_dir(paths):
        assert time.monotonic() - began < 1
