"""Host-driven waves on the CPU backend, whose kernel adds a token's experts by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vvllm_pager.batch import Batch
from vvllm_shared.residency import Plan, Wave
from vvllm_shared.residency.page_table import Ints

if TYPE_CHECKING:
    from vvllm_pager.routed_experts import PagedExperts


class CpuWaves:
    """Computes the plans of one layer, one wave after the other."""

    def __init__(self, layer: PagedExperts) -> None:
        self._layer = layer

    def run(self, plan: Plan, batch: Batch, ids: Ints) -> torch.Tensor:
        """The experts' output [T, H].

        Args:
            ids: [T, k] what was planned: -1 where a pair is nobody's.
        """
        return (self._pair_waves if plan.by_pairs else self._token_waves)(plan, batch, ids)

    def _load(self, wave: Wave) -> Ints:
        """Load what the wave lacks; returns [E + 1] its slots by expert."""
        self._layer.pool.load(wave.load_experts, wave.load_slots)
        return wave.slot_of(self._layer.experts)

    def _token_waves(self, plan: Plan, batch: Batch, ids: Ints) -> torch.Tensor:
        outputs = []
        for wave in plan.waves:
            slots, (start, end) = self._load(wave), wave.tokens
            slot_ids, weights = _slot_ids(slots[ids[start:end]], batch.weights[start:end], batch.ids)
            outputs.append(batch.compute(batch.x[start:end], weights, slot_ids))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _pair_waves(self, plan: Plan, batch: Batch, ids: Ints) -> torch.Tensor:
        tokens, top_k = batch.ids.shape
        flat_weights = batch.weights.reshape(-1, 1)
        partials: torch.Tensor | None = None
        for wave in plan.waves:
            slots = self._load(wave)[ids.reshape(-1)]
            mine = np.flatnonzero(slots >= 0)
            pairs = torch.from_numpy(mine)
            slot_ids = torch.from_numpy(slots[mine].reshape(-1, 1)).to(batch.ids.dtype)
            # Weighed where they are added; one expert a token where stock weighs it, which may be the input.
            weights = flat_weights[pairs] if top_k == 1 else torch.ones_like(flat_weights[pairs])
            rows = batch.compute(batch.x[pairs // top_k], weights, slot_ids)
            if partials is None:
                partials = rows.new_zeros(tokens * top_k, rows.shape[-1])
            partials[pairs] = rows
        assert partials is not None  # noqa: S101  # a plan has at least one wave
        if top_k == 1:
            return partials
        # A pair that is nobody's left a row of zeros, and its weight may be anything.
        return _add_on_cpu(partials.view(tokens, top_k, -1), batch.weights.masked_fill(batch.ids < 0, 0.0))


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
