"""What the daemon answers when it cannot serve, as errors with the right exit code."""

from __future__ import annotations

import json
from collections.abc import Mapping

from vvllm_client.address import Address
from vvllm_shared.errors import (
    BadRequestError,
    BusyError,
    ConfigError,
    DaemonAbsentError,
    EngineDiedError,
    Exit,
    GenerationError,
    PermissionDeniedError,
    ProtocolError,
    VvllmError,
)

_BY_EXIT: dict[Exit, type[VvllmError]] = {
    Exit.FAILED: GenerationError,
    Exit.BAD_INPUT: BadRequestError,
    Exit.UNAVAILABLE: DaemonAbsentError,
    Exit.INTERNAL: EngineDiedError,
    Exit.BUSY: BusyError,
    Exit.PERMISSION: PermissionDeniedError,
    Exit.CONFIG: ConfigError,
}
_BY_STATUS = {
    400: Exit.BAD_INPUT,
    413: Exit.BAD_INPUT,
    422: Exit.BAD_INPUT,
    403: Exit.PERMISSION,
    429: Exit.BUSY,
    503: Exit.BUSY,
}
_DOING = {
    "starting": "is starting",
    "loading": "is loading the model",
    "processing": "is preparing the experts",
    "warming": "is warming up",
    "restarting": "is restarting its engine",
    "draining": "is stopping and takes no new requests",
    "failed": "has failed",
}


def from_http(status: int, headers: Mapping[str, str], body: bytes, address: Address) -> VvllmError:
    """The error that an answer with another status than 200 stands for."""
    content = parse_object(body) or {}
    info = content.get("error")
    info = info if isinstance(info, dict) else {}
    message, hint = _text(info, "message"), _text(info, "hint")
    progress = content.get("status")
    if isinstance(progress, dict) and (doing := _doing(progress, address)):
        message, hint = doing, hint or "`vvllm-ctl status` shows how far it is."
    elif not message:
        message = f"The daemon at {address} answered with HTTP status {status}."
        hint = "Is this a vvllm-ms daemon, of the client's own version? Its log says more."
    if (seconds := headers.get("retry-after", "")).isdecimal() and "try again" not in hint.lower():
        hint = f"{hint} Try again in {seconds} s.".lstrip()
    exit_code = _known_exit(info.get("exit_code")) or _BY_STATUS.get(status, Exit.FAILED)
    error = _BY_EXIT[exit_code](message, hint)
    error.code = _text(info, "code") or error.code
    error.http_status = status
    return error


def from_stream(info: object) -> GenerationError:
    """The error that the daemon reported after the generation had begun."""
    fields = info if isinstance(info, dict) else {}
    message = _text(fields, "message") or "The generation failed, and the daemon did not say why."
    error = GenerationError(message, _text(fields, "hint") or "`vvllm-ctl status` shows how the daemon is.")
    error.code = _text(fields, "code") or error.code
    return error


def cut_short(address: Address) -> GenerationError:
    """The connection ended before the answer did."""
    return GenerationError(
        f"The daemon at {address} ended the connection before the answer was complete.",
        "`vvllm-ctl status` and the daemon's log say why.",
    )


def no_response(error: OSError, address: Address, seconds: float | None) -> VvllmError:
    """The daemon took the connection, but no response came before it ended or `seconds` had passed."""
    if isinstance(error, TimeoutError):
        return BusyError(
            f"The daemon at {address} did not answer within {seconds:g} s.",
            "Try again; if it stays silent, restart it.",
        )
    return DaemonAbsentError(
        f"The daemon at {address} ended the connection without an answer.",
        "It may be stopping: `vvllm-ctl status` and its log say more.",
    )


def not_understood(address: Address, what: str) -> ProtocolError:
    """An answer of status 200 that is not what its path promises."""
    return ProtocolError(
        f"The daemon at {address} sent {what}, which this client does not understand.",
        "Use the client and the daemon of one version.",
    )


def parse_object(data: bytes | str) -> dict[str, object] | None:
    """A JSON object; None for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _doing(status: Mapping[str, object], address: Address) -> str:
    """One sentence on a daemon without an engine, with its progress; empty if the stage is unknown."""
    if not (doing := _DOING.get(_text(status, "stage"))):
        return ""
    progress = status.get("progress")
    percent = f" ({progress:.0%})" if isinstance(progress, int | float) else ""
    detail = _text(status, "detail").rstrip(".")
    return f"The daemon at {address} {doing}{percent}" + (f": {detail}." if detail else ".")


def _known_exit(value: object) -> Exit | None:
    """An exit code from a body, if it is one that a failure can have."""
    return Exit(value) if isinstance(value, int) and value in _BY_EXIT else None


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""
