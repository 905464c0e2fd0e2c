"""Errors for users: what happened, what to do now, and a number that scripts can test.

Every failure that a user can meet is a `VvllmError`. It carries a stable `code` (for programs), a `sentence`
(what happened, where), a `hint` (what to do now), an `exit_code` (sysexits where one fits) and an `http_status`.
A plain exception anywhere else is our bug and is shown as one.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command; systemd's `RestartPreventExitStatus` uses the same numbers."""

    OK = 0
    FAILED = 1
    """The generation failed, or a comparison was not equal."""
    USAGE = 2
    BAD_INPUT = 65
    """Bad input or checkpoint: trying again without changing it cannot help."""
    UNAVAILABLE = 69
    """The daemon is not there."""
    INTERNAL = 70
    """The engine died, or a bug of ours."""
    BUSY = 75
    """Busy, loading, or GPU or memory not available now: try again later."""
    PERMISSION = 77
    CONFIG = 78
    INTERRUPTED = 130
    """Ctrl-C, as a shell reports it (128 + SIGINT)."""


class VvllmError(Exception):
    """A failure that the user is told about, without a traceback.

    Args:
        sentence: what happened and where, one sentence.
        hint: what to do now; empty only where nothing can be done.
    """

    code = "internal"
    exit_code = Exit.INTERNAL
    http_status = 500

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.sentence}\n  {self.hint}" if self.hint else self.sentence

    def __reduce__(self) -> tuple[type[VvllmError], tuple[str, str]]:
        """Pickle by the constructor's arguments: errors cross from the engine's process to the daemon's."""
        return type(self), (self.sentence, self.hint)

    def as_json(self) -> dict[str, object]:
        """The error's body in HTTP answers and `--json` output, in the shape of OpenAI's API."""
        return {
            "error": {
                "message": self.sentence,
                "hint": self.hint,
                "type": "vvllm_error",
                "code": self.code,
                "exit_code": int(self.exit_code),
            }
        }


class UsageError(VvllmError):
    """A command line that cannot be understood."""

    code, exit_code, http_status = "usage", Exit.USAGE, 400


class ConfigError(VvllmError):
    """A configuration (file, environment, flags, `expert_cache`) that cannot work."""

    code, exit_code, http_status = "config", Exit.CONFIG, 400


class CheckpointError(VvllmError):
    """A model directory that is missing, damaged or incomplete."""

    code, exit_code, http_status = "checkpoint", Exit.BAD_INPUT, 422


class UnsupportedError(VvllmError):
    """A model, format or engine option that the pager refuses, by name and reason."""

    code, exit_code, http_status = "unsupported", Exit.CONFIG, 422


class BadRequestError(VvllmError):
    """A request or prompt that can never be served as it is."""

    code, exit_code, http_status = "bad_request", Exit.BAD_INPUT, 400


class TooLargeError(BadRequestError):
    """A body, header or frame over its limit (see `vvllm_shared.limits`)."""

    code, http_status = "too_large", 413


class GenerationError(VvllmError):
    """The generation began and then failed."""

    code, exit_code, http_status = "generation_failed", Exit.FAILED, 500


class DaemonAbsentError(VvllmError):
    """No daemon answers on the socket."""

    code, exit_code, http_status = "daemon_absent", Exit.UNAVAILABLE, 503


class EngineDiedError(VvllmError):
    """The engine's process ended while it was needed."""

    code, exit_code, http_status = "engine_died", Exit.INTERNAL, 503


class BusyError(VvllmError):
    """Loading, draining, locked by another daemon, or memory that is not free now."""

    code, exit_code, http_status = "busy", Exit.BUSY, 503


class PermissionDeniedError(VvllmError):
    """The socket, directory or peer is not allowed."""

    code, exit_code, http_status = "permission", Exit.PERMISSION, 403


class ProtocolError(VvllmError):
    """A message on an internal socket that is malformed, foreign, stale or over its bounds."""

    code, exit_code, http_status = "protocol", Exit.INTERNAL, 500
