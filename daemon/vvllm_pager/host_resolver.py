"""Host-driven residency: plan what a batch needs, and let it be loaded and computed.

A batch that needs some of the experts waits for the host to read which: one synchronisation a layer. A batch so large
that it needs nearly all is planned without a look at its ids, for all experts: the host runs ahead of the device, and
the link never waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vvllm_pager import forward
from vvllm_pager.batch import Batch
from vvllm_pager.cpu_waves import CpuWaves
from vvllm_pager.kernel import Compute, SlotKernel
from vvllm_shared.residency import Plan, plan_step
from vvllm_shared.residency.page_table import Ints

if TYPE_CHECKING:
    from vvllm_pager.paging import Paging
    from vvllm_pager.routed_experts import PagedExperts
    from vvllm_pager.sweep import Sweep

_NEARLY_ALL = 4
"""Pairs for each expert from which on a batch is taken to need them all: at random it leaves out e^-4 of them."""


class HostResolver:
    """Runs the steps of one layer.

    Args:
        layer: loaded, with its pool.
        kernel: the layer's, on slots; None on the CPU, whose kernel adds a token's experts by itself.
        paging: the engine's.
    """

    def __init__(self, layer: PagedExperts, kernel: SlotKernel | None, paging: Paging) -> None:
        self._layer = layer
        self._paging = paging
        self._sweep: Sweep | None = None
        if kernel is not None:
            from vvllm_pager.sweep import Sweep

            assert paging.staging is not None  # noqa: S101  # made with the slots
            self._sweep = Sweep(layer, kernel, paging, paging.staging)

    def run(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        """Make the experts of a batch resident, in waves where they do not fit, and compute it.

        Args:
            x: [T, H] inputs. topk_weights, topk_ids: [T, k] from the router; ids of -1 are nobody's.
            compute: the stock kernel.

        Returns:
            [T, H].
        """
        table = self._layer.pool.table
        warm_up = forward.is_warm_up(self._paging.graphs)
        batch = Batch(x, topk_weights, topk_ids, forward.padding_rows(len(topk_ids)), compute)
        plan, ids = self._plan(batch, warm_up)
        if warm_up:
            table.forget_statistics()
        try:
            if self._sweep is not None:
                out = self._sweep.run(plan, batch)
            else:
                assert ids is not None  # noqa: S101  # only a sweep goes without
                out = CpuWaves(self._layer).run(plan, batch, ids)
        except BaseException:
            # Slots hold half of the plan: who goes on all the same must not take them for what the table says.
            if self._paging.staging is not None:
                self._paging.staging.settle()
            table.forget_contents()
            raise
        if not warm_up:
            self._count(plan)
            self._trace(batch, ids, table.host.step)
        return out

    def _plan(self, batch: Batch, warm_up: bool) -> tuple[Plan, Ints | None]:
        """The plan, and the ids [T, k] that it is for; None where it is for all experts."""
        layer, table = self._layer, self._layer.pool.table
        if self._sweep is not None and batch.ids.numel() >= _NEARLY_ALL * layer.experts:
            self._read_tables()
            everyone = np.arange(layer.experts, dtype=np.int32)[None]
            return plan_step(
                everyone, table.host, table.weights, pair_waves_above=0, force_pairs=warm_up, overlap=True
            ), None
        ids = self._read_ids(batch)
        # On a GPU pair waves are exact, and load each expert once: nothing speaks for token waves.
        above = 0 if self._sweep else self._paging.settings.pair_waves_above
        # What prefill needs at most must be seen by vLLM's memory profile.
        forced = warm_up and len(ids) > above
        return plan_step(ids, table.host, table.weights, pair_waves_above=above, force_pairs=forced), ids

    def _read_tables(self) -> None:
        """Where a step begins, bring the tables of this layer and of those behind it to the host. Waits for the device.

        Within the step nothing but these layers themselves changes them.
        """
        paging, index = self._paging, self._layer.index
        if index == 0 or index != paging.swept + 1:
            for layer in paging.layers[index:]:
                layer.pool.table.read()
            torch.cuda.current_stream(paging.device).synchronize()
        paging.swept = index

    def _read_ids(self, batch: Batch) -> Ints:
        """The ids on the host, int32 [T, k], those of nobody as -1; the layer's table is as it is now, too."""
        self._layer.pool.table.read()
        mask = None if batch.padding is None else batch.padding.to("cpu", non_blocking=True)
        # To the host in the ids' own dtype; this waits for everything queued before it, mask and table included.
        ids = batch.ids.cpu().numpy().astype(np.int32)
        return ids if mask is None else np.where(mask.numpy()[:, None], np.int32(-1), ids)

    def _count(self, plan: Plan) -> None:
        index, paging = self._layer.index, self._paging
        waves = len(plan.waves) - 1
        paging.board.set("compiling", 0)  # what this step had to compile is compiled
        paging.board.count(
            index,
            forward.phase(paging.tokens_each),
            hits=plan.hits,
            misses=plan.misses,
            nbytes=plan.misses * self._layer.layout.bundle_bytes,
            token_waves=0 if plan.by_pairs else waves,
            pair_waves=waves if plan.by_pairs else 0,
        )

    def _trace(self, batch: Batch, ids: Ints | None, step: int) -> None:
        """Tell what the router chose; where the host has not seen it, once the step's last layer is done."""
        index, paging = self._layer.index, self._paging
        if paging.host_trace is None:
            return
        if ids is not None:
            paging.host_trace.observe(step, index, ids)
            return
        if index == 0:
            paging.untold.clear()  # of a step that failed
        chosen = batch.ids if batch.padding is None else batch.ids.masked_fill(batch.padding[:, None], -1)
        paging.untold.append((step, index, chosen.int().to("cpu", non_blocking=True)))
        if index + 1 == len(paging.layers):
            torch.cuda.current_stream(paging.device).synchronize()
            for told in paging.untold:
                paging.host_trace.observe(told[0], told[1], told[2].numpy())
            paging.untold.clear()
