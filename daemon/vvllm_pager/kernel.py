"""Calling vLLM's expert kernels on slots exactly as stock would call them on experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe import override_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import triton_moe
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts, _fused_marlin_moe
from vllm.model_executor.layers.fused_moe.experts.nvfp4_emulation_moe import (
    Nvfp4QuantizationEmulationTritonExperts as Nvfp4TritonExperts,
)
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config
from vllm.scalar_type import ScalarType

from vvllm_pager.rounds import Rounds
from vvllm_shared.errors import UnsupportedError

if TYPE_CHECKING:
    from vvllm_pager.routed_experts import PagedExperts

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`RoutedExperts.forward_modular`: (x [t, H], weights [t, k], ids [t, k]) to [t, H]."""


class SlotKernel:
    """Mixed into a kernel's class: vLLM calls it once a step, and it launches round after round."""

    rounds: Rounds
    """Of the running step."""

    def block_size(self, tokens: int, top_k: int, experts: int) -> int:
        """Rows of a block, for a kernel that takes `Blocks`; 0 for one that takes slots for experts."""
        return 0

    def widths(self) -> tuple[int, ...]:
        """Columns of the GEMMs of a kernel that takes `Blocks`."""
        return ()

    def moe_sum(
        self,
        input: torch.Tensor,  # as vLLM calls it
        output: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
    ) -> None:
        """The sum over a token's experts, in vLLM's own operator, once all rounds are there."""
        if (rows := self.rounds.merge(input)) is not None:
            ops.moe_sum(rows, output)


class SlotTriton(SlotKernel, TritonExperts):
    """Triton's tile is chosen by `stock_launch`, and a block's place does not show: slots pass for experts."""

    experts: int
    """E of the layer."""

    def apply(self, *, topk_ids: torch.Tensor, **named: Any) -> None:
        """vLLM's, which aligns small batches as it would for all E experts: not at all."""
        for launch in self.rounds:
            with _aligned_for(self.experts):
                super().apply(topk_ids=launch.slots, **named)


class SlotNvfp4Triton(SlotKernel, Nvfp4TritonExperts):
    """NVFP4 by Triton, widened while it is multiplied: as `SlotTriton`, but vLLM aligns batches of any size."""

    def apply(self, *, topk_ids: torch.Tensor, **named: Any) -> None:
        """vLLM's, round after round."""
        for launch in self.rounds:
            super().apply(topk_ids=launch.slots, **named)


