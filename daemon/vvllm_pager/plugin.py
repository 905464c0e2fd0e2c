"""Registration: every in-tree expert container is replaced by name, and the layer that finds a model without any.

vLLM looks replacements up by the exact class name (`PluggableLayer.__new__`), so each subclass with a name of its
own needs an entry. A class without `expert_cache` in the engine's `additional_config` behaves as vLLM's own.
"""

from __future__ import annotations

from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.dbrx import DbrxExperts
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts

from vvllm_pager.dense_models import CheckedLogitsProcessor
from vvllm_pager.routed_experts import PagedExperts

CONTAINERS = (RoutedExperts, GptOssRoutedExperts, DbrxExperts, TransformersRoutedExperts)


def register_layers() -> None:
    """Enter a paged subclass for each container, and the look at models without one."""
    for container in CONTAINERS:
        paged = type(f"Paged{container.__name__}", (PagedExperts, container), {})
        PluggableLayer.register_oot(paged, name=container.__name__)
    PluggableLayer.register_oot(CheckedLogitsProcessor, name=LogitsProcessor.__name__)
