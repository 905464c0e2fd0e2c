"""The prompt, from the command line and what is piped in."""

from __future__ import annotations

import select
import sys

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
    _say_if_silent()
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


def _say_if_silent() -> None:
    """A pipe that somebody left open and never writes to looks like a hang: name it."""
    if not sys.stdin.isatty() and not select.select([sys.stdin], [], [], _SILENT_SECONDS)[0]:
        print(
            "vvllm-client: reading standard input until it ends; add </dev/null if nothing is to come.",
            file=sys.stderr,
            flush=True,
        )
