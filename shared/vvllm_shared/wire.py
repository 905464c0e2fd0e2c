"""Messages to frames and back. No frame, whatever its bytes, raises anything but `ProtocolError`.

Decoding goes in four steps, each bounded by the one before: the frame's length; a walk over its structure
that builds nothing (number of values, nesting, lengths against the bytes that are there); msgpack with those
bounds; msgspec, which checks every field of the tagged Struct.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import msgspec

from vvllm_shared import limits
from vvllm_shared.errors import ProtocolError
from vvllm_shared.messages import PROTOCOL, Message

if TYPE_CHECKING:
    from typing_extensions import TypeForm

_T = TypeVar("_T")
_REASON_CHARS = 200


class VersionError(ProtocolError):
    """The other process speaks another version of the protocol."""

    code = "protocol_version"

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"The other process speaks protocol {theirs}, this one speaks protocol {PROTOCOL}.",
            "Restart the daemon, so that all its processes come from the same installation.",
        )


def encode(message: Message) -> bytes:
    """The frame of a message.

    Raises:
        ProtocolError: it is longer than a frame may be.
    """
    frame = msgspec.msgpack.encode(message)
    _check_length(frame)
    return frame


def decode(frame: bytes, union: TypeForm[_T]) -> _T:
    """The message in a frame.

    Args:
        frame: what arrived; nothing about it is trusted.
        union: the messages that may come this way: `messages.ToPolicy`, `ToDaemon` or `Trace`.

    Raises:
        VersionError: it is a handshake of another version.
        ProtocolError: it is anything else than one well-formed message of `union`; the reason is one line.
    """
    _check_length(frame)
    try:
        _check_structure(frame)
        value = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_without_duplicates,
            max_str_len=4 * limits.TEXT_CHARS,
            max_bin_len=len(frame),
            max_array_len=min(len(frame), limits.MESSAGE_ITEMS),
            max_map_len=min(len(frame), limits.MESSAGE_ITEMS),
            max_ext_len=0,
        )
        _check_version(value)
        # Without `builtin_types` a string would pass for bytes, as base64.
        message: _T = msgspec.convert(value, union, strict=True, builtin_types=(bytes,))
    except (ValueError, msgpack.UnpackException) as error:  # msgspec's ValidationError is a ValueError
        reason = str(error) or type(error).__name__
        raise ProtocolError(_one_line(f"A message cannot be read: {reason}")) from None
    return message


def _check_length(frame: bytes) -> None:
    if len(frame) > limits.FRAME_BYTES:
        raise ProtocolError(
            f"A message of {len(frame)} bytes is over the limit of {limits.FRAME_BYTES}.",
        )


def _check_structure(frame: bytes) -> None:
    """Walk the frame's values without building them: no short frame may claim or unfold into much memory.

    Raises:
        ValueError: too many values, too deep, of a kind that no message has, or cut short.
    """
    stream = msgpack.Unpacker(max_buffer_size=max(len(frame), 1))
    stream.feed(frame)
    items = 1
    pending = [1]  # values still to come, at each open level
    while pending:
        if not pending[-1]:
            pending.pop()
            continue
        pending[-1] -= 1
        children = _enter(stream, frame)
        items += children
        if items > min(limits.MESSAGE_ITEMS, len(frame)):  # a value takes a byte at least
            msg = f"it claims {items} values in {len(frame)} bytes, the limit is {limits.MESSAGE_ITEMS}"
            raise ValueError(msg)
        if children:
            pending.append(children)
        if len(pending) - 1 > limits.NESTING:
            msg = f"it is nested deeper than {limits.NESTING}"
            raise ValueError(msg)


def _enter(stream: msgpack.Unpacker, frame: bytes) -> int:
    """Pass one scalar (0), or the header of an array or map: the number of values in it."""
    at = stream.tell()
    if at >= len(frame):
        msg = "it is cut short"
        raise ValueError(msg)
    kind = frame[at]
    if 0x90 <= kind <= 0x9F or kind in (0xDC, 0xDD):
        return int(stream.read_array_header())
    if 0x80 <= kind <= 0x8F or kind in (0xDE, 0xDF):
        return 2 * int(stream.read_map_header())
    stream.skip()
    return 0


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        msg = "a field is given twice"
        raise ValueError(msg)
    return fields


def _check_version(value: object) -> None:
    """Another version is told apart before its fields are: they may well have changed."""
    theirs = value.get("protocol") if isinstance(value, dict) else None
    if type(theirs) is int and theirs != PROTOCOL:
        raise VersionError(theirs)


def _one_line(text: str) -> str:
    """Bounded and printable: a reason may quote what the sender wrote, and goes into logs."""
    short = text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 1] + "…"
    return "".join(c if c.isprintable() else "?" for c in short)