class SlotMarlin(SlotKernel, MarlinExperts):
    """Marlin cuts the sums over K by where a block lies, so those blocks that it cuts lie as with all E experts."""

    def block_size(self, tokens: int, top_k: int, experts: int) -> int:
        """As `fused_marlin_moe` chooses it (marlin_moe.py:342), for all E experts."""
        size = 0
        for size in (8, 16, 32, 48, 64):
            if tokens * top_k / experts / size < 0.9:
                break
        narrow = self.input_dtype is not None and self.input_dtype.itemsize == 1
        return max(size, 16) if narrow else size

    def widths(self) -> tuple[int, ...]:
        """Twice an expert's width, where it is gated, and the hidden size. vLLM pads the width to a multiple of 64 or
        128, by the format (marlin_utils_fp4.py, `padded_N`): here are both."""
        config = self.moe_config
        gates = 2 if config.activation.is_gated else 1
        wide = {-(-config.intermediate_size_per_partition // pad) * pad for pad in (64, 128)}
        return *(gates * width for width in sorted(wide)), config.hidden_dim

    def apply(  # noqa: PLR0917  # vLLM's signature
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """`fused_marlin_moe` (marlin_moe.py:224) between the alignment and the sum."""
        top_k = topk_ids.shape[1]
        for launch in self.rounds:
            assert launch.blocks is not None  # noqa: S101  # `block_size` is not 0
            rows = _fused_marlin_moe(
                hidden_states=hidden_states,
                w1=w1,
                w2=w2,
                bias1=self.w1_bias,
                bias2=self.w2_bias,
                w1_scale=self.w1_scale,
                w2_scale=self.w2_scale,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                num_topk=top_k,
                quant_type=ScalarType.from_id(self.quant_type_id),
                apply_router_weight_on_input=apply_router_weight_on_input,
                expert_map=None,
                block_size_m=launch.blocks.size,
                sorted_token_ids=launch.blocks.pairs,
                expert_ids=launch.blocks.owners,
                num_tokens_post_padded=launch.blocks.filled,
                activation=activation,
                activation_func=self.activation,
                activation_config=self.activation_config,
                input_global_scale1=self.a1_gscale,
                input_global_scale2=self.a2_gscale,
                global_scale1=self.g1_alphas,
                global_scale2=self.g2_alphas,
                w1_zeros=self.w1_zp,
                w2_zeros=self.w2_zp,
                # Swapped, see MarlinExperts.workspace_shapes.
                intermediate_cache13=workspace2,
                intermediate_cache2=workspace13,
                output=self.rounds.rows,
                input_dtype=self.input_dtype,
            )
            self.moe_sum(rows.view(-1, top_k, rows.shape[-1]), output)


@contextmanager
def _aligned_for(experts: int) -> Iterator[None]:
    """Within it vLLM skips the alignment where it would for `experts` experts (fused_moe.py, a quarter of them).

    By the number of slots it would launch it for batches that stock does not: two kernels a layer.
    """
    prepare = triton_moe._prepare_expert_assignment

    def as_stock(
        topk_ids: torch.Tensor, config: Any, tokens: int, top_k: int, slots: int, *rest: Any, **named: Any
    ) -> Any:
        few = tokens * top_k * 4 <= experts
        return prepare(topk_ids, config, tokens, top_k, experts if few else slots, *rest, **named)

    triton_moe._prepare_expert_assignment = as_stock
    try:
        yield
    finally:
        triton_moe._prepare_expert_assignment = prepare


_ON_SLOTS: dict[type, type[SlotKernel]] = {
    TritonExperts: SlotTriton,
    Nvfp4TritonExperts: SlotNvfp4Triton,
    MarlinExperts: SlotMarlin,
}


def put_on_slots(layer: PagedExperts) -> SlotKernel:
    """Make the kernel that vLLM built for a layer of S experts one that runs on slots.

    Raises:
        UnsupportedError: a kernel whose exactness on slots nobody has shown.
    """
    kernel = layer.quant_method.moe_kernel.fused_experts
    on_slots = _ON_SLOTS.get(type(kernel))
    if on_slots is None:
        raise UnsupportedError(
            f"{layer.layer_name}: {type(kernel).__name__} is not among the kernels that give stock's output on slots "
            f"({', '.join(known.__name__ for known in _ON_SLOTS)}).",
            'Choose one with moe_backend: "triton", or "marlin" for 4 bits.',
        )
    if layer.slots < layer.experts and _scales_whole_batch(kernel):
        raise UnsupportedError(
            f"{layer.layer_name}: {type(kernel).__name__} scales the activations of a batch by the largest of them, so "
            "experts that are computed in rounds would change each other's results.",
            'Choose moe_backend "marlin", or a checkpoint with scales per token or block.',
        )
    # The object stays, with all that vLLM put into it; only what it does between its GEMMs and around them is ours.
    kernel.__class__ = on_slots
    if isinstance(kernel, SlotTriton):
        kernel.experts = layer.experts
    made: SlotKernel = kernel
    return made


def _scales_whole_batch(kernel: Any) -> bool:
    """Whether the second GEMM's input has one dynamic scale for all rows (triton_moe.py, `a2_scale_is_global`)."""
    if isinstance(kernel, Nvfp4TritonExperts):  # static, and with a dynamic one for every 16 values
        return False
    dynamic = kernel.quant_dtype is not None and kernel.a2_scale is None and kernel.block_shape is None
    whole = not kernel.per_act_token_quant or kernel.quantization_emulation
    return isinstance(kernel, TritonExperts) and dynamic and whole


def scales_by_chunk(layer: PagedExperts) -> bool:
    """Whether the bytes of a bundle depend on the experts that were processed with it, and its values do not.

    NVFP4 for Marlin: the block scales of all experts of a layer are multiplied by one power of two, which each
    expert's own global scale is divided by (marlin_utils_fp4.py, `_nvfp4_compute_scale_factor`). Both are in the
    bundle.
    """
    experts = layer.quant_method.moe_kernel.fused_experts
    return isinstance(experts, MarlinExperts) and bool(experts.quant_config.use_nvfp4_w4a16)


@contextmanager
def launching(kernel: SlotKernel, rounds: Rounds) -> Iterator[None]:
    """Let the next call of the kernel be these rounds."""
    kernel.rounds = rounds
    try:
        yield
    finally:
        # What a large batch needed must not stay in VRAM with every layer.
        del kernel.rounds


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
        block_shape=None if isinstance(kernel, Nvfp4TritonExperts) else kernel.block_shape,
    )
    context: AbstractContextManager[Any] = override_config(config)
    return context
