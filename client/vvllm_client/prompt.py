"""The prompt, from the command line and what is piped in."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress

from vvllm_shared import limits
from vvllm_shared.errors import BadRequestError, TooLargeError

EXPLICIT_STDIN = "-"
_SILENT_SECONDS = 2.0


def gather(argument: str | None) -> str:
    """What is piped in, a blank line, the argument; each alone if there is no other; empty if there is none.

    A terminal is read only if the argument is `-`, so that a command without a prompt does not wait.

    Raises:
        BadRequestError: one of them is not UTF-8.
        TooLargeError: stdin holds more than the daemon takes.
    """
    explicit = argument == EXPLICIT_STDIN
    piped = _read_stdin(explicit)
    if explicit or not argument:
        return piped
    return "\n\n".join((piped.rstrip("\n"), argument)) if piped else argument


def _read_stdin(explicit: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not explicit):
        return ""
    try:
        raw = _read_to_end(sys.stdin.fileno())
    except OSError as error:
        raise BadRequestError(
            f"Standard input cannot be read: {error.strerror}.", "Redirect a file."
        ) from None
    if len(raw) > limits.BODY_BYTES:
        raise TooLargeError(
            f"Standard input holds more than the {limits.BODY_BYTES:,} bytes that the daemon takes.",
            "Shorten the prompt.",
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"Standard input is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}.",
            "Convert it first, for example with `iconv -f latin1 -t utf-8`.",
        ) from None


def _read_to_end(fd: int) -> bytes:
    """Everything up to the end, or one byte more than may be.

    A parent with an event loop hands out pipes that do not block: a plain read would take what is there for all.
    A pipe that somebody left open and never writes to looks like a hang, so it is named.
    """
    data = bytearray()
    patience: float | None = None if sys.stdin.isatty() else _SILENT_SECONDS
    while len(data) <= limits.BODY_BYTES:
        if not select.select([fd], [], [], patience)[0]:
            print(
                "vvllm-client: reading standard input until it ends; add </dev/null if nothing is to come.",
                file=sys.stderr,
                flush=True,
            )
            patience = None
            continue
        with suppress(BlockingIOError):  # somebody else read it first
            piece = os.read(fd, 1 << 20)
            if not piece:
                break
            data += piece
    return bytes(data)
