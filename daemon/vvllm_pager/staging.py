"""Bringing bundles from host memory into slots beside the compute stream, by the copy engine.

The copy engine is fast with few large copies, and the slots of a bundle lie in several tensors. So records travel as
they lie in the host store into a ring of lanes in VRAM, and *fill* deals them out from there. Both have a stream of
their own: what waits for a slot to be read for the last time does not hold up the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vvllm_pager.device_table import DeviceTable
from vvllm_pager.driver import copy_to_device
from vvllm_pager.fill_kernel import fill
from vvllm_pager.slot_pool import TILE_BYTES, SlotPool
from vvllm_shared.residency.page_table import Ints

_LANE_BYTES = 16 << 20
"""From here on the copy engine is at its full speed (54 GB/s on PCIe 5.0 x16; 1 MiB: 47)."""
_LEAST_BYTES, _MOST_BYTES, _TOKEN_BYTES = 96 << 20, 192 << 20, 24 << 10
"""Of all lanes: a wave of a 30B model's bundles in four bits with 32 slots, or what the link moves while the rest of a
layer runs, which takes its time with the tokens of a step. On an H200 that is 3 ms for 8,192 of them: 192 MiB, as much
as two slots of all layers, where the activations of such a step take fifteen. Two lanes there are in any case."""
_DEALERS, _DEALER_WARPS = 64, 8
_UNIT = 256
"""Bytes in which a record's place is counted; records are whole multiples (`bundle.py`)."""


@dataclass(eq=False)
class _Lane:
    memory: torch.Tensor
    """uint8, room for at least one record: a part of all lanes' memory."""
    at: int
    """Where it begins there."""
    arrived: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event())  # noqa: PLW0108  # tests replace it
    released: torch.cuda.Event | None = None
    """When its last content had been dealt out or given up; None where it never had one."""
    taken: bool = False


@dataclass(eq=False)
class Piece:
    """Records that share a lane."""

    pool: SlotPool
    experts: list[int]
    lane: _Lane
    """Its turn may be yet to come."""
    wanted: int
    """Records that are still to be dealt out."""
    sent: bool = False
    """Whether the copies are queued."""


