"""Calling vLLM's expert kernel on slots exactly as stock would call it on experts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import override_config
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

if TYPE_CHECKING:
    from vvllm_pager.routed_experts import PagedExperts


def stock_launch(layer: PagedExperts, x: torch.Tensor, top_k: int) -> AbstractContextManager[Any]:
    """The launch configuration that stock would take for this whole batch.

    Triton's tile is looked up by the number of experts and of rows (fused_moe.py:1419), and another tile adds in
    another order: a layer of S experts, or a wave of fewer rows, must not look up its own.

    Args:
        layer: the container; its kernel was built for S experts.
        x: [T, H] the whole batch.
        top_k: experts per token of the whole batch.
    """
    kernel = layer.quant_method.moe_kernel.fused_experts
    if not isinstance(kernel, TritonExperts):
        return nullcontext()
    w13, w2 = layer.w13_weight, layer.w2_weight
    config = try_get_optimal_moe_config(
        (layer.experts, *w13.shape[1:]),
        (layer.experts, *w2.shape[1:]),
        top_k,
        kernel.quant_config.config_name(x.dtype),
        len(x),
        block_shape=kernel.block_shape,
    )
    context: AbstractContextManager[Any] = override_config(config)
    return context


def add_partials(partials: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum over k of expert outputs [T, k, H], in the order and precision of stock's kernels.

    Args:
        partials: on a GPU already weighed, as stock's kernels leave them; on the CPU not yet.
        weights: fp32 [T, k].
    """
    if partials.device.type == "cuda":
        out = torch.empty_like(partials[:, 0])
        ops.moe_sum(partials, out)
        return out
    # The CPU kernel adds a token's experts in fp32, one after the other. vLLM's builds for AVX-512 (taken as in
    # platforms/cpu.py, import_kernels) multiply and add in one rounding, that for AVX2 in two; fp64 holds the
    # exact product.
    fused = torch.cpu._is_avx512_supported()
    total = partials[:, 0].float() * weights[:, :1]
    for k in range(1, partials.shape[1]):
        row, weight = partials[:, k].float(), weights[:, k : k + 1]
        total = (total.double() + row.double() * weight.double()).float() if fused else total + row * weight
    return total.to(partials.dtype)


def is_warm_up() -> bool:
    """Whether this forward is one of vLLM's own (profiling, warming up), which belongs to no request."""
    return get_forward_context().attn_metadata is None


def padding_rows(tokens: int) -> torch.Tensor | None:
    """Mask [tokens] of rows that are not tokens of a request, where the runner says."""
    mask = get_forward_context().is_padding
    return None if mask is None else mask[:tokens]
