"""Host-driven residency: read what a batch needs, plan, load, compute.

One synchronisation a layer (the router's ids and the page table come to the host together); everything after it
is queued in the order of the compute stream, so a slot is overwritten only after the kernel that read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from vvllm_pager import kernel
from vvllm_shared.residency import Plan, Wave, plan_step
from vvllm_shared.residency.page_table import Ints

if TYPE_CHECKING:
    from vvllm_pager.paging import Paging
    from vvllm_pager.routed_experts import PagedExperts

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [t, H], weights [t, k], slot ids [t, k]) to [t, H]: the stock kernel on the slots."""


class HostResolver:
    """Runs the steps of one layer.

    Args:
        layer: the container; its pool and sizes are set when the layer is loaded.
        paging: the engine's.
    """

    def __init__(self, layer: PagedExperts, paging: Paging) -> None:
        self._layer = layer
        self._paging = paging
        self._warm = False

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
        layer, paging = self._layer, self._paging
        table = layer.pool.table
        warm_up = kernel.is_warm_up()
        ids = self._read_ids(topk_ids)
        if not warm_up and not self._warm:
            self._warm = True
            table.host.heat.fill(0)
            table.host.last_used.fill(0)
        step = paging.begin(layer.index)
        many = len(ids) > paging.settings.pair_waves_above
        plan = plan_step(
            ids,
            table.host,
            layer.weights,
            step,
            pair_waves_above=paging.settings.pair_waves_above,
            # What prefill needs at most must be seen by vLLM's memory profile.
            force_pairs=warm_up and many,
        )
        with kernel.stock_launch(layer, x, ids.shape[1]):
            run = self._pair_waves if plan.by_pairs else self._token_waves
            out = run(plan, x, topk_weights, topk_ids, compute)
        table.write()
        if not warm_up:
            self._count(ids, plan, step)
        return out

    def _read_ids(self, topk_ids: torch.Tensor) -> Ints:
        """The router's ids on the host, int32 [T, k], padding rows as -1, and the table as it is now."""
        mask = kernel.padding_rows(len(topk_ids))
        if mask is not None:
            topk_ids = topk_ids.masked_fill(mask.unsqueeze(1), -1)
        self._layer.pool.table.read()
        # To the host in the ids' own dtype; this waits for everything queued before it, the table included.
        return topk_ids.cpu().numpy().astype(np.int32)

    def _load(self, wave: Wave) -> None:
        self._layer.pool.load(wave.load_experts, wave.load_slots)

    def _token_waves(
        self, plan: Plan, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        top_k = ids.shape[1]
        outputs = []
        start = 0
        for number, wave in enumerate(plan.waves, 1):
            self._load(wave)
            # Rows without a valid pair belong to the wave of the next valid token; the last takes the rest.
            end = len(x) if number == len(plan.waves) else int(wave.pairs[-1]) // top_k + 1
            slots = np.full((end - start) * top_k, -1, np.int32)
            slots[wave.pairs - start * top_k] = wave.slot_ids
            slot_ids, wave_weights = _slot_ids(slots.reshape(-1, top_k), weights[start:end], ids)
            outputs.append(compute(x[start:end], wave_weights, slot_ids))
            start = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _pair_waves(
        self, plan: Plan, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        top_k = ids.shape[1]
        flat_weights = weights.reshape(-1, 1)
        partials: torch.Tensor | None = None
        for wave in plan.waves:
            self._load(wave)
            # No more rows a call than a stock call has tokens: vLLM's workspaces are sized for those.
            for at in range(0, max(len(wave.pairs), 1), self._paging.max_rows):
                chosen = wave.pairs[at : at + self._paging.max_rows]
                pairs = torch.from_numpy(chosen).to(x.device)
                slots = wave.slot_ids[at : at + len(chosen)].reshape(-1, 1)
                slot_ids, pair_weights = _slot_ids(slots, flat_weights[pairs], ids)
                rows = compute(x[pairs // top_k], pair_weights, slot_ids)
                if partials is None:
                    partials = rows.new_zeros(len(x) * top_k, rows.shape[-1])
                partials[pairs] = rows
        assert partials is not None  # noqa: S101  # a plan has at least one wave
        return kernel.add_partials(partials.view(len(x), top_k, -1))

    def _count(self, ids: Ints, plan: Plan, step: int) -> None:
        layer, board = self._layer, self._paging.board
        board.add("progress")
        board.set("compiling", 0)
        board.add("hits", plan.hits)
        board.add("misses", plan.misses)
        board.add("bytes_paged", plan.misses * layer.layout.bundle_bytes)
        board.add("pair_waves" if plan.by_pairs else "token_waves", len(plan.waves) - 1)
        if layer.index == 0:
            board.add("steps")
        if self._paging.trace is not None:
            self._paging.trace.observe(step, layer.index, ids)


def _slot_ids(slots: Ints, weights: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot ids for the kernel, in the router's dtype and device.

    A pair that is nobody's (-1) gets a slot that the batch uses anyway, and no weight: kernels tolerate -1 in
    whole rows at best (they would add a row that was never written).
    """
    invalid = slots < 0
    if invalid.any():
        used = slots[~invalid]
        slots = np.where(invalid, used[0] if len(used) else 0, slots)
        weights = weights.masked_fill(torch.from_numpy(invalid).to(weights.device), 0.0)
    return torch.from_numpy(slots).to(like.device).to(like.dtype), weights
