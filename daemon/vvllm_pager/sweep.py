"""Host-driven rounds on a GPU: bundles arrive while others are computed with.

Every round launches the kernel so that the rows of its experts come out as stock's launch for the whole batch would
give them; the rows are merged, and vLLM's own sum is taken once. Bundles are dealt out on a stream of their own, and
events keep them from slots that are still read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from vvllm_pager.batch import Batch
from vvllm_pager.kernel import SlotKernel, launching, stock_launch
from vvllm_pager.launches import Round, launches
from vvllm_pager.marlin_blocks import Cuts
from vvllm_pager.rounds import Launch, Rounds
from vvllm_pager.staging import Piece, Staging
from vvllm_shared.residency import Plan

if TYPE_CHECKING:
    from vvllm_pager.paging import Paging
    from vvllm_pager.routed_experts import PagedExperts


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
        rounds: list[Round],
        stream: torch.cuda.Stream,
    ) -> None:
        self._staging = staging
        self._waves = plan.waves
        self._pieces = pieces
        self._rounds = rounds
        self._stream = stream
        self._read = [stream.record_event()]
        """Behind the upload, and then behind each round."""
        self._ready: list[torch.cuda.Event | None] = []
        """Of each round that has been dealt out; None without bundles."""

    def launches(self) -> Iterator[Launch]:
        """Each round's launch; the stream waits for its bundles before what is queued next."""
        for number, given in enumerate(self._rounds):
            self._wait_for(number)
            yield given.launch
            self._read.append(self._stream.record_event())

    def _wait_for(self, number: int) -> None:
        ready, waves = self._ready, self._waves
        while len(ready) < len(waves) and waves[len(ready)].after < number:
            ready.append(self._deal(len(ready)))
        if (event := ready[number]) is not None:
            self._stream.wait_event(event)

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

    def run(self, plan: Plan, batch: Batch) -> torch.Tensor:
        """The experts' output [T, H]. The layer's table goes to the device as the plan leaves it."""
        layer, kernel, ids = self._layer, self._kernel, batch.ids
        tokens, top_k = ids.shape
        count = len(plan.waves)
        size = kernel.block_size(tokens, top_k, layer.experts)
        loads = np.concatenate([wave.load_experts for wave in plan.waves])
        pieces, places = self._staging.bring(layer.pool, loads)
        upload = partial(self._staging.upload, table=layer.pool.table)
        given = launches(plan.waves, places, batch, layer.experts, size, self._cuts(size), upload)
        # A kernel with blocks writes none but its round's rows; nobody's must not be garbage.
        rows = batch.x.new_zeros(ids.numel(), batch.x.shape[1]) if size and count > 1 else None
        loading = _Loading(self._staging, plan, pieces, given, torch.cuda.current_stream(ids.device))
        with (
            stock_launch(layer, batch.x, top_k),
            launching(kernel, Rounds(loading.launches(), count, rows)),
        ):
            return batch.compute(batch.x, batch.weights, ids)

    def _cuts(self, size: int) -> Cuts:
        if not size:
            return Cuts.all(0)
        properties = torch.cuda.get_device_properties(self._paging.device)
        return Cuts.of(properties.multi_processor_count, size, self._kernel.widths())
