"""Host-driven rounds on a GPU: bundles arrive while others are computed with.

Every round launches the kernel so that the rows of its experts come out as stock's launch for the whole batch would
give them; the rows are merged, and vLLM's own sum is taken once. Bundles are dealt out on a stream of their own, and
events keep them from slots that are still read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vvllm_pager.batch import Batch
from vvllm_pager.kernel import SlotKernel, one_call, stock_launch
from vvllm_pager.launches import Launches, launches
from vvllm_pager.marlin_blocks import Cuts
from vvllm_pager.rounds import Rounds
from vvllm_pager.staging import Piece, Staging
from vvllm_shared.residency import EMPTY, Plan

if TYPE_CHECKING:
    from vvllm_pager.paging import Paging
    from vvllm_pager.routed_experts import PagedExperts

_NEARLY_ALL = 4
"""Pairs for each expert from which on a batch is taken to need them all: at random it leaves out e^-4 of them."""


class _Loading:
    """Deals out the bundles of a plan's rounds, each round's as soon as its slots have been read for the last time.

    Args:
        pieces: of all bundles, in order.
        stream: what computes.
    """

    def __init__(
        self,
        staging: Staging,
        plan: Plan,
        pieces: list[Piece],
        given: Launches,
        stream: torch.cuda.Stream,
    ) -> None:
        self._staging = staging
        self._waves = plan.waves
        self._pieces = pieces
        self._rounds = given.rounds
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
        wave, given = self._waves[number], self._rounds[number]
        count = len(wave.load_experts)
        if not count:
            return None
        mine, self._pieces = self._pieces[:count], self._pieces[count:]
        return self._staging.deal(mine, given.places, given.load_slots, self._read[wave.after + 1])


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
        layer, kernel, ids = self._layer, self._kernel, batch.ids
        tokens, top_k = ids.shape
        size = kernel.block_size(tokens, top_k, layer.experts)
        loads = np.concatenate([wave.load_experts for wave in plan.waves])
        pieces, places = self._staging.expect(layer.pool, loads)
        given = launches(plan, places, batch, layer.experts, size, self._cuts(size) if size else None)
        rounds = self._rounds(plan, batch, given) if plan.by_pairs else None
        stream = torch.cuda.current_stream(ids.device)
        loading = _Loading(self._staging, plan, pieces, given, stream)
        out = batch.x
        with stock_launch(layer, batch.x, top_k):
            for number, launch in enumerate(given.rounds):
                loading.wait_for(number)
                if rounds and launch.mine is not None:
                    rounds.mine = launch.mine
                with one_call(kernel, launch.blocks, rounds):
                    out = batch.compute(batch.x, batch.weights, ids if launch.slots is None else launch.slots)
                loading.computed()
        if ahead := self.next_layer(ids.numel()):
            # Travels while that layer's attention runs.
            away = np.flatnonzero(ahead.pool.table.host.slot_of == EMPTY)
            self._staging.send(ahead.pool, away.astype(np.int32))
        return out

    def _rounds(self, plan: Plan, batch: Batch, given: Launches) -> Rounds:
        """A kernel with blocks writes none but its round's rows, so all write into the same memory."""
        if given.rounds[0].blocks is None:
            return Rounds(len(plan.waves), nobody=given.nobody)
        rows = batch.x.new_empty(batch.ids.numel(), batch.x.shape[1])
        if len(given.nobody):
            rows[given.nobody] = 0
        return Rounds(len(plan.waves), rows)

    def _cuts(self, size: int) -> Cuts:
        properties = torch.cuda.get_device_properties(self._paging.device)
        return Cuts.of(properties.multi_processor_count, size, self._kernel.widths())
