"""Host-driven residency: read what a batch needs, plan, and let it be loaded and computed.

One synchronisation a layer: the router's ids and the page table come to the host together.
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
        self._compute: CpuWaves | Sweep = CpuWaves(layer)
        if kernel is not None:
            from vvllm_pager.sweep import Sweep

            assert paging.staging is not None  # noqa: S101  # made with the slots
            self._compute = self._sweep = Sweep(layer, kernel, paging, paging.staging)

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
        settings, table = self._paging.settings, self._layer.pool.table
        warm_up = forward.is_warm_up(self._paging.graphs)
        routed, ids = self._read_ids(topk_ids)
        # On a GPU pair waves are exact, and load each expert once: nothing speaks for token waves.
        above = 0 if self._sweep else settings.pair_waves_above
        # What prefill needs at most must be seen by vLLM's memory profile.
        forced = warm_up and len(ids) > above
        plan = plan_step(
            ids,
            table.host,
            table.weights,
            pair_waves_above=above,
            force_pairs=forced,
            overlap=self._sweep is not None and self._sweep.overlaps(ids.size),
        )
        batch = Batch(ids, routed, x, topk_weights, topk_ids, compute)
        out = self._compute.run(plan, batch)
        if warm_up:
            table.forget_statistics()
        else:
            self._count(ids, plan, table.host.step)
        table.write()
        return out

    def _read_ids(self, topk_ids: torch.Tensor) -> tuple[Ints, Ints]:
        """The router's ids on the host, int32 [T, k]: as they are, and with rows of padding as -1. The tables of this
        layer and of the one whose bundles it sends ahead are as they are now, too."""
        mask = forward.padding_rows(len(topk_ids))
        self._layer.pool.table.read()
        if self._sweep and (ahead := self._sweep.next_layer(topk_ids.numel())):
            ahead.pool.table.read()
        padding = None if mask is None else mask.to("cpu", non_blocking=True)
        # To the host in the ids' own dtype; this waits for everything queued before it, mask and tables included.
        routed = topk_ids.cpu().numpy().astype(np.int32)
        return routed, routed if padding is None else np.where(padding.numpy()[:, None], np.int32(-1), routed)

    def _count(self, ids: Ints, plan: Plan, step: int) -> None:
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
        if paging.host_trace is not None:
            paging.host_trace.observe(step, index, ids)
