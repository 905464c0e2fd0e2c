"""What both commands do with the terminal: bytes out, safe to look at, and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

from vvllm_shared.errors import Exit, GenerationError, VvllmError

CLOSED_PIPE = 141
"""Exit code after the reader of stdout went away, as a shell reports it (128 + SIGPIPE)."""

_UNSAFE = dict.fromkeys({*range(0x20), 0x7F, *range(0x80, 0xA0)} - {ord("\n"), ord("\t")})
"""Control characters: what a text could drive a terminal with. ESC is one, so no sequence survives."""


class Sink:
    """stdout or stderr, in UTF-8 whatever the locale, each piece written at once.

    On a terminal control characters are left out, so that a model's text cannot drive it; into a pipe or file
    everything goes through unchanged. A stream that was closed before the start takes everything and keeps
    nothing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.is_terminal = stream is not None and stream.isatty()
        self.has_color = (
            self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        self.at_line_start = True

    def write(self, text: str, *, dim: bool = False) -> None:
        """Write `text`; `dim` where the terminal has colors.

        Raises:
            BrokenPipeError: nobody reads any more.
            GenerationError: it cannot be written for another reason.
        """
        if self.is_terminal:
            text = text.translate(_UNSAFE)
        if self._stream is None or not text:
            return
        self.at_line_start = text.endswith("\n")
        if dim and self.has_color:
            text = f"\x1b[2m{text}\x1b[22m"
        try:
            self._stream.buffer.write(text.encode("utf-8", "replace"))
            self._stream.buffer.flush()
        except OSError as error:
            _discard(self._stream)
            if isinstance(error, BrokenPipeError):
                raise
            raise GenerationError(
                f"The output cannot be written: {error.strerror}.", "Free space, or send it elsewhere."
            ) from None

    def end_line(self) -> None:
        """On a terminal, go to the start of a line."""
        if self.is_terminal and not self.at_line_start:
            self.write("\n")


def guarded(prog: str, command: Callable[[], int]) -> int:
    """Run a command; turn a failure into its message and exit code, and a closed pipe into quiet.

    Args:
        prog: the command's name, before the message.
        command: returns the exit code.
    """
    try:
        try:
            return command()
        except VvllmError as error:
            Sink(sys.stderr).write(f"{prog}: {error}\n")
            return error.exit_code
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        _discard(sys.stdout)
        return CLOSED_PIPE


def _discard(stream: TextIO) -> None:
    """Lead what is left in a stream's buffer nowhere: the interpreter flushes it at its end, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
