"""Keeps Dynamo out of the paged layers on the CPU backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config

from vvllm_pager.settings import KEY


class OpaqueRunner:
    """Mixed into vLLM's runners: with paging the layer is one opaque operator on every platform.

    vLLM's CPU backend calls the layer as plain Python, which Dynamo would trace; reading the router's ids on the
    host cannot be traced. vLLM registers the same operator that CUDA uses on the CPU too.
    """

    _shared_experts: Any

    def _select_forward(self) -> Callable[..., Any]:
        if KEY not in (get_current_vllm_config().additional_config or {}):
            return super()._select_forward()  # type: ignore[misc]
        ops = torch.ops.vllm
        return ops.moe_forward if self._shared_experts is None else ops.moe_forward_shared
