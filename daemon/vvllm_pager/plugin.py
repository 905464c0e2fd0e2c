"""Registration: every in-tree expert container is replaced by name, and the layer that finds a model without any.

vLLM looks replacements up by the exact class name (`PluggableLayer.__new__`), so each subclass with a name of its
own needs an entry. A class without `expert_cache` in the engine's `additional_config` behaves as vLLM's own.
"""

from __future__ import annotations

import torch
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.dbrx import DbrxExperts
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts
from vllm.platforms import current_platform

from vvllm_pager.dense_models import CheckedLogitsProcessor
from vvllm_pager.routed_experts import PagedExperts

CONTAINERS = (RoutedExperts, GptOssRoutedExperts, DbrxExperts, TransformersRoutedExperts)


def register_layers() -> None:
    """Enter a paged subclass for each container, and the look at models without one."""
    _allow_tiles()
    for container in CONTAINERS:
        paged = type(f"Paged{container.__name__}", (PagedExperts, container), {})
        PluggableLayer.register_oot(paged, name=container.__name__)
    PluggableLayer.register_oot(CheckedLogitsProcessor, name=LogitsProcessor.__name__)


def _allow_tiles() -> None:
    """Ask Linux for the use of AMX, which each process must before its first such instruction, or it dies of it.

    vLLM's attention for CPUs has these instructions and does not ask (v1/attention/backends/cpu_attn.py chooses "amx"
    by the CPU alone); until oneDNN happens to ask for a large product, a worker whose first prompt is short is killed.
    """
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
