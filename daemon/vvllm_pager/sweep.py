"""Host-driven rounds on a GPU: bundles arrive while others are computed with.

Every round launches the kernel so that the rows of its experts come out as stock's launch for the whole batch would
give them; the rows are merged, and vLLM's own sum is taken once. Bundles are dealt out on a stream of their own, and
events keep them from slots that are still read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vvllm_pager.batch import Batch
from vvllm_pager.blocks import Blocks, aligned, aligned_by_chance, aligned_in_order
from vvllm_pager.kernel import SlotKernel, one_call, stock_launch
from vvllm_pager.marlin_blocks import Cuts
from vvllm_pager.rounds import Rounds
from vvllm_pager.staging import Place, Staging
from vvllm_shared.residency import EMPTY, Plan
from vvllm_shared.residency.page_table import Ints

if TYPE_CHECKING:
    from vvllm_pager.paging import Paging
    from vvllm_pager.routed_experts import PagedExperts

_NEARLY_ALL = 4
"""Pairs for each expert from which on a batch is taken to need them all: at random it leaves out e^-4 of them."""


@dataclass(frozen=True)
class _Launches:
    """What the rounds of a batch are given, on the device; lists by round."""

    numbers: list[torch.Tensor]
    """int32, of the bundles to load: their numbers in their pieces."""
    load_slots: list[torch.Tensor]
    slot_of: list[torch.Tensor]
    """int32 [E + 1], see `Wave.slot_of`."""
    blocks: list[torch.Tensor]
    """int32, which of the batch's blocks are launched; empty for a kernel without blocks."""
    owners: list[torch.Tensor]
    """int32, their slots."""
    filled: list[torch.Tensor]
    """int32 [1], their rows."""
    round_of: torch.Tensor
    """int32 [E + 1], each expert's round; the number of rounds for those of none."""
    ids: torch.Tensor
    """int32 [T * k], the experts of the pairs, -1 where a pair is nobody's."""
    pairs: list[int]
    """How many pairs each round has, and how many none has."""


class _Loading:
    """Deals out the bundles of a plan's rounds, each round's as soon as its slots have been read for the last time.

    Args:
        places: of all bundles, in order.
        stream: what computes.
    """

    def __init__(
        self,
        staging: Staging,
        plan: Plan,
        places: list[Place],
        launches: _Launches,
        stream: torch.cuda.Stream,
    ) -> None:
        self._staging = staging
        self._waves = plan.waves
        self._places = places
        self._launches = launches
        self._stream = stream
        self._read = [stream.record_event()]
        """Behind the upload, and then behind each round."""
        self._ready: list[torch.cuda.Event | None] = []
        """Of each round that has been dealt out; None without bundles."""

    def wait_for(self, number: int) -> None:
        """Let the stream wait for a round's bundles, before that round is queued."""
        ready, waves = self._ready, self._waves
        while len(ready) < len(waves) and waves[len(ready)].after < number:
            ready.append(self._deal(len(ready)))
        if (event := ready[number]) is not None:
            self._stream.wait_event(event)

    def computed(self) -> None:
        """The next round has been queued."""
        self._read.append(self._stream.record_event())

    def _deal(self, number: int) -> torch.cuda.Event | None:
        wave, launches = self._waves[number], self._launches
        count = len(wave.load_experts)
        if not count:
            return None
        mine, self._places = self._places[:count], self._places[count:]
        after = self._read[wave.after + 1]
        return self._staging.deal(mine, launches.numbers[number], launches.load_slots[number], after)


