"""CUDA streams and events on a CPU: everything runs at once, and every access is held against what is ordered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

Clock = dict["_Stream", int]


class _Event:
    clock: Clock

    def __init__(self) -> None:
        self.clock = {}


class _Stream:
    """Knows of each stream how much of it has ended before what comes next here."""

    def __init__(self, watch: Streams) -> None:
        self._watch = watch
        self.clock: Clock = {self: 0}

    def wait_event(self, event: _Event) -> None:
        for stream, tick in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), tick)

    def synchronize(self) -> None:
        """The host waits: everything has run."""

    def record_event(self, event: _Event | None = None) -> _Event:
        if event is not None:
            # Only a lane has an event of its own: something was copied into it.
            self._watch.access("write", self._watch.memory_of[id(event)], self)
        made = event or _Event()
        made.clock = dict(self.clock)
        return made


class Streams:
    """Puts itself in the place of torch's streams and watches slots and lanes.

    Args:
        staging: the module `vvllm_pager.staging`, whose *fill* is watched.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, staging: ModuleType) -> None:
        self._main = self._current = _Stream(self)
        self._accesses: dict[int, list[tuple[str, _Stream, int]]] = {}
        self.memory_of: dict[int, int] = {}
        """A lane's memory, by its event."""
        self.lane_bytes = 0
        self.overlapped = False
        """Whether anything was ever written beside the compute stream while it had not read everything yet."""
        for name, made in (
            ("Stream", lambda device, priority=0: _Stream(self)),
            ("Event", _Event),
            ("stream", self._within),
            ("current_stream", lambda device=None: self._current),
        ):
            monkeypatch.setattr(torch.cuda, name, made)
        watch, lane, fill = self, staging._Lane, staging.fill

        class Lane(lane):  # type: ignore[valid-type, misc]
            def __init__(self, memory: torch.Tensor, at: int) -> None:
                super().__init__(memory, at)
                watch.lane_bytes = len(memory)
                watch.memory_of[id(self.arrived)] = self.memory.data_ptr()

        class Fill:
            def __getitem__(self, grid: tuple[int]) -> Any:
                def launch(source: Any, words: int, tiles: Any, count: int, numbers: Any, slots: Any, *rest: Any, **named: Any) -> None:  # fmt: skip  # noqa: E501
                    for lane in {place * staging._UNIT // watch.lane_bytes for place in numbers.tolist()}:
                        watch.access("read", source.data_ptr() + lane * watch.lane_bytes)
                    for slot in slots.tolist():
                        watch.access("write", int(tiles[0][0]) + slot * int(tiles[0][1]))
                    fill[grid](source, words, tiles, count, numbers, slots, *rest, **named)

                return launch

        monkeypatch.setattr(staging, "_Lane", Lane)
        monkeypatch.setattr(staging, "fill", Fill())

    def access(self, kind: str, memory: int, stream: _Stream | None = None) -> None:
        """Something on a stream, by default the current one, reads or writes; what conflicts must have ended."""
        mine = stream or self._current
        mine.clock[mine] += 1
        for other, theirs, tick in self._accesses.setdefault(memory, []):
            if "write" in {kind, other}:
                assert mine.clock.get(theirs, 0) >= tick, f"a {kind} beside an earlier {other}"
        self._accesses[memory].append((kind, mine, mine.clock[mine]))
        main = self._main
        if mine is not main and kind == "write" and mine.clock.get(main, 0) < main.clock[main]:
            self.overlapped = True

    @contextmanager
    def _within(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before
