"""The decoder of server-sent events, against everything that a connection can do to bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vvllm_client.sse import SseDecoder
from vvllm_shared.errors import ProtocolError

LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
EVENTS = st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=6)
NOISE = st.sampled_from(["", ": a comment", "event: message", "id: 7", "retry: 10", "unknown"])


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def decode(*pieces: bytes, limit: int = 1000) -> list[str]:
    decoder = SseDecoder(limit)
    return [event for piece in pieces for event in decoder.feed(piece)]


@given(EVENTS, NOISE, st.sampled_from(["\n", "\r\n", "\r"]), st.booleans(), st.lists(st.integers(0, 10_000)))
def test_any_line_end_any_cut(
    events: list[list[str]], noise: str, end: str, space: bool, cuts: list[int]
) -> None:
    colon = "data: " if space else "data:"
    # Without the optional space, a value's own first space would be taken for it.
    lines = [[line if space else line.lstrip(" ") for line in event] for event in events]
    text = "".join(
        (noise + end if noise else "") + "".join(colon + line + end for line in event) + end
        for event in lines
    )
    assert decode(*pieces_of(text.encode(), cuts)) == ["\n".join(event) for event in lines]


def test_an_empty_piece_between_the_halves_of_a_line_end() -> None:
    assert decode(b"data: a\r", b"", b"\ndata: b\r", b"", b"\n\r\n") == ["a\nb"]


def test_mixed_line_ends() -> None:
    assert decode(b"data: a\r\n\r", b"\ndata: b\r\rdata: c\n\n") == ["a", "b", "c"]


def test_a_character_split_between_pieces() -> None:
    euro = "data: 1 €\n\n".encode()
    assert decode(euro[:9], euro[9:10], euro[10:]) == ["1 €"]


def test_what_is_not_utf8_becomes_the_replacement_character() -> None:
    assert decode(b"data: a\xffb\n\n") == ["a\ufffdb"]


def test_a_byte_order_mark_is_skipped_once() -> None:
    assert decode(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n") == ["a"]


def test_an_event_that_nothing_ends_is_none() -> None:
    assert decode(b"data: whole\n\ndata: half\n") == ["whole"]


def test_a_field_without_data_makes_no_event() -> None:
    assert decode(b"event: ping\n\n: comment\n\n") == []


def test_a_data_line_without_a_colon_is_not_ours() -> None:
    assert decode(b"database: x\n\ndatax\n\n") == []


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 200, b"x" * 200, b"data: 1234567890\n" * 20])
def test_a_line_or_event_over_the_limit_is_refused(piece: bytes) -> None:
    with pytest.raises(ProtocolError, match="more than 100 bytes"):
        decode(piece, limit=100)


def test_the_limit_counts_across_pieces() -> None:
    with pytest.raises(ProtocolError):
        decode(*[b"x"] * 101, limit=100)


def test_many_small_events_have_no_limit_together() -> None:
    assert len(decode(b"data: 1234567890\n\n" * 100, limit=100)) == 100
