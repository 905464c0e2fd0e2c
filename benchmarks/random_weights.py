"""A load format of vLLM's that makes weights up: a model of a real shape without a checkpoint.

vLLM's own "dummy" format draws every weight from one generator; for experts in host RAM (57 GiB in bf16) that takes
minutes, and it leaves scales of four bits at values that no checkpoint has. Here one random expert is copied to all.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

LOAD_FORMAT = "one_random_expert"

_LARGEST_WEIGHT = 0.08
_GLOBAL_SCALE = 448 * 6 / _LARGEST_WEIGHT
"""A divisor: the largest float8 times the largest of four bits is then the largest weight."""


@register_model_loader(LOAD_FORMAT)
class OneRandomExpert(DummyModelLoader):
    """Every expert of every layer gets the same random weights, the rest what vLLM's "dummy" gives it."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """See `DummyModelLoader.load_weights`."""
        drawn: dict[tuple[str, torch.Size, torch.device], torch.Tensor] = {}
        for layer in model.modules():
            experts = isinstance(layer, RoutedExperts)
            for name, tensor in get_layer_tensors(layer).items():
                if name in layer._non_persistent_buffers_set:
                    continue
                if not experts:
                    initialize_single_dummy_weight(tensor)
                    continue
                key = (name, tensor.shape, tensor.device)
                if key not in drawn:
                    drawn[key] = _one_expert(name, tensor)
                tensor.data.copy_(drawn[key].expand_as(tensor))


def _one_expert(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[1, ...] like `tensor` [E, ...]: random and finite, of the size of real weights."""
    like = torch.empty_like(tensor[:1], device="cpu")
    generator = torch.Generator().manual_seed(len(name))
    if "global_scale" in name:
        value = torch.full(like.shape, _GLOBAL_SCALE)
    elif like.dtype == torch.uint8:
        value = torch.randint(0, 256, like.shape, generator=generator)
    elif like.dtype == torch.int32:
        value = torch.randint(-(2**31), 2**31, like.shape, generator=generator)
    elif like.dtype == torch.float8_e4m3fn:
        value = torch.empty(like.shape).uniform_(64, 448, generator=generator)
    elif name.endswith("weight_scale"):
        value = torch.empty(like.shape).uniform_(0, _LARGEST_WEIGHT / 8, generator=generator)
    else:
        value = torch.empty(like.shape).uniform_(-_LARGEST_WEIGHT, _LARGEST_WEIGHT, generator=generator)
    return value.to(like.dtype).to(tensor.device)
