"""Counters in shared memory: the pager writes them, the daemon reads them, and no token waits for either.

The daemon makes a memfd and names it to the engine in `$VVLLM_BOARD` (as `/proc/<daemon>/fd/<n>`); the engine's
worker maps it. One writing process per field and 8-byte aligned stores, so a reader sees each counter whole; two
counters may be one step apart.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from enum import IntEnum

from vvllm_shared import errors, limits
from vvllm_shared.errors import VvllmError

ENV = "VVLLM_BOARD"
_REFUSAL_AT = 2048
"""The second half of the first page holds why the engine refused to start, as JSON that ends with a NUL."""
_LAYERS_AT = 4096
"""Behind it, for each layer and phase, `LAYER_COUNTS` as words of 8 bytes."""
PHASES = ("decode", "prefill")
"""Of a step: each request has one token (or its drafts), or some have many."""
LAYER_COUNTS = ("hits", "misses", "bytes_paged", "waves")
_LAYER_WORDS = len(PHASES) * len(LAYER_COUNTS)
_BYTES = _LAYERS_AT + 8 * _LAYER_WORDS * limits.LAYERS


class Phase(IntEnum):
    """What the engine is doing, as far as the pager can tell."""

    STARTING = 0
    LOADING = 1
    """Expert tensors arrive from the checkpoint: `bytes_done` of `bytes_total`."""
    PROCESSING = 2
    """Layers become bundles in the host store: `layers_done` of `layers_total`."""
    WARMING = 3
    """Profiling, kernel compilation, KV cache: nothing counts, and a compile may take minutes."""
    SERVING = 4


FIELDS = (
    "phase",
    "progress",  # grows with every layer that is loaded or run, every compile begun or ended: the watchdog's measure
    "compiling",  # kernels that Triton compiles right now; a host-driven layer that has run clears it
    "bytes_done",
    "bytes_total",
    "layers_done",
    "layers_total",
    "steps",  # forward passes of the whole model
    "hits",  # distinct experts of a layer's batch that were in a slot; one that needs nearly all is taken to need all
    "misses",  # … that had to be paged in; a token wave's second load of an expert counts again
    "bytes_paged",
    "brought_ahead",  # bundles that a guess asked for; those not used crossed the link beside bytes_paged
    "used_ahead",  # … and that were misses when their layer came
    "token_waves",  # kernel calls beyond a layer's first
    "pair_waves",
    "traces_sent",
    "traces_dropped",
    "advice_applied",
)


class Board:
    """The counters of one engine, mapped into this process.

    Args:
        fd: descriptor of the memfd; the board keeps its own duplicate of the mapping, not of the descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._adding = threading.Lock()

    @classmethod
    def create(cls) -> tuple[Board, int]:
        """A new board and its descriptor, which the caller keeps open for the engine to find."""
        fd = os.memfd_create("vvllm-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTES)
        return cls(fd), fd

    @classmethod
    def from_env(cls) -> Board:
        """The board that the daemon named; without a daemon a private one, so that nobody need ask."""
        path = os.environ.get(ENV)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if path else cls.create()[1]
        try:
            return cls(fd)
        finally:
            os.close(fd)

    def get(self, field: str) -> int:
        """One counter."""
        return self._words[FIELDS.index(field)]

    def set(self, field: str, value: int) -> None:
        """Overwrite one counter."""
        self._words[FIELDS.index(field)] = value

    def add(self, field: str, value: int = 1) -> None:
        """Increase one counter. Threads of a process may meet here, processes may not."""
        with self._adding:
            self._words[FIELDS.index(field)] += value

    def count(
        self,
        layer: int,
        phase: int,
        *,
        hits: int,
        misses: int,
        nbytes: int,
        token_waves: int = 0,
        pair_waves: int = 0,
        steps: int = 1,
    ) -> None:
        """Add what one layer did, to the layer's counters and to those of all.

        Args:
            layer: its index.
            phase: index into `PHASES`.
            nbytes: bytes paged in.
            steps: how many steps of the layer all this was.
        """
        at = _LAYERS_AT // 8 + layer * _LAYER_WORDS + phase * len(LAYER_COUNTS)
        with self._adding:
            for i, value in enumerate((hits, misses, nbytes, token_waves + pair_waves)):
                self._words[at + i] += value
        totals = {"hits": hits, "misses": misses, "bytes_paged": nbytes}
        waves = {"token_waves": token_waves, "pair_waves": pair_waves}
        for field, value in (
            totals | waves | {"steps": steps if layer == 0 else 0, "progress": steps}
        ).items():
            self.add(field, value)

    def layers(self, count: int) -> dict[str, list[list[int]]]:
        """For each phase the counters of the first `count` layers, in the order of `LAYER_COUNTS`."""
        words = self._words[_LAYERS_AT // 8 :].tolist()
        size = len(LAYER_COUNTS)
        return {
            phase: [
                words[start : start + size]
                for start in range(i * size, i * size + count * _LAYER_WORDS, _LAYER_WORDS)
            ]
            for i, phase in enumerate(PHASES)
        }

    def read(self) -> dict[str, int]:
        """All counters by name."""
        return dict(zip(FIELDS, self._words, strict=False))

    def clear(self) -> None:
        """Back to zero, for the next engine."""
        self._map[:] = bytes(_BYTES)

    def refuse(self, error: VvllmError) -> None:
        """Tell the daemon why this engine cannot start; vLLM itself would only say that it did not."""
        room = _LAYERS_AT - _REFUSAL_AT - 1
        sentence, hint = error.sentence, error.hint
        while len(text := json.dumps([type(error).__name__, sentence, hint]).encode()) > room:
            sentence, hint = sentence[: len(sentence) * 3 // 4], hint[: len(hint) * 3 // 4]
        self._map[_REFUSAL_AT : _REFUSAL_AT + len(text) + 1] = text + b"\0"

    def refusal(self) -> VvllmError | None:
        """Why the engine refused to start, or None."""
        text = self._map[_REFUSAL_AT:_LAYERS_AT].split(b"\0", 1)[0]
        if not text:
            return None
        name, sentence, hint = json.loads(text)
        error: VvllmError = getattr(errors, name)(sentence, hint)
        return error
