"""What vLLM's forward context says of the running batch."""

from __future__ import annotations

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.worker.workspace import current_workspace_manager

from vvllm_shared.board import PHASES


def is_warm_up(graphs: bool) -> bool:
    """Whether this forward is one of vLLM's own (profiling, warming up), which belongs to no request.

    Some of vLLM's warm-up steps look like a request's. All come before the graphs are captured, and the workspace is
    locked right after that (v1/worker/gpu/model_runner.py:1121, gpu_model_runner.py:6575).

    Args:
        graphs: whether this engine captures CUDA graphs.
    """
    if get_forward_context().attn_metadata is None:
        return True
    return graphs and not current_workspace_manager().is_locked()


def padding_rows(tokens: int) -> torch.Tensor | None:
    """Mask [tokens] of rows that are not tokens of a request, where the runner says."""
    mask = get_forward_context().is_padding
    return None if mask is None else mask[:tokens]


def phase() -> int:
    """Index into `PHASES`: decode where each request has one token (or its drafts), as under FULL graphs."""
    context = get_forward_context()
    if context.cudagraph_runtime_mode == CUDAGraphMode.FULL:
        return PHASES.index("decode")
    metadata = context.attn_metadata
    first = next(iter(metadata.values()), None) if isinstance(metadata, dict) else metadata
    longest = getattr(first, "max_query_len", 1)
    return PHASES.index("decode" if longest == 1 else "prefill")
