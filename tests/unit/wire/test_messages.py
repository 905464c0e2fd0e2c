"""Each bound of each message, met by what a sender could put into a frame."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import msgspec
import pytest
from wire_examples import EXAMPLES

from vvllm_shared import limits
from vvllm_shared.errors import ProtocolError
from vvllm_shared.messages import (
    PROTOCOL,
    Advise,
    Hello,
    LayerShape,
    Message,
    Refused,
    ToDaemon,
    ToPolicy,
    Trace,
)
from vvllm_shared.wire import VersionError, decode, encode


@pytest.mark.parametrize(("message", "union"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_message_survives_the_wire(message: Message, union: Any) -> None:
    assert decode(encode(message), union) == message


def test_the_type_is_the_name_in_lower_case() -> None:
    assert msgpack.unpackb(encode(Refused("no"))) == {"type": "refused", "reason": "no"}


def test_the_largest_messages_fit() -> None:
    shape = LayerShape("x" * 128, limits.EXPERTS, limits.SLOTS, limits.TOP_K, 1 << 30)
    hello = Hello(PROTOCOL, "b", 1, "f", [shape] * limits.LAYERS)
    assert decode(encode(hello), ToPolicy) == hello
    advise = Advise("b", 1, 1, limits.LAYERS - 1, 1.0, 1.0, 1.0, [1.5] * limits.EXPERTS)
    assert decode(encode(advise), ToDaemon) == advise


BAD_FIELDS: list[tuple[int, str, object]] = [
    (0, "boot_id", ""),
    (0, "boot_id", "x" * 65),
    (0, "boot_id", "a\nb"),
    (0, "boot_id", "a\n"),
    (0, "epoch", -1),
    (0, "epoch", 2**63),
    (0, "layers", []),
    (0, "fingerprint", "x" * (limits.TEXT_CHARS + 1)),
    (1, "reason", 5),
    (1, "reason", "x" * (limits.TEXT_CHARS + 1)),
    (2, "pid", 0),
    (2, "pid", True),
    (2, "pid", "4711"),
    (2, "pid", 1.0),
    (3, "seq", -1),
    (3, "seq", None),
    (4, "layer", -2),
    (4, "layer", limits.LAYERS),
    (4, "heat_weight", math.nan),
    (4, "age_weight", math.inf),
    (4, "age_weight", -math.inf),
    (4, "heat_weight", 1e10),
    (4, "heat_decay", 1.5),
    (4, "heat_decay", 0.0),
    (4, "heat_decay", math.nan),
    (4, "bias", [0.0]),  # for all layers at once
    (5, "bias", [0.0, math.nan]),
    (5, "bias", [0.0, math.inf]),
    (5, "bias", [0.0, "1"]),
    (5, "bias", []),
    (5, "bias", [0.0] * (limits.EXPERTS + 1)),
    (6, "steps", 0),
    (6, "steps", 3),
    (6, "tokens", -3),
    (6, "top_k", limits.TOP_K + 1),
    (6, "layers", limits.LAYERS + 1),
    (6, "ids", b"\0" * 23),
    (6, "ids", "AAAA" * 8),  # base64 of the right length
    (7, "experts", limits.EXPERTS + 1),
    (7, "counts", b"\0" * 31),
    (8, "slots", limits.SLOTS + 1),
    (8, "expert_in", b""),
]


@pytest.mark.parametrize(("example", "field", "value"), BAD_FIELDS)
def test_a_field_out_of_its_bounds_is_refused(example: int, field: str, value: object) -> None:
    message, union = EXAMPLES[example]
    fields = msgpack.unpackb(encode(message))
    assert field in fields
    with pytest.raises(ProtocolError) as refusal:
        decode(msgpack.packb(fields | {field: value}), union)
    assert not isinstance(refusal.value, VersionError)


@pytest.mark.parametrize(("message", "union"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_unknown_and_missing_fields_and_other_directions_are_refused(message: Message, union: Any) -> None:
    fields = msgpack.unpackb(encode(message))
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(fields | {"extra": 1}), union)
    for name in fields:
        if name == "bias":
            continue
        with pytest.raises(ProtocolError):
            decode(msgpack.packb({key: value for key, value in fields.items() if key != name}), union)
    for other in (ToPolicy, ToDaemon, Trace):
        if other != union:
            with pytest.raises(ProtocolError):
                decode(encode(message), other)


@pytest.mark.parametrize("theirs", [0, 2, 2**40])
def test_another_version_is_told_by_both_numbers(theirs: int) -> None:
    """Also when its other fields mean nothing to this version."""
    for frame in (
        msgpack.packb({"type": "ready", "protocol": theirs, "pid": 1, "policy": "x"}),
        msgpack.packb({"type": "ready", "protocol": theirs, "who": [1, 2]}),
    ):
        with pytest.raises(VersionError, match=rf"protocol {theirs}.*protocol {PROTOCOL}"):
            decode(frame, ToDaemon)


def test_a_message_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        EXAMPLES[3][0].seq = 5  # type: ignore[attr-defined]
    assert msgspec.structs.fields(Hello)
