"""From the ring in pinned memory to the board and to the policy process's traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vvllm_pager.ring import HEADER, Ring, RingReader, RingThread
from vvllm_pager.trace import StepTrace
from vvllm_shared.board import Board

LAYERS, ENTRIES, IDS = 3, 16, 8


class Taker:
    """In place of a sender."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[list[list[int]]]]] = []

    def offer(self, step: int, layers: list[np.ndarray]) -> None:
        self.steps.append((step, [ids.tolist() for ids in layers]))


class Writer:
    """Writes entries as *resolve* does."""

    def __init__(self, ring: Ring) -> None:
        self.words, self.number = ring.words.numpy(), 0

    def __call__(
        self, layer: int, step: int, totals: tuple[int, int, int], ids: list[list[int]], phase: int = 0
    ) -> None:
        flat = np.array(ids).reshape(-1) & 0xFFFF
        pieces = [(value >> shift) & 0xFFFF for value in (step, *totals) for shift in (0, 16, 32)]
        kept = flat if len(flat) <= IDS else flat[:0]
        words = np.array([layer, len(ids), len(ids[0]), phase, *pieces, *kept], np.int32)
        at, lap = self.number % ENTRIES, self.number // ENTRIES % 32767 + 1
        self.words[at, : len(words)] = words | lap << 16
        self.number += 1

    def torn(self, missing: int, ids: list[list[int]]) -> None:
        """The next entry, of which one word is not there yet."""
        number, before = self.number, self.words[self.number % ENTRIES].copy()
        self(0, 0, (0, 0, 0), ids)
        pairs = len(ids) * len(ids[0])
        at = missing % (HEADER + (pairs if pairs <= IDS else 0))
        self.number, self.words[number % ENTRIES, at] = number, before[at]


def wait_for(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def ring() -> Ring:
    return Ring(torch.device("cpu"), ENTRIES, IDS)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    monkeypatch.delenv("VVLLM_BOARD", raising=False)
    return Board.from_env()


@pytest.fixture
def thread(ring: Ring, board: Board) -> Iterator[RingThread]:
    thread = RingThread(ring, [100, 10, 1], board)
    yield thread
    thread.stop()


def test_counts_reach_the_board_by_layer_and_phase(thread: RingThread, ring: Ring, board: Board) -> None:
    write = Writer(ring)
    for step in range(1, 40):  # more than two laps, and never more than the ring holds at a time
        for layer in range(LAYERS):
            write(layer, step, (step * 3, step, 0), [[1, 2]])
        wait_for(lambda: board.get("progress") == write.number)
    write(1, 40, (1 << 40, 7, 2), [[3, 4]], phase=1)
    wait_for(lambda: board.get("progress") == write.number)
    assert board.layers(LAYERS)["decode"] == [[117, 39, 3900, 0], [117, 39, 390, 0], [117, 39, 39, 0]]
    assert board.layers(LAYERS)["prefill"][1] == [1 << 40, 7, 70, 2]
    assert (board.get("steps"), board.get("misses")) == (39, 3 * 39 + 7)


def test_whole_steps_are_traced(thread: RingThread, ring: Ring, board: Board) -> None:
    taker = Taker()
    thread.trace = StepTrace(taker, LAYERS)  # type: ignore[arg-type]
    write = Writer(ring)
    for layer in range(LAYERS):
        write(layer, 1, (0, 2, 0), [[layer, -1]])
    wait_for(lambda: len(taker.steps) == 1)
    assert taker.steps == [(1, [[[0, -1]], [[1, -1]], [[2, -1]]])]


def test_a_step_that_lost_layers_is_not_traced_and_touches_no_other() -> None:
    taker = Taker()
    trace = StepTrace(taker, LAYERS)  # type: ignore[arg-type]
    ids = np.zeros((1, 2), np.int32)
    for step, layers in ((1, (0, 1, 2)), (2, (0, 1)), (3, (2,)), (4, (1, 2)), (5, (0, 2)), (6, (0, 1, 2, 2))):
        for layer in layers:
            trace.observe(step, layer, ids)
    for layer in (0, 1):
        trace.observe(7, layer, ids)
    trace.observe(8, 2, ids)
    assert [(step, len(layers)) for step, layers in taker.steps] == [(1, 3), (6, 3)]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.none() | st.integers(0, HEADER + IDS)
        ),
        max_size=60,
    )
)
def test_a_reader_gets_every_whole_entry_once_and_in_order(
    written: list[tuple[int, int, int, int | None]],
) -> None:
    """Of any shape, also one that is too large to keep; after any number of looks; and however one is torn."""
    ring = Ring(torch.device("cpu"), ENTRIES, IDS)
    write, reader = Writer(ring), RingReader(ring.words.numpy())
    found: list[tuple[int, list[list[int]] | None]] = []

    def look() -> None:
        while (entries := reader.take()) is not None:
            kept = [None if ids is None else ids.tolist() for ids in entries.ids]
            found.extend(zip(entries.step.tolist(), kept, strict=True))

    expected: list[tuple[int, list[list[int]] | None]] = []
    for step, (tokens, top_k, pause, missing) in enumerate(written):
        ids = [[(step + token + k) % 999 - 1 for k in range(top_k)] for token in range(tokens)]
        if missing is not None:
            write.torn(missing, ids)
            look()
            assert found == expected
        write(0, step, (0, 0, 0), ids)
        expected.append((step, ids if tokens * top_k <= IDS else None))
        if not pause or step % ENTRIES == ENTRIES - 1:
            look()
            assert found == expected
    look()
    assert found == expected
    assert reader.lost == 0
