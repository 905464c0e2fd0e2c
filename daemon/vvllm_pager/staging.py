"""Bringing bundles from host memory into slots beside the compute stream, by the copy engine.

The copy engine is fast with few large copies, and the slots of a bundle lie in several tensors. So records travel as
they lie in the host store into a ring of lanes in VRAM, and *fill* deals them out from there. Both have a stream of
their own: what waits for a slot to be read for the last time does not hold up the link. Lanes may also be filled before
it is certain that their records are wanted, by the layer before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vvllm_pager.fill_kernel import fill
from vvllm_pager.slot_pool import TILE_BYTES, SlotPool
from vvllm_shared.residency.page_table import Ints

_LANE_BYTES = 16 << 20
"""From here on the copy engine is at its full speed (54 GB/s on PCIe 5.0 x16; 1 MiB: 47)."""
_MOST_BYTES, _MOST_LANES = 96 << 20, 6
"""A wave of a 30B model's bundles in four bits with 32 slots, and what the link moves while attention runs and a batch
is planned; less than a slot of all its layers. Two lanes there are in any case."""
_DEALERS, _DEALER_WARPS = 64, 8


@dataclass(eq=False)
class _Piece:
    """Records that share a lane."""

    pool: SlotPool
    experts: list[int]
    wanted: int
    """Records that are still to be dealt out."""
    lane: _Lane | None = None
    """Once the copy is queued."""


@dataclass(eq=False)
class _Lane:
    memory: torch.Tensor
    """uint8, room for at least one record."""
    arrived: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event())  # noqa: PLW0108  # tests replace it
    released: torch.cuda.Event | None = None
    """When its last content had been dealt out or given up; None where it never had one."""


Place = tuple[_Piece, int]
"""Where a record is: its piece, and its number within it."""


class Staging:
    """One engine's lanes. Layers use them one after the other.

    Args:
        record_bytes: of the largest record.
        device: the GPU.
    """

    def __init__(self, record_bytes: int, device: torch.device) -> None:
        size = max(_LANE_BYTES, record_bytes)
        lanes = max(2, min(_MOST_LANES, _MOST_BYTES // size))
        self.nbytes = lanes * size
        """In VRAM."""
        self._idle = deque(_Lane(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(lanes))
        self._copies = torch.cuda.Stream(device)
        # An expert kernel takes all multiprocessors: what is small and waited for goes first.
        self._deals = torch.cuda.Stream(device, priority=-1)
        self._waiting: deque[_Piece] = deque()
        self._sent: deque[_Piece] = deque()
        # Numbers of records, and how many: *fill* reads them from memory.
        self._numbers = torch.arange(size // 256 + 1, dtype=torch.int32, device=device)

    def send(self, pool: SlotPool, experts: Ints) -> None:
        """Begin to bring records of a layer here, as lanes get free.

        Args:
            pool: the layer's.
            experts: ascending.
        """
        each = max(_LANE_BYTES // pool.layout.record_bytes, 1)
        for start in range(0, len(experts), each):
            piece = experts[start : start + each].tolist()
            self._waiting.append(_Piece(pool, piece, len(piece)))
        self._pump()

    def expect(self, pool: SlotPool, experts: Ints) -> list[Place]:
        """Where each of these records is or will be; what was sent for nothing makes room.

        Args:
            pool: the layer's.
            experts: ascending: what `deal` will be asked for, in this order.

        Returns:
            For each its piece and its number within it.
        """
        wanted = set(experts.tolist())
        here = [expert for piece in self._sent if piece.pool is pool for expert in piece.experts]
        rest = sorted(wanted.difference(here))
        # Lanes are given back in the order in which they were sent, so what is here must be wanted first.
        useful = not (rest and here) or here[-1] < rest[0]
        sent, self._sent = self._sent, deque()
        for piece in sent:
            assert piece.lane is not None  # noqa: S101  # it was sent
            piece.wanted = len(wanted.intersection(piece.experts)) if useful and piece.pool is pool else 0
            if piece.wanted:
                self._sent.append(piece)
            else:
                # A step that failed may have dealt out some of it.
                piece.lane.released = self._deals.record_event()
                self._idle.append(piece.lane)
        self._waiting.clear()
        self.send(pool, np.array(rest if useful else experts, np.int32))
        places = {
            expert: (piece, number)
            for piece in [*self._sent, *self._waiting]
            for number, expert in enumerate(piece.experts)
        }
        return [places[expert] for expert in experts.tolist()]

    def deal(
        self,
        places: Sequence[Place],
        numbers: torch.Tensor,
        slots: torch.Tensor,
        after: torch.cuda.Event,
    ) -> torch.cuda.Event:
        """Deal records out to slots.

        Args:
            places: of `expect`, the next ones.
            numbers, slots: int32 on the device, for each its number within the piece and its slot.
            after: an event after which the slots may be overwritten.

        Returns:
            An event after which they are filled.
        """
        self._deals.wait_event(after)
        start = 0
        while start < len(places):
            piece = places[start][0]
            end = start + 1
            while end < len(places) and places[end][0] is piece:
                end += 1
            self._deal_piece(piece, numbers[start:end], slots[start:end])
            start = end
        return self._deals.record_event()

    def _deal_piece(self, piece: _Piece, numbers: torch.Tensor, slots: torch.Tensor) -> None:
        lane, pool, count = piece.lane, piece.pool, len(slots)
        assert lane is not None  # noqa: S101  # pieces before it have given their lanes back
        words = pool.layout.record_bytes // 8
        with torch.cuda.stream(self._deals):
            self._deals.wait_event(lane.arrived)
            fill[(_DEALERS,)](
                lane.memory.view(torch.int64),
                words,
                pool.tiles,
                len(pool.tiles),
                numbers,
                slots,
                self._numbers[count:],
                TILE=TILE_BYTES // 8,
                EARLY=False,
                num_warps=_DEALER_WARPS,
            )
        piece.wanted -= count
        if not piece.wanted:
            lane.released = self._deals.record_event()
            self._sent.remove(piece)
            self._idle.append(lane)
            self._pump()

    def _pump(self) -> None:
        while self._waiting and self._idle:
            piece, lane = self._waiting.popleft(), self._idle.popleft()
            piece.lane = lane
            nbytes = piece.pool.layout.record_bytes
            if lane.released is not None:
                self._copies.wait_event(lane.released)
            with torch.cuda.stream(self._copies):
                at = 0
                for first, count in _runs(piece.experts):
                    room = lane.memory[at : at + count * nbytes].view(count, nbytes)
                    room.copy_(piece.pool.store[first : first + count], non_blocking=True)
                    at += count * nbytes
                self._copies.record_event(lane.arrived)
            self._sent.append(piece)


def _runs(experts: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, how many in a row)."""
    runs: list[tuple[int, int]] = []
    for expert in experts:
        if runs and sum(runs[-1]) == expert:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((expert, 1))
    return runs
