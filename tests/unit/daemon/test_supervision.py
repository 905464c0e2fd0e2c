"""The watchdog's judgement and how the load's progress is read and shown."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vvllm_msd.progress import LoadDisplay, Progress, bar, read_progress
from vvllm_msd.status import Stage
from vvllm_msd.watchdog import FIRST_STEPS, Watchdog
from vvllm_shared.board import Board, Phase
from vvllm_shared.limits import GIB

BEFORE = 7
"""Steps of profiling, before the engine served."""
SERVED = BEFORE + FIRST_STEPS
"""Steps of an engine that has compiled its kernels."""


def test_an_engine_that_stands_still_with_work_is_caught() -> None:
    watchdog = Watchdog(10, BEFORE)
    assert not watchdog.late(100, progress=5, steps=SERVED, busy=True, compiling=False)
    assert not watchdog.late(109, progress=5, steps=SERVED, busy=True, compiling=False)
    assert watchdog.late(110, progress=5, steps=SERVED, busy=True, compiling=False) == 10


def test_the_first_steps_may_take_longer_and_no_later_one() -> None:
    watchdog = Watchdog(10, BEFORE)
    assert not watchdog.late(0, progress=5, steps=BEFORE, busy=True, compiling=False)
    assert not watchdog.late(99, progress=5, steps=BEFORE, busy=True, compiling=False)
    assert watchdog.late(100, progress=5, steps=BEFORE, busy=True, compiling=False) == 100
    assert not watchdog.late(200, progress=6, steps=SERVED - 1, busy=True, compiling=False)
    assert not watchdog.late(299, progress=6, steps=SERVED - 1, busy=True, compiling=False)
    assert watchdog.late(299, progress=6, steps=SERVED, busy=True, compiling=False) == 10


def test_a_kernel_that_compiles_late_has_the_time_of_an_early_one() -> None:
    watchdog = Watchdog(10, BEFORE)
    assert not watchdog.late(0, progress=5, steps=SERVED, busy=True, compiling=False)
    assert not watchdog.late(9, progress=6, steps=SERVED, busy=True, compiling=True)
    assert not watchdog.late(108, progress=6, steps=SERVED, busy=True, compiling=True)
    # The next one has its own time, and so has the step once none compiles.
    assert not watchdog.late(109, progress=8, steps=SERVED, busy=True, compiling=True)
    assert watchdog.late(209, progress=8, steps=SERVED, busy=True, compiling=True) == 100
    assert not watchdog.late(210, progress=9, steps=SERVED, busy=True, compiling=False)
    assert watchdog.late(220, progress=9, steps=SERVED, busy=True, compiling=False) == 10


def test_idle_time_does_not_count() -> None:
    watchdog = Watchdog(10, BEFORE)
    assert not watchdog.late(0, progress=5, steps=SERVED, busy=False, compiling=False)
    assert not watchdog.late(1000, progress=5, steps=SERVED, busy=False, compiling=False)
    assert not watchdog.late(1001, progress=5, steps=SERVED, busy=True, compiling=False)
    assert watchdog.late(1010, progress=5, steps=SERVED, busy=True, compiling=False)


@pytest.mark.parametrize("steps", [BEFORE, SERVED])
def test_a_limit_of_zero_is_never_reached(steps: int) -> None:
    watchdog = Watchdog(0, BEFORE)
    watchdog.late(0, progress=1, steps=steps, busy=True, compiling=False)
    assert not watchdog.late(1e9, progress=1, steps=steps, busy=True, compiling=False)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2), st.booleans()), max_size=60))
def test_it_is_late_exactly_after_busy_time_without_progress(looks: list[tuple[float, int, bool]]) -> None:
    watchdog, now, progress, since = Watchdog(10, BEFORE), 0.0, 0, 0.0
    watchdog.late(now, progress, SERVED, busy=False, compiling=False)
    for elapsed, moved, busy in looks:
        now, progress = now + elapsed, progress + moved
        if moved or not busy:
            since = now
        assert bool(watchdog.late(now, progress, SERVED, busy, compiling=False)) == (now - since >= 10)


def counters(**values: int) -> dict[str, int]:
    board, fd = Board.create()
    for name, value in values.items():
        board.set(name, value)
    os.close(fd)
    return board.read()


@pytest.mark.parametrize(
    ("values", "stage", "fraction"),
    [
        ({"phase": Phase.STARTING}, Stage.STARTING, None),
        ({"phase": Phase.LOADING, "bytes_done": GIB, "bytes_total": 4 * GIB}, Stage.LOADING, 0.25),
        ({"phase": Phase.LOADING}, Stage.LOADING, None),
        ({"phase": Phase.LOADING, "bytes_done": 5, "bytes_total": 4}, Stage.LOADING, 1.0),
        ({"phase": Phase.PROCESSING, "layers_done": 1, "layers_total": 2}, Stage.PROCESSING, 0.5),
        ({"phase": Phase.WARMING}, Stage.WARMING, None),
    ],
)
def test_the_board_s_counters_become_a_stage_and_a_fraction(
    values: dict[str, int], stage: Stage, fraction: float | None
) -> None:
    progress = read_progress(counters(**values))
    assert (progress.stage, progress.fraction) == (stage, fraction)


def test_the_bar_shows_stage_share_and_size() -> None:
    values = counters(phase=Phase.LOADING, bytes_done=GIB, bytes_total=4 * GIB)
    assert (
        bar(read_progress(values))
        == "loading [########......................]  25% 1.0 GiB of 4.0 GiB of experts"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Log:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def info(self, _event: str, **fields: Any) -> None:
        self.events.append(fields)


def test_a_terminal_gets_a_bar_and_no_events() -> None:
    log, terminal = Log(), Terminal()
    display = LoadDisplay(log, terminal)
    display.show(Progress(Stage.LOADING, 0.5))
    display.clear()
    assert "50%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert log.events == []


def test_a_log_gets_one_event_a_stage_and_no_bar() -> None:
    log, file = Log(), io.StringIO()
    display = LoadDisplay(log, file)
    for fraction in (0.1, 0.2, 0.3):
        display.show(Progress(Stage.LOADING, fraction))
    display.show(Progress(Stage.WARMING))
    assert [event["stage"] for event in log.events] == [Stage.LOADING, Stage.WARMING]
    assert file.getvalue() == ""
