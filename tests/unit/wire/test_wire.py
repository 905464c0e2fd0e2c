"""No bytes make decoding raise anything but ProtocolError, take long, or take much memory."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from wire_examples import EXAMPLES

from vvllm_shared import limits
from vvllm_shared.errors import ProtocolError
from vvllm_shared.messages import DecodeTrace, ToDaemon, ToPolicy, Trace
from vvllm_shared.wire import decode, encode

UNIONS = (ToPolicy, ToDaemon, Trace)
FRAMES = [encode(message) for message, _ in EXAMPLES]


def refused(frame: bytes, union: Any) -> bool:
    """Decode; whatever is raised but ProtocolError fails the test. Its reason is one bounded, printable line."""
    try:
        decode(frame, union)
    except ProtocolError as error:
        reason = error.sentence
    else:
        return False
    assert len(reason) <= 200
    assert reason.isprintable()
    return True


@given(frame=st.binary(max_size=200), union=st.sampled_from(UNIONS))
@example(frame=b"", union=Trace)
@example(frame=b"\xc1", union=Trace)
@example(frame=b"\x81\x90\x01", union=Trace)  # a list as key
@example(frame=b"\xd7\xff" + b"\0" * 8, union=Trace)  # a timestamp
@example(frame=b"\x81\xa4type\xa1\xff", union=Trace)  # not UTF-8
@example(frame=b"\x81\xa4type\xa3\xed\xa0\x80", union=Trace)  # a surrogate
def test_arbitrary_bytes(frame: bytes, union: Any) -> None:
    refused(frame, union)


@given(data=st.data(), union=st.sampled_from(UNIONS))
def test_damaged_messages(data: st.DataObject, union: Any) -> None:
    frame = bytearray(data.draw(st.sampled_from(FRAMES)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(("flip", "set", "cut", "insert", "repeat"))):
            case "flip":
                frame[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                frame[at] = data.draw(st.integers(0, 255))
            case "cut":
                del frame[at + 1 :]
            case "insert":
                frame[at:at] = data.draw(st.binary(max_size=5))
            case "repeat":
                frame += frame[at:]
    refused(bytes(frame), union)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(data=st.data())
def test_well_formed_fields_of_any_type(data: st.DataObject) -> None:
    """Valid MessagePack, a known type, and anything at all in one of its fields."""
    message, union = data.draw(st.sampled_from(EXAMPLES))
    fields = msgpack.unpackb(encode(message))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(VALUES)
    refused(msgpack.packb(fields), union)


MIB = 1 << 20
BOMBS = {
    "nils": b"\xdd\x00\x3f\xff\x00" + b"\xc0" * (4 * MIB - 5),
    "empty lists": b"\xdc\xff\xff" + b"\x90" * (4 * MIB - 3),
    "nested lists": b"\x91" * (4 * MIB),
    "nested maps": b"\x81\xa1a" * MIB,
    "lists that claim 2^32 - 1": b"\xdd\xff\xff\xff\xff" * 1000,
    "maps that claim 2^32 - 1": b"\xdf\xff\xff\xff\xff" * 1000,
    "lists that claim as much as there are bytes": b"\xdd\x00\x00\x0f\xff" * 1000,
    "bytes that claim 2^32 - 1": b"\xc6\xff\xff\xff\xff",
    "text that claims 2^32 - 1": b"\xdb\xff\xff\xff\xff",
    "an extension that claims 2^32 - 1": b"\xc9\xff\xff\xff\xff\x01",
    "text of 4 MiB": b"\xdb\x00\x3f\xff\x00" + b"a" * (4 * MIB - 256),
    "many frames in one": FRAMES[3] * 10_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_neither_time_nor_memory(name: str) -> None:
    frame = BOMBS[name]
    tracemalloc.start()
    began = time.process_time()
    try:
        assert refused(frame, Trace)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 1.0
    assert peak < 8 * MIB


def test_a_frame_over_the_limit_is_refused_both_ways() -> None:
    with pytest.raises(ProtocolError, match=str(limits.FRAME_BYTES)):
        decode(b"\xc0" * (limits.FRAME_BYTES + 1), Trace)
    half = limits.FRAME_BYTES // 2
    trace = DecodeTrace("b", 0, 0, steps=1, layers=1, tokens=half, top_k=1, ids=bytes(2 * half))
    with pytest.raises(ProtocolError, match=str(limits.FRAME_BYTES)):
        encode(trace)


def test_nesting_has_its_limit() -> None:
    assert refused(b"\x91" * (limits.NESTING + 1) + b"\xc0", Trace)
    with pytest.raises(ProtocolError, match="nested"):
        decode(b"\x91" * (limits.NESTING + 1) + b"\xc0", Trace)
    with pytest.raises(ProtocolError, match="object"):
        decode(b"\x91" * limits.NESTING + b"\xc0", Trace)


def test_a_field_given_twice_is_refused() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        decode(b"\x82\xa4type\xa7refused\xa4type\xa7refused", ToPolicy)


def test_a_reason_cannot_break_the_log() -> None:
    frame = msgpack.packb({"type": "refused", "reason": "x", 'a\n{"event":"forged"}\x1b[2J' + "y" * 300: 1})
    with pytest.raises(ProtocolError) as refusal:
        decode(frame, ToPolicy)
    assert "\n" not in refusal.value.sentence
    assert len(refusal.value.sentence) <= 200
