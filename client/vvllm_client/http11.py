"""An HTTP/1.1 response, read from whatever bytes have come in; it touches no socket.

Both clients use it, which spares the sync one the standard library's `http.client`: importing that takes
a quarter of the time in which a command should have started.
"""

from __future__ import annotations

from collections.abc import Generator

from vvllm_shared import limits
from vvllm_shared.errors import ProtocolError

_HEX = frozenset(b"0123456789abcdefABCDEF")
_SIZE_DIGITS = 16

Parsing = Generator[None, None, None]


class TruncatedError(ConnectionError):
    """The connection ended before the response did."""


class ResponseReader:
    """Takes a response's bytes as they come; gives its status, headers and body as far as they are known.

    Attributes:
        status: the status code; 0 until the head is complete.
        headers: by lower-case name; of a repeated one the last.
        done: the response is complete.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._input = bytearray()
        self._body = bytearray()
        self._at_end = False
        self._parser = self._parse()

    def feed(self, data: bytes) -> None:
        """Take the next bytes; none at all means that the connection has ended.

        Raises:
            TruncatedError: it ended too early.
            ProtocolError: this is not HTTP/1.1, or its head is over its limit.
        """
        self._input += data
        self._at_end = not data
        try:
            next(self._parser)
        except StopIteration:
            self.done = True
            return
        if self._at_end:
            raise TruncatedError("the connection ended within a response")

    def take_body(self) -> bytes:
        """The part of the body that has come in since the last call."""
        body = bytes(self._body)
        self._body.clear()
        return body

    def _parse(self) -> Parsing:
        """The whole response, suspended wherever it needs more input."""
        head = yield from self._until(b"\r\n\r\n")
        status = self._parse_head(head)
        coding = self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if coding not in ("", "chunked") or (
            length is not None and not (length.isascii() and length.isdigit())
        ):
            raise _not_http()
        self.status = status
        if coding:
            yield from self._chunks()
        elif length is not None:
            yield from self._copy(int(length))
        else:
            yield from self._copy_to_end()

    def _parse_head(self, head: bytes) -> int:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (
            code.isascii() and code.isdigit() and int(code) >= 200
        ):
            raise _not_http()
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()
        return int(code)

    def _chunks(self) -> Parsing:
        while True:
            line = yield from self._until(b"\r\n")
            digits = line.partition(b";")[0].strip()
            if not digits or len(digits) > _SIZE_DIGITS or not _HEX.issuperset(digits):
                raise _not_http()
            if not (size := int(digits, 16)):
                break
            yield from self._copy(size)
            if (yield from self._until(b"\r\n")):
                raise _not_http()
        while (yield from self._until(b"\r\n")):
            pass  # trailers say nothing that a client of ours asks for

    def _until(self, mark: bytes) -> Generator[None, None, bytes]:
        """The input before the next `mark`, which is consumed too."""
        seen = 0
        while (end := self._input.find(mark, seen)) < 0:
            seen = max(0, len(self._input) - len(mark) + 1)
            if seen > limits.HEADER_BYTES:
                break
            yield
        if end < 0 or end > limits.HEADER_BYTES:
            raise _not_http()
        found = bytes(self._input[:end])
        del self._input[: end + len(mark)]
        return found

    def _copy(self, size: int) -> Parsing:
        """Move `size` bytes from the input to the body, as they come."""
        while size:
            piece = self._input[:size]
            del self._input[: len(piece)]
            self._body += piece
            size -= len(piece)
            if size:
                yield

    def _copy_to_end(self) -> Parsing:
        while not self._at_end:
            self._body += self._input
            self._input.clear()
            yield


def _not_http() -> ProtocolError:
    return ProtocolError(
        "The other end of the socket does not speak HTTP/1.1.",
        "Is another program listening there? Check --socket and VVLLM_HOST.",
    )
