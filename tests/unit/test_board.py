"""The counters in shared memory, and the refusal that travels beside them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vvllm_shared import board, is_pinned, limits
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


def test_what_a_layer_does_counts_for_it_and_for_all(pair: tuple[Board, Board]) -> None:
    daemon, engine = pair
    decode, prefill = (board.PHASES.index(phase) for phase in ("decode", "prefill"))
    engine.count(0, decode, hits=3, misses=1, nbytes=100)
    engine.count(0, decode, hits=1, misses=2, nbytes=200, token_waves=1, steps=2)
    engine.count(0, prefill, hits=0, misses=8, nbytes=800, pair_waves=3)
    engine.count(2, prefill, hits=5, misses=0, nbytes=0)
    assert daemon.layers(3) == {
        "decode": [[4, 3, 300, 1], [0, 0, 0, 0], [0, 0, 0, 0]],
        "prefill": [[0, 8, 800, 3], [0, 0, 0, 0], [5, 0, 0, 0]],
    }
    assert daemon.layers(1) == {"decode": [[4, 3, 300, 1]], "prefill": [[0, 8, 800, 3]]}
    counted = daemon.read()
    assert {name: counted[name] for name in ("hits", "misses", "bytes_paged")} == {
        "hits": 9,
        "misses": 11,
        "bytes_paged": 1100,
    }
    assert (counted["token_waves"], counted["pair_waves"]) == (1, 3)
    # A step of the model is one of its first layer; progress is every layer's.
    assert (counted["steps"], counted["progress"]) == (4, 5)
    daemon.clear()
    assert daemon.layers(3) == {phase: [[0, 0, 0, 0]] * 3 for phase in board.PHASES}


def test_the_last_layer_has_room_and_the_refusal_keeps_its_own(pair: tuple[Board, Board]) -> None:
    daemon, engine = pair
    engine.refuse(ConfigError("x" * 5000, "y"))
    told = daemon.refusal()
    engine.count(limits.LAYERS - 1, len(board.PHASES) - 1, hits=1, misses=2, nbytes=3, pair_waves=4)
    engine.count(0, 0, hits=1, misses=1, nbytes=1)
    assert daemon.layers(limits.LAYERS)[board.PHASES[-1]][-1] == [1, 2, 3, 4]
    again = daemon.refusal()
    assert told is not None
    assert again is not None
    assert again.sentence == told.sentence


def test_threads_of_a_process_count_together(pair: tuple[Board, Board]) -> None:
    daemon, engine = pair

    def count(phase: int) -> None:
        for _ in range(2000):
            engine.count(0, phase, hits=1, misses=1, nbytes=1)

    threads = [threading.Thread(target=count, args=(phase,)) for phase in range(len(board.PHASES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (daemon.get("hits"), daemon.get("steps")) == (4000, 4000)
    assert daemon.layers(1) == {phase: [[2000, 2000, 2000, 0]] for phase in board.PHASES}


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