class Sweep:
    """Computes the plans of one layer.

    Args:
        layer: loaded, with its pool.
        kernel: the layer's, on slots.
        paging: the engine's.
        staging: the engine's.
    """

    def __init__(self, layer: PagedExperts, kernel: SlotKernel, paging: Paging, staging: Staging) -> None:
        self._layer = layer
        self._kernel = kernel
        self._paging = paging
        self._staging = staging

    def overlaps(self, pairs: int) -> bool:
        """Whether a batch of so many pairs is to be loaded while it is computed: smaller ones have little to hide
        behind, and more rounds cost them more."""
        return pairs >= _NEARLY_ALL * self._layer.experts

    def next_layer(self, pairs: int) -> PagedExperts | None:
        """The layer after this one, where a batch of so many pairs is going to need nearly all of its experts."""
        layers, index = self._paging.layers, self._layer.index + 1
        return layers[index] if index < len(layers) and pairs >= _NEARLY_ALL * layers[index].experts else None

    def run(self, plan: Plan, batch: Batch) -> torch.Tensor:
        """The experts' output [T, H]."""
        layer, kernel = self._layer, self._kernel
        ids = batch.ids
        tokens, top_k = ids.shape
        size = kernel.block_size(tokens, top_k, layer.experts)
        loads = [wave.load_experts for wave in plan.waves]
        places = self._staging.expect(layer.pool, np.concatenate(loads))
        launches = self._upload(plan, [number for _, number in places], batch, size)
        by_expert = self._align(size, ids) if size else None
        pairs = launches.ids.long()
        mine = launches.round_of[pairs].argsort(stable=True).split(launches.pairs) if plan.by_pairs else ()
        rounds = Rounds(len(plan.waves), mine[-1]) if mine else None
        stream = torch.cuda.current_stream(ids.device)
        loading = _Loading(self._staging, plan, places, launches, stream)
        out = batch.x
        with stock_launch(layer, batch.x, top_k):
            for number in range(len(plan.waves)):
                loading.wait_for(number)
                if rounds:
                    rounds.mine = mine[number]
                blocks = self._blocks(by_expert, launches, number) if by_expert else None
                slots = ids if blocks else launches.slot_of[number][pairs].view(tokens, top_k)
                with one_call(kernel, blocks, rounds):
                    out = batch.compute(batch.x, batch.weights, slots)
                loading.computed()
        if ahead := self.next_layer(ids.numel()):
            # Travels while that layer's attention runs.
            away = np.flatnonzero(ahead.pool.table.host.slot_of == EMPTY)
            self._staging.send(ahead.pool, away.astype(np.int32))
        return out

    def _align(self, size: int, ids: torch.Tensor) -> Blocks:
        experts = self._layer.experts
        align = aligned_in_order if aligned_by_chance(ids.numel(), experts) else aligned
        return align(size, ids, experts)

    def _upload(self, plan: Plan, numbers: list[int], batch: Batch, size: int) -> _Launches:
        """All of it in one copy."""
        experts, waves = self._layer.experts, plan.waves
        loads = np.cumsum([len(wave.load_experts) for wave in waves])[:-1]
        slot_of = [wave.slot_of(experts) for wave in waves]
        round_of = np.full(experts + 1, len(waves), np.int32)
        for number, wave in enumerate(waves):
            round_of[wave.experts] = number
        blocks: list[Ints] = [np.zeros(0, np.int32)] * len(waves)
        owners = blocks
        if size:
            expert_of = self._block_experts(batch.routed, size)
            cuts = self._cuts(size)
            blocks = [cuts.keep(round_of[expert_of] == number) for number in range(len(waves))]
            owners = [_owners(slots[expert_of[kept]]) for slots, kept in zip(slot_of, blocks, strict=True)]
        arrays = [
            *np.split(np.array(numbers, np.int32), loads),
            *(wave.load_slots for wave in waves),
            *slot_of,
            *blocks,
            *owners,
            *(np.array([len(kept) * size], np.int32) for kept in blocks),
            round_of,
            batch.planned.reshape(-1),
        ]
        lengths = [len(array) for array in arrays]
        on_gpu = self._paging.device.type == "cuda"
        pinned = torch.empty(sum(lengths), dtype=torch.int32, pin_memory=on_gpu)
        np.concatenate(arrays, out=pinned.numpy(), casting="same_kind")
        sent = pinned.to(self._paging.device, non_blocking=True).split(lengths)
        loading, slots, maps, kept_blocks, kept_owners, filled = (
            list(sent[at : at + len(waves)]) for at in range(0, 6 * len(waves), len(waves))
        )
        # Counted here, so that nothing waits for the device.
        pairs = np.bincount(round_of[batch.planned.reshape(-1)], minlength=len(waves) + 1).tolist()
        return _Launches(loading, slots, maps, kept_blocks, kept_owners, filled, sent[-2], sent[-1], pairs)

    def _block_experts(self, routed: Ints, size: int) -> Ints:
        """[B] the expert of each block, as `aligned` lays them."""
        flat = routed.reshape(-1)
        counts = np.bincount(flat[(flat >= 0) & (flat < self._layer.experts)], minlength=self._layer.experts)
        return np.repeat(np.arange(self._layer.experts, dtype=np.int32), -(-counts // size))

    def _cuts(self, size: int) -> Cuts:
        properties = torch.cuda.get_device_properties(self._paging.device)
        return Cuts.of(properties.multi_processor_count, size, self._kernel.widths())

    def _blocks(self, by_expert: Blocks, launches: _Launches, number: int) -> Blocks:
        """Those of a round."""
        size = by_expert.size
        whole = len(by_expert.pairs) // size * size
        pairs = by_expert.pairs[:whole].view(-1, size)[launches.blocks[number].long()].flatten()
        return Blocks(size, pairs, launches.owners[number], launches.filled[number])


def _owners(slots: Ints) -> Ints:
    """The slots of a launch's blocks; those of other rounds compute on any slot that holds something."""
    return np.where(slots == EMPTY, max(int(slots.max(initial=EMPTY)), 0), slots)
