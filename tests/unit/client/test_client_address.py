"""Where a client looks, and what it says when it finds nobody."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from vvllm_client.address import Address, TcpAddress, UnixAddress, find_addresses, unreachable
from vvllm_shared.errors import (
    BusyError,
    ConfigError,
    DaemonAbsentError,
    Exit,
    PermissionDeniedError,
    UsageError,
)

ENV = {"XDG_RUNTIME_DIR": "/run/user/7", "VVLLM_HOST": "unix:///b.sock"}
HERE, THERE = UnixAddress(Path("/a.sock")), UnixAddress(Path("/b.sock"))


def test_the_option_wins_then_the_environment_then_the_usual_places() -> None:
    assert find_addresses("/a.sock", ENV) == [HERE]
    assert find_addresses(None, ENV) == [THERE]
    assert find_addresses(None, {"XDG_RUNTIME_DIR": "/run/user/7"}) == [
        UnixAddress(Path("/run/user/7/vvllm-ms/http.sock")),
        UnixAddress(Path("/run/vvllm-ms/http.sock")),
    ]


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("unix:///run/x y.sock", UnixAddress(Path("/run/x y.sock"))),
        ("http://127.0.0.1:8000", TcpAddress("127.0.0.1", 8000)),
        ("http://localhost:8000/", TcpAddress("localhost", 8000)),
        ("http://[::1]:8000", TcpAddress("::1", 8000)),
    ],
)
def test_vvllm_host(host: str, address: Address) -> None:
    assert find_addresses(None, {"VVLLM_HOST": host}) == [address]


@pytest.mark.parametrize(
    "host",
    [
        "/run/x.sock",
        "unix://relative.sock",
        "unix://",
        "http://127.0.0.1",
        "http://127.0.0.1:8000/v1",
        "http://u:p@127.0.0.1:8000",
        "http://127.0.0.1:99999",
        "https://127.0.0.1:8000",
        "127.0.0.1:8000",
        "http://[::1:8000",
        "unix:///" + "x" * 108,
    ],
)
def test_a_vvllm_host_that_names_no_daemon_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="VVLLM_HOST"):
        find_addresses(None, {"VVLLM_HOST": host})


@pytest.mark.parametrize("path", ["", "x" * 108, "a\0b"])
def test_a_socket_that_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="1 to 107 bytes"):
        find_addresses(path)


def test_the_host_header_names_a_port_as_the_daemon_expects_it() -> None:
    assert HERE.host == "localhost"
    assert TcpAddress("127.0.0.1", 8000).host == "127.0.0.1:8000"
    assert TcpAddress("::1", 8000).host == "[::1]:8000"


def fault(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOENT, DaemonAbsentError, "there is no socket at /a.sock or /b.sock"),
        (errno.ENOTDIR, DaemonAbsentError, "there is no socket"),
        (errno.ECONNREFUSED, DaemonAbsentError, "left behind"),
        (errno.EACCES, PermissionDeniedError, "not allowed"),
        (errno.EAGAIN, BusyError, "too many connections"),
        (errno.EPROTOTYPE, DaemonAbsentError, "wrong type"),
    ],
)
def test_each_fault_has_its_sentence(number: int, kind: type[Exception], words: str) -> None:
    error = unreachable([(HERE, fault(number)), (THERE, fault(errno.ENOENT))])
    assert type(error) is kind
    assert words in error.sentence
    assert "/a.sock" in error.sentence
    assert "/b.sock" in error.sentence
    assert error.hint


def test_a_forbidden_socket_says_more_than_a_left_one_and_that_more_than_none() -> None:
    none, left, forbidden = (fault(n) for n in (errno.ENOENT, errno.ECONNREFUSED, errno.EACCES))
    assert "left behind" in unreachable([(HERE, none), (THERE, left)]).sentence
    assert "not allowed" in unreachable([(HERE, left), (THERE, forbidden)]).sentence


def test_a_port_where_nobody_listens() -> None:
    error = unreachable([(TcpAddress("127.0.0.1", 8000), fault(errno.ECONNREFUSED))])
    assert "http://127.0.0.1:8000: Connection refused" in error.sentence


def test_a_daemon_that_takes_no_connections_is_busy() -> None:
    assert isinstance(unreachable([(HERE, TimeoutError())]), BusyError)


def test_a_file_that_is_no_socket_is_called_so(tmp_path: Path) -> None:
    error = unreachable([(UnixAddress(tmp_path), fault(errno.ECONNREFUSED))])
    assert error.sentence == f"{tmp_path} is not a socket."
    assert error.exit_code == Exit.USAGE
