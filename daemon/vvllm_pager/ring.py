"""What device-driven steps leave for the host: a ring of entries in pinned memory, one for each layer and step.

*resolve* writes an entry from inside the decode graph; a thread that makes no CUDA call reads it. Each 32-bit word
carries, in its upper half, the lap of the ring in which it was written: an entry is whole when all its words are of
the lap that is due. So the kernel needs no fence across PCIe, which would cost a microsecond a layer. The counts in
an entry are totals since the engine started: a reader that the ring has overtaken loses router ids, never a count.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger

from vvllm_pager.courier import Courier
from vvllm_pager.device_table import COUNTS
from vvllm_pager.trace import StepTrace
from vvllm_shared.board import PHASES, Board
from vvllm_shared.residency.page_table import Ints

log = init_logger("vllm.vvllm_pager")

HEADER = 16
"""Words before the ids: layer, tokens, top_k, phase, then in three words of 16 bits each the step and `COUNTS`."""
ENTRIES = 4096
"""About 0.4 s of a 48-layer model at 200 tokens a second; the reader comes twenty times as often."""
IDS = 512
"""Most ids in an entry; a batch of more is counted and not traced."""
_LAPS = 32767
_PERIOD = 0.02
"""Seconds between two looks: a few tokens, and a hundredth of a core's time."""
_AT_ONCE = 512
"""Entries in one look."""


@dataclass(frozen=True)
class Entries:
    """What layers did in device-driven steps, in order; n of them."""

    layer: NDArray[np.int64]
    """[n]"""
    phase: NDArray[np.int64]
    """[n] index into `board.PHASES`."""
    step: NDArray[np.int64]
    """[n]"""
    totals: NDArray[np.int64]
    """[n, COUNTS] since the engine started, of that layer and phase."""
    ids: Sequence[Ints | None]
    """[n] of [tokens, top_k], -1 for nobody; None where the batch was too large to keep."""


class Ring:
    """The memory: pinned words on the host, and the number of entries ever written on the device."""

    def __init__(self, device: torch.device, entries: int = ENTRIES, ids: int = IDS) -> None:
        self.entries, self.ids = entries, ids
        self.words = torch.zeros(entries, HEADER + ids, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.head = torch.zeros(1, dtype=torch.int64, device=device)


class RingThread:
    """Reads a ring until it is told to stop, counts on the board, and traces.

    Args:
        ring: of this engine.
        bundle_bytes: of each layer.
        board: takes the counts.
    """

    def __init__(self, ring: Ring, bundle_bytes: Sequence[int], board: Board) -> None:
        self._reader = RingReader(ring.words.numpy())
        self._bundle_bytes = bundle_bytes
        self._board = board
        self._totals = np.zeros((len(bundle_bytes), len(PHASES), len(COUNTS)), np.int64)
        self.trace: StepTrace | None = None
        """Set once somebody wants traces."""
        self.courier: Courier | None = None
        """Set once there is one: what it brought is counted here too."""
        self._ring = ring  # the reader's array is a view of its memory
        self._over = threading.Event()
        threading.Thread(target=self._run, name="vvllm-ring", daemon=True).start()

    def stop(self) -> None:
        """The engine is gone, and nothing writes to the ring any more."""
        self._over.set()

    def _run(self) -> None:
        failed = False
        while not self._over.wait(_PERIOD):
            try:
                while (entries := self._reader.take()) is not None:
                    self._count(entries)
                    if self.trace is not None:
                        self._observe(self.trace, entries)
                if self.courier is not None:
                    self._count_courier(self.courier)
            except Exception:
                # The counters are the watchdog's measure: one bad look must not end them.
                if not failed:
                    log.exception("The ring of device-driven steps could not be read; there may be more")
                failed = True

    def _count(self, entries: Entries) -> None:
        keys = entries.layer, entries.phase
        new = self._totals.copy()
        new[keys] = entries.totals  # in order: the last entry of a layer and phase stays
        steps = np.zeros(new.shape[:2], np.int64)
        np.add.at(steps, keys, 1)
        gained = new - self._totals
        self._totals = new
        for layer, phase in np.argwhere(steps).tolist():
            hits, misses, waves = gained[layer, phase].tolist()
            self._board.count(
                layer,
                phase,
                hits=hits,
                misses=misses,
                nbytes=misses * self._bundle_bytes[layer],
                pair_waves=waves,
                steps=int(steps[layer, phase]),
            )

    def _count_courier(self, courier: Courier) -> None:
        self._board.set("brought_ahead", courier.brought)
        self._board.set("used_ahead", courier.used)
        if courier.error:
            log.warning("Bundles are not brought ahead any more: CUDA gave error %d", courier.error)
            self.courier = None

    @staticmethod
    def _observe(trace: StepTrace, entries: Entries) -> None:
        for layer, step, ids in zip(entries.layer.tolist(), entries.step.tolist(), entries.ids, strict=True):
            if ids is not None:
                trace.observe(step, layer, ids)


class RingReader:
    """Takes entries out of a ring, in order.

    Args:
        words: int32 [entries, HEADER + ids], which the kernel writes to.
    """

    def __init__(self, words: Ints) -> None:
        self._words = words
        self._next = 0
        self.lost = 0
        """Entries that were overwritten before they were read."""

    def take(self) -> Entries | None:
        """The entries that are whole by now, up to the end of the ring; None where there is none."""
        at = self._next % len(self._words)
        due = self._next // len(self._words) % _LAPS + 1
        headers = self._words[at : at + _AT_ONCE, :HEADER].copy()
        if headers[0, 0] >> 16 != due:
            self._catch_up(int(headers[0, 0]) >> 16, due)
            return None
        whole = _leading(np.all(headers >> 16 == due, axis=1))
        values = (headers[:whole] & 0xFFFF).astype(np.int64)
        ids: list[Ints | None] = []
        while len(ids) < whole:
            run = self._run_of_ids(at + len(ids), values[len(ids) :, 1:3], due)
            if not run:
                break
            ids += run
        values = values[: len(ids)]
        if not ids:
            return None
        self._next += len(ids)
        # Numbers of 48 bits from their pieces of 16, lowest first: the step, then the totals.
        low, middle, high = np.moveaxis(values[:, 4:].reshape(len(ids), 1 + len(COUNTS), 3), 2, 0)
        numbers = low + (middle << 16) + (high << 32)
        return Entries(values[:, 0], values[:, 3], numbers[:, 0], numbers[:, 1:], ids)

    def _run_of_ids(self, at: int, shapes: NDArray[np.int64], due: int) -> list[Ints | None]:
        """The ids of the entries from `at` on that are of one shape, as far as they are whole.

        Together, since an entry by itself costs 7 us, which the engine's own Python waits for.
        """
        tokens, top_k = shapes[0].tolist()
        count = _leading(np.all(shapes == shapes[0], axis=1))
        if tokens * top_k > self._words.shape[1] - HEADER:
            return [None] * count
        words = self._words[at : at + count, HEADER : HEADER + tokens * top_k].copy()
        whole = _leading(np.all(words >> 16 == due, axis=1))
        found = (words[:whole] & 0xFFFF).astype(np.int16).astype(np.int32)
        return list(found.reshape(whole, tokens, top_k))

    def _catch_up(self, seen: int, due: int) -> None:
        """Where the writer is more than a lap ahead, go on half a ring behind where it must be by now."""
        ahead = (seen - due) % _LAPS
        if 0 < ahead < _LAPS // 2:
            skipped = ahead * len(self._words) - len(self._words) // 2
            self._next += skipped
            self.lost += skipped


def _leading(flags: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return len(flags) if flags.all() else int(np.argmin(flags))