class Staging:
    """One engine's lanes. Layers use them one after the other, and pieces use the lanes in turn.

    Args:
        record_bytes: of the largest record.
        tokens: of a step, at most.
        device: the GPU.
    """

    def __init__(self, record_bytes: int, tokens: int, device: torch.device) -> None:
        size = max(_LANE_BYTES, record_bytes)
        count = max(2, min(max(tokens * _TOKEN_BYTES, _LEAST_BYTES), _MOST_BYTES) // size)
        self.nbytes = count * size
        """In VRAM."""
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._lanes = [_Lane(self._memory[at : at + size], at) for at in range(0, self.nbytes, size)]
        self._turn = 0
        """Of the lanes, for the next piece that is made."""
        self._copies = torch.cuda.Stream(device)
        # An expert kernel takes all multiprocessors: what is small and waited for goes first.
        self._deals = torch.cuda.Stream(device, priority=-1)
        self._waiting: deque[Piece] = deque()
        self._sent: deque[Piece] = deque()
        # How many: *fill* reads it from memory.
        self._counts = torch.arange(self.nbytes // _UNIT + 1, dtype=torch.int32, device=device)

    def bring(self, pool: SlotPool, experts: Ints) -> tuple[list[Piece], Ints]:
        """Promise records of a layer, which come with the next `upload` and as lanes get free.

        Args:
            pool: the layer's.
            experts: what `deal` will be asked for, in this order.

        Returns:
            For each its piece, and its place in the lanes.
        """
        for piece in self._sent:
            self._release(piece.lane)  # of a step that failed
        self._sent.clear()
        self._waiting.clear()
        nbytes = pool.layout.record_bytes
        each = max(_LANE_BYTES // nbytes, 1)
        pieces: list[Piece] = []
        for start in range(0, len(experts), each):
            mine = experts[start : start + each].tolist()
            piece = Piece(pool, mine, self._lanes[self._turn], len(mine))
            self._turn = (self._turn + 1) % len(self._lanes)
            self._waiting.append(piece)
            pieces += [piece] * len(mine)
        numbers = np.arange(len(experts), dtype=np.int32) % each
        begins = np.array([piece.lane.at for piece in pieces], np.int64)
        return pieces, ((begins + numbers * np.int64(nbytes)) // _UNIT).astype(np.int32)

    def upload(self, arrays: Sequence[Ints], table: DeviceTable) -> list[torch.Tensor]:
        """Bring a few numbers to the device, a layer's table with them, and start what `bring` has promised.

        They travel before those records on the same stream: the copy engine takes what is queued in turn, and on
        another stream they would wait for all bundles that are under way.

        Args:
            arrays: int32. table: nothing on the device uses it at the time.

        Returns:
            Of each array its copy, for the current stream, which waits for it.
        """
        device, stream = self._memory.device, torch.cuda.current_stream(self._memory.device)
        lengths = [len(array) for array in arrays]
        pinned = torch.empty(sum(lengths), dtype=torch.int32, pin_memory=device.type == "cuda")
        np.concatenate(arrays, out=pinned.numpy())
        with torch.cuda.stream(self._copies):
            words = pinned.to(device, non_blocking=True)
            table.write()
            arrived = self._copies.record_event()
        stream.wait_event(arrived)
        if words.is_cuda:
            words.record_stream(stream)
        self._pump()
        return list(words.split(lengths))

    def deal(
        self,
        pieces: Sequence[Piece],
        places: torch.Tensor,
        slots: torch.Tensor,
        after: torch.cuda.Event,
    ) -> torch.cuda.Event:
        """Deal records out to slots.

        Args:
            pieces: of `bring`, the next ones.
            places, slots: int32 on the device, for each record its place in the lanes and its slot.
            after: an event after which the slots may be overwritten.

        Returns:
            An event after which they are filled.
        """
        self._deals.wait_event(after)
        start = 0
        while start < len(pieces):
            # Half of the lanes at once: few launches, and the other half fills meanwhile.
            group = list(dict.fromkeys(pieces[start:]))[: len(self._lanes) // 2]
            group = [piece for piece in group if piece.sent]
            assert group, "a piece's turn did not come"  # noqa: S101  # those before it have given their lanes back
            end = start
            while end < len(pieces) and pieces[end] in group:
                pieces[end].wanted -= 1
                end += 1
            self._deal(group, places[start:end], slots[start:end])
            start = end
        return self._deals.record_event()

    def _deal(self, group: list[Piece], places: torch.Tensor, slots: torch.Tensor) -> None:
        pool = group[0].pool
        with torch.cuda.stream(self._deals):
            self._deals.wait_event(group[-1].lane.arrived)  # the others arrived before it
            fill[(_DEALERS,)](
                self._memory.view(torch.int64),
                _UNIT // 8,
                pool.tiles,
                len(pool.tiles),
                places,
                slots,
                self._counts[len(slots) :],
                TILE=TILE_BYTES // 8,
                EARLY=False,
                num_warps=_DEALER_WARPS,
            )
        for piece in group:
            if not piece.wanted:
                self._sent.remove(piece)
                self._release(piece.lane)
        self._pump()

    def settle(self) -> None:
        """Let the current stream wait for all that was dealt out: a step failed, its slots are to be filled anew."""
        torch.cuda.current_stream(self._memory.device).wait_event(self._deals.record_event())

    def _release(self, lane: _Lane) -> None:
        lane.released, lane.taken = self._deals.record_event(), False

    def _pump(self) -> None:
        while self._waiting and not self._waiting[0].lane.taken:
            piece = self._waiting.popleft()
            lane = piece.lane
            if lane.released is not None:
                self._copies.wait_event(lane.released)
            at, nbytes = 0, piece.pool.layout.record_bytes
            with torch.cuda.stream(self._copies):
                for first, count in _runs(piece.experts):
                    copy_to_device(lane.memory, at, piece.pool.store, first * nbytes, count * nbytes)
                    at += count * nbytes
            self._copies.record_event(lane.arrived)
            lane.taken = piece.sent = True
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
