"""Registration: every in-tree expert container, and the runner around it, is replaced by name.

vLLM looks replacements up by the exact class name (`PluggableLayer.__new__`), so each subclass with a name of its
own needs an entry. A class without `expert_cache` in the engine's `additional_config` behaves as vLLM's own.
"""

from __future__ import annotations

from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models.dbrx import DbrxExperts
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.model_executor.models.transformers.moe import TransformersMoERunner, TransformersRoutedExperts

from vvllm_pager.routed_experts import PagedExperts
from vvllm_pager.runner import OpaqueRunner

CONTAINERS = (RoutedExperts, GptOssRoutedExperts, DbrxExperts, TransformersRoutedExperts)
RUNNERS = (MoERunner, TransformersMoERunner)


def register_layers() -> None:
    """Enter a paged subclass for each container and an opaque one for each runner."""
    for container in CONTAINERS:
        paged = type(f"Paged{container.__name__}", (PagedExperts, container), {})
        PluggableLayer.register_oot(paged, name=container.__name__)
    for runner in RUNNERS:
        opaque = type(f"Opaque{runner.__name__}", (OpaqueRunner, runner), {})
        PluggableLayer.register_oot(opaque, name=runner.__name__)
