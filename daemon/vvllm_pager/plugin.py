"""Registration: every in-tree expert container is replaced by name.

vLLM looks replacements up by the exact class name (`PluggableLayer.__new__`), so each subclass with a name of its
own needs an entry. A class without `expert_cache` in the engine's `additional_config` behaves as vLLM's own.
"""

from __future__ import annotations

from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.dbrx import DbrxExperts
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts

from vvllm_pager.routed_experts import PagedExperts

CONTAINERS = (RoutedExperts, GptOssRoutedExperts, DbrxExperts, TransformersRoutedExperts)


def register_layers() -> None:
    """Enter a paged subclass for each container."""
    for container in CONTAINERS:
        paged = type(f"Paged{container.__name__}", (PagedExperts, container), {})
        PluggableLayer.register_oot(paged, name=container.__name__)
