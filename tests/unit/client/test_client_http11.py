"""The response reader, against responses cut anywhere and against what is no response."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vvllm_client.http11 import ResponseReader, TruncatedError
from vvllm_shared import limits
from vvllm_shared.errors import ProtocolError

BODIES = st.lists(st.binary(min_size=1, max_size=50), max_size=5)
CUTS = st.lists(st.integers(0, 10_000), max_size=8)


def chunked(body: list[bytes]) -> bytes:
    chunks = b"".join(b"%X;ext=1\r\n%b\r\n" % (len(part), part) for part in body)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nTrailer: x\r\n\r\n"


def sized(body: list[bytes]) -> bytes:
    whole = b"".join(body)
    return b"HTTP/1.1 503 Busy\r\nRetry-After:  2 \r\ncontent-length: %d\r\n\r\n%b" % (len(whole), whole)


def read(data: bytes, cuts: list[int] = [], *, end: bool = False) -> tuple[ResponseReader, bytes]:  # noqa: B006
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    reader, body = ResponseReader(), b""
    for a, b in pairwise(edges):
        if a < b:
            reader.feed(data[a:b])
            body += reader.take_body()
    if end:
        reader.feed(b"")
    return reader, body + reader.take_body()


@given(BODIES, CUTS)
def test_chunks(body: list[bytes], cuts: list[int]) -> None:
    reader, got = read(chunked(body), cuts)
    assert (reader.status, got, reader.done) == (200, b"".join(body), True)


@given(BODIES, CUTS)
def test_a_length(body: list[bytes], cuts: list[int]) -> None:
    reader, got = read(sized(body), cuts)
    assert (reader.status, got, reader.done) == (503, b"".join(body), True)
    assert reader.headers["retry-after"] == "2"


@given(BODIES, CUTS)
def test_until_the_connection_ends(body: list[bytes], cuts: list[int]) -> None:
    data = b"HTTP/1.0 200 OK\r\n\r\n" + b"".join(body)
    reader, got = read(data, cuts)
    assert (got, reader.done) == (b"".join(body), False)
    reader.feed(b"")
    assert reader.done


@given(BODIES.filter(bool), CUTS, st.sampled_from([chunked, sized]), st.integers(1))
def test_a_response_that_ends_too_early(body: list[bytes], cuts: list[int], write, missing: int) -> None:  # type: ignore[no-untyped-def]
    data = write(body)
    with pytest.raises(TruncatedError):
        read(data[: len(data) - 1 - missing % len(data)], cuts, end=True)


@pytest.mark.parametrize(
    "data",
    [
        b"220 smtp.example ready\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 099 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x10\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * limits.HEADER_BYTES + b"\r\n\r\n",
        b"x" * (limits.HEADER_BYTES + 10),
    ],
)
def test_what_is_no_response_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not speak HTTP"):
        read(data)
