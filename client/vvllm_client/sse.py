"""Server-sent events, decoded as their bytes come in."""

from __future__ import annotations

from collections.abc import Iterator

from vvllm_shared import limits
from vvllm_shared.errors import ProtocolError

_BOM = b"\xef\xbb\xbf"


class SseDecoder:
    """Turns pieces of an event stream into the data of its events.

    Pieces may end anywhere: within a line end, within a character. Lines end in LF, CRLF or CR; comments and
    other fields than `data` are skipped; several data lines of an event are joined by LF. What is not UTF-8
    becomes U+FFFD, as the standard wants. An event that no empty line ends is none.

    Args:
        limit: the most bytes of one line, and of one event's data.
    """

    def __init__(self, limit: int = limits.BODY_BYTES) -> None:
        self._limit = limit
        self._line = bytearray()
        self._after_cr = False
        self._first = True
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[str]:
        """The data of each event that `piece` completes, in order.

        Raises:
            ProtocolError: a line or an event is over the limit.
        """
        for line in self._lines(piece):
            if line:
                self._field(line)
            elif self._data:
                data = b"\n".join(self._data)
                self._data, self._size = [], 0
                yield data.decode("utf-8", "replace")

    def _lines(self, piece: bytes) -> Iterator[bytes]:
        """Complete lines, without their ends. splitlines() on bytes knows exactly LF, CRLF and CR."""
        if not piece:
            return  # what came before it still counts
        if self._after_cr:
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        for part in piece.splitlines(keepends=True):
            body = part.rstrip(b"\r\n")
            self._line += body
            if len(self._line) > self._limit:
                raise self._too_long()
            if len(body) == len(part):
                return  # only the last part of a piece has no end
            line = bytes(self._line)
            self._line.clear()
            yield line.removeprefix(_BOM) if self._first else line
            self._first = False
        self._after_cr = piece.endswith(b"\r")

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name != b"data":
            return
        value = value.removeprefix(b" ")
        self._size += len(value) + 1
        if self._size > self._limit:
            raise self._too_long()
        self._data.append(value)

    def _too_long(self) -> ProtocolError:
        return ProtocolError(
            f"The daemon sent an event of more than {self._limit:,} bytes.",
            "Is this a vvllm-ms daemon, of the client's own version?",
        )
