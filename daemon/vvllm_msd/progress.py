"""How far the engine's load is, read off the board, and shown: a bar on a terminal, log events otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from vvllm_msd.status import Stage
from vvllm_shared.board import Phase
from vvllm_shared.limits import GIB, MIB

_LOG_SECONDS = 5.0
_BAR_CELLS = 30


@dataclass(frozen=True)
class Progress:
    """The load at one moment; `fraction` is 0 to 1 within `stage`, None where nothing can be counted."""

    stage: Stage
    fraction: float | None = None
    detail: str = ""


def read_progress(counters: Mapping[str, int]) -> Progress:
    """The load's progress, from the counters of the board."""
    phase = counters["phase"]
    if phase == Phase.LOADING:
        done, total = counters["bytes_done"], counters["bytes_total"]
        return Progress(Stage.LOADING, _fraction(done, total), f"{_size(done)} of {_size(total)} of experts")
    if phase == Phase.PROCESSING:
        done, total = counters["layers_done"], counters["layers_total"]
        return Progress(Stage.PROCESSING, _fraction(done, total), f"{done} of {total} layers")
    if phase == Phase.STARTING:
        return Progress(Stage.STARTING, detail="importing vLLM and starting its processes")
    return Progress(Stage.WARMING, detail="profiling, compiling kernels, making the KV cache")


def _fraction(done: int, total: int) -> float | None:
    return min(1.0, done / total) if total else None


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


class LoadDisplay:
    """Shows the load's progress to whoever reads stderr.

    Args:
        log: gets an `engine_loading` event with each new stage and every few seconds of progress, unless a person
            watches.
        out: a terminal there gets one line, redrawn in place.
    """

    def __init__(self, log: Any, out: TextIO = sys.stderr) -> None:
        self._log = log
        self._out = out
        self._terminal = out.isatty()
        self._logged: Progress | None = None
        self._logged_at = 0.0

    def show(self, progress: Progress) -> None:
        """Draw or log `progress`."""
        if self._terminal:
            self._out.write(f"\r\x1b[K{bar(progress)}")
            self._out.flush()
            return
        now = time.monotonic()
        new_stage = self._logged is None or progress.stage != self._logged.stage
        if new_stage or (progress != self._logged and now - self._logged_at >= _LOG_SECONDS):
            self._logged, self._logged_at = progress, now
            self._log.info(
                "engine_loading",
                stage=progress.stage,
                progress=progress.fraction and round(progress.fraction, 3),
                detail=progress.detail,
            )

    def clear(self) -> None:
        """Remove the bar."""
        if self._terminal:
            self._out.write("\r\x1b[K")
            self._out.flush()


def bar(progress: Progress) -> str:
    """One line for a terminal."""
    if progress.fraction is None:
        return f"{progress.stage}: {progress.detail}"
    full = round(progress.fraction * _BAR_CELLS)
    cells = "#" * full + "." * (_BAR_CELLS - full)
    return f"{progress.stage} [{cells}] {progress.fraction:4.0%} {progress.detail}"
