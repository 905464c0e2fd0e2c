"""A quantisation method of our own for the CPU, whose per-expert scales only the kernel object holds.

Real formats with such tensors need kernels that few CPUs have. This one divides each expert's
down projection by a power of two and gives it back through the router's weights, exactly: an expert that is paged
without its scale is wrong by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

NAME = "toy_scaled"


class ToyMoEMethod(UnquantizedFusedMoEMethod):
    """`variant` chooses what else the kernel holds: nothing, a scale for all experts' inputs ("static"), or something
    that cannot be paged; with "unread" the layer keeps a parameter that nothing reads, with "held" the kernel does.
    "first" is for the first layer alone. "zeros" adds a zero point of each expert to the bits of its first weights,
    "symmetric" the same to all.
    """

    def __init__(self, moe: Any, variant: str) -> None:
        super().__init__(moe)
        self.variant = variant

    def create_weights(self, layer: Any, num_experts: int, **named: Any) -> None:
        super().create_weights(layer, num_experts, **named)
        if self.variant == "static":
            scale = torch.nn.Parameter(torch.ones(num_experts), requires_grad=False)
            layer.register_parameter("w2_input_scale", scale)
            set_weight_attrs(scale, {"weight_loader": named["weight_loader"]})

    def process_weights_after_loading(self, layer: Any) -> None:
        largest = layer.w2_weight.data.float().abs().amax(dim=(1, 2))
        scales = torch.exp2(torch.floor(torch.log2(largest)) + 10)
        layer.w2_weight.data /= scales[:, None, None].to(layer.w2_weight.dtype)
        super().process_weights_after_loading(layer)
        experts = self.moe_kernel.fused_experts
        experts.toy_scales = scales
        if self.variant in ("zeros", "symmetric"):
            bits = layer.w13_weight.data.view(torch.int16)
            zeros = (
                bits.sum(dim=(1, 2)).remainder(997)
                if self.variant == "zeros"
                else torch.full((len(bits),), 7)
            )
            zero_points = torch.nn.Parameter(zeros.to(torch.int16), requires_grad=False)
            layer.register_parameter("w13_zero_point", zero_points)
            bits += zero_points[:, None, None]  # which wraps, and so goes back exactly
        if self.variant in ("unread", "held"):
            kept = torch.nn.Parameter(scales if self.variant == "held" else 1 / scales, requires_grad=False)
            layer.register_parameter("w2_weight_global_scale", kept)
        if self.variant == "static":
            replace_parameter(layer, "w2_input_scale", layer.w2_input_scale.max())
        elif self.variant == "reduction":
            experts.toy_maximum = largest.max()
        elif self.variant == "relative":
            experts.toy_relative = largest - largest.mean()
        elif self.variant == "opaque":
            experts.toy_opaque = torch.Generator()
        elif self.variant == "transposed":
            experts.toy_transposed = torch.stack([scales, scales])

    def apply(
        self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *rest: Any, **named: Any
    ) -> torch.Tensor:
        scales = self.moe_kernel.fused_experts.toy_scales
        weights = topk_weights * scales[topk_ids.long()].to(topk_weights.dtype)
        if self.variant == "static":
            weights = weights * layer.w2_input_scale
        with _decoded(layer):
            return super().apply(layer, x, weights, topk_ids, *rest, **named)


@contextmanager
def _decoded(layer: Any) -> Iterator[None]:
    """Within it the first weights are without their zero points, where they have some."""
    encoded = layer.w13_weight.data
    if (zero_points := getattr(layer, "w13_zero_point", None)) is not None:
        bits = encoded.view(torch.int16) - zero_points[:, None, None]
        layer.w13_weight.data = bits.view(encoded.dtype)
    try:
        yield
    finally:
        layer.w13_weight.data = encoded


@register_quantization_config(NAME)
class ToyConfig(QuantizationConfig):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ToyConfig:
        return cls(config.get("variant", "plain"))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            if self.variant == "first" and "layers.0." not in prefix:
                return None  # this layer's experts are not quantised
            return ToyMoEMethod(layer.moe_config, self.variant)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
