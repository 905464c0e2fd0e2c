"""Host-driven residency: read what a batch needs, plan, load, compute.

One synchronisation a layer (the router's ids and the page table come to the host together); everything after it
is queued in the order of the compute stream, so a slot is overwritten only after the kernel that read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vvllm_pager import forward
from vvllm_pager.kernel import (
    Compute,
    Rounds,
    SlotKernel,
    aligned,
    on_slots,
    one_call,
    stock_launch,
)
from vvllm_shared.residency import Plan, Wave, plan_step
from vvllm_shared.residency.page_table import Ints

if TYPE_CHECKING:
    from vvllm_pager.paging import Paging
    from vvllm_pager.routed_experts import PagedExperts


class HostResolver:
    """Runs the steps of one layer.

    Args:
        layer: loaded, with its pool.
        kernel: the layer's, on slots; None on the CPU, whose kernel adds a token's experts by itself.
        paging: the engine's.
    """

    def __init__(self, layer: PagedExperts, kernel: SlotKernel | None, paging: Paging) -> None:
        self._layer = layer
        self._kernel = kernel
        self._paging = paging

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
        ids = self._read_ids(topk_ids)
        # On a GPU pair waves are exact, and load each expert once: nothing speaks for token waves.
        above = 0 if self._kernel else settings.pair_waves_above
        # What prefill needs at most must be seen by vLLM's memory profile.
        forced = warm_up and len(ids) > above
        plan = plan_step(ids, table.host, table.weights, pair_waves_above=above, force_pairs=forced)
        if self._kernel:
            out = self._rounds(self._kernel, plan, x, topk_weights, topk_ids, compute)
        else:
            run = self._pair_waves if plan.by_pairs else self._token_waves
            out = run(plan, x, topk_weights, topk_ids, compute)
        if warm_up:
            table.forget_statistics()
        else:
            self._count(ids, plan, table.host.step)
        table.write()
        return out

    def _read_ids(self, topk_ids: torch.Tensor) -> Ints:
        """The router's ids on the host, int32 [T, k], padding rows as -1, and the table as it is now."""
        mask = forward.padding_rows(len(topk_ids))
        if mask is not None:
            topk_ids = topk_ids.masked_fill(mask.unsqueeze(1), -1)
        self._layer.pool.table.read()
        # To the host in the ids' own dtype; this waits for everything queued before it, the table included.
        return topk_ids.cpu().numpy().astype(np.int32)

    def _load(self, wave: Wave) -> None:
        self._layer.pool.load(wave.load_experts, wave.load_slots)

    def _rounds(
        self,
        kernel: SlotKernel,
        plan: Plan,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        compute: Compute,
    ) -> torch.Tensor:
        """Every wave is a launch for the whole batch, of which it computes the pairs whose experts it has."""
        layer = self._layer
        tokens, top_k = ids.shape
        size = kernel.block_size(tokens, top_k, layer.experts)
        by_expert = aligned(size, ids, layer.experts) if size else None
        rounds = Rounds(len(plan.waves)) if len(plan.waves) > 1 else None
        out = x
        with stock_launch(layer, x, top_k):
            for wave in plan.waves:
                self._load(wave)
                placed = np.full(ids.numel(), -1, np.int32)
                placed[wave.pairs] = wave.slot_ids
                slots = torch.from_numpy(placed.reshape(tokens, top_k)).to(x.device)
                blocks = on_slots(by_expert, ids, slots, layer.experts) if by_expert else None
                with one_call(kernel, slots, blocks, rounds):
                    out = compute(x, weights, ids if blocks else slots)
        return out

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
            pairs = torch.from_numpy(wave.pairs)
            slot_ids = torch.from_numpy(wave.slot_ids.reshape(-1, 1)).to(ids.dtype)
            # Weighed where they are added; one expert a token where stock weighs it, which may be the input.
            pair_weights = flat_weights[pairs] if top_k == 1 else torch.ones_like(flat_weights[pairs])
            rows = compute(x[pairs // top_k], pair_weights, slot_ids)
            if partials is None:
                partials = rows.new_zeros(len(x) * top_k, rows.shape[-1])
            partials[pairs] = rows
        assert partials is not None  # noqa: S101  # a plan has at least one wave
        if top_k == 1:
            return partials
        # A pair that is nobody's left a row of zeros, and its weight may be anything.
        return _add_on_cpu(partials.view(len(x), top_k, -1), weights.masked_fill(ids < 0, 0.0))

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


def _slot_ids(slots: Ints, weights: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot ids for the CPU kernel, in the router's dtype.

    A pair that is nobody's (-1) gets a slot that the batch uses anyway, and no weight.
    """
    invalid = slots < 0
    if invalid.any():
        used = slots[~invalid]
        slots = np.where(invalid, used[0] if len(used) else 0, slots)
        weights = weights.masked_fill(torch.from_numpy(invalid), 0.0)
    return torch.from_numpy(slots).to(like.dtype), weights


def _add_on_cpu(partials: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum over k of expert outputs [T, k, H], in the order and precision of vLLM's CPU kernel.

    Args:
        partials: not yet weighed.
        weights: fp32 [T, k].
    """
    # It adds a token's experts in fp32, one after the other. vLLM's builds for AVX-512 (taken as in
    # platforms/cpu.py, import_kernels) multiply and add in one rounding, that for AVX2 in two; fp64 holds the
    # exact product.
    fused = torch.cpu._is_avx512_supported()
    total = partials[:, 0].float() * weights[:, :1]
    for k in range(1, partials.shape[1]):
        row, weight = partials[:, k].float(), weights[:, k : k + 1]
        total = (total.double() + row.double() * weight.double()).float() if fused else total + row * weight
    return total.to(partials.dtype)
