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


def phase(each: int) -> int:
    """Index into `PHASES`: decode where each request has at most `each` tokens (one and its drafts).

    A graph keeps what it was captured as. Those of uniform batches are decode; so counts, too, what runs in vLLM's
    piecewise graphs, whose small batches may be either.
    """
    context = get_forward_context()
    if context.cudagraph_runtime_mode == CUDAGraphMode.FULL:
        return PHASES.index("decode")
    metadata = context.attn_metadata
    for one in metadata.values() if isinstance(metadata, dict) else [metadata]:
        # Attention back ends tell one or the other (flash_attn.py has the first, flashinfer.py and Mamba's the second).
        if (longest := getattr(one, "max_query_len", None)) is not None:
            return PHASES.index("decode" if longest <= each else "prefill")
        if (prefills := getattr(one, "num_prefills", None)) is not None:
            return PHASES.index("prefill" if prefills else "decode")
    return PHASES.index("decode")
