"""The counters in shared memory, and the refusal that travels beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vvllm_shared import board, is_pinned
from vvllm_shared.board import Board
from vvllm_shared.errors import ConfigError, UnsupportedError


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Board, Board]]:
    """The daemon's view and the engine's, which finds it by the environment."""
    mine, fd = Board.create()
    monkeypatch.setenv(board.ENV, f"/proc/{os.getpid()}/fd/{fd}")
    yield mine, Board.from_env()
    os.close(fd)


def test_what_one_writes_the_other_reads(pair: tuple[Board, Board]) -> None:
    daemon, engine = pair
    engine.add("hits", 3)
    engine.add("hits")
    engine.set("phase", board.Phase.SERVING)
    assert (daemon.get("hits"), daemon.get("phase")) == (4, board.Phase.SERVING)
    daemon.clear()
    assert not any(engine.read().values())


def test_without_a_daemon_the_board_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(board.ENV, raising=False)
    one, other = Board.from_env(), Board.from_env()
    one.add("misses")
    assert other.get("misses") == 0


def test_a_refusal_arrives_as_it_was(pair: tuple[Board, Board]) -> None:
    daemon, engine = pair
    assert daemon.refusal() is None
    engine.refuse(UnsupportedError("Layer 3: größer.", "Do this."))
    told = daemon.refusal()
    assert type(told) is UnsupportedError
    assert (told.sentence, told.hint) == ("Layer 3: größer.", "Do this.")
    daemon.clear()
    assert daemon.refusal() is None


@given(st.text(max_size=4000), st.text(max_size=4000))
def test_a_refusal_of_any_length_fits(sentence: str, hint: str) -> None:
    shared, fd = Board.create()
    os.close(fd)
    shared.add("hits", 7)
    shared.refuse(ConfigError(sentence, hint))
    told = shared.refusal()
    assert told is not None
    assert sentence.startswith(told.sentence)
    assert hint.startswith(told.hint)
    assert shared.get("hits") == 7


def test_a_local_build_of_the_pinned_release_is_it() -> None:
    assert is_pinned("0.32.0")
    assert is_pinned("0.32.0+cu130")
    assert not is_pinned("0.32.01")
    assert not is_pinned("0.33.0")
