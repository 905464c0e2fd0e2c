"""The prompt, from the command line and what is piped in."""

from __future__ import annotations

import sys

from vvllm_shared import limits
from vvllm_shared.errors import BadRequestError, TooLargeError

EXPLICIT_STDIN = "-"


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
        raw = sys.stdin.buffer.read(limits.BODY_BYTES + 1)
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
