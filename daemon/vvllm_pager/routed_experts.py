"""The paged expert container: vLLM's `RoutedExperts` with its weights in host RAM and S slots on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context

from vvllm_pager.bundle import BundleLayout
from vvllm_pager.host_resolver import HostResolver
from vvllm_pager.kernel import put_on_slots
from vvllm_pager.loading import LayerLoader
from vvllm_pager.paging import Paging
from vvllm_pager.slot_pool import SlotPool
from vvllm_pager.unverified import refuse_layer
from vvllm_shared.errors import VvllmError

if TYPE_CHECKING:
    from vvllm_pager.device_resolver import DeviceResolver


class PagedExperts(torch.nn.Module):
    """Mixed into vLLM's expert containers, before them.

    Without `expert_cache` in the engine's `additional_config` it only passes on.
    """

    # Of RoutedExperts, which is always behind this class in the order of resolution.
    layer_name: str
    quant_method: Any
    moe_config: Any
    expert_map_manager: Any
    hidden_size: int
    intermediate_size_per_partition: int
    params_dtype: torch.dtype
    local_num_experts: int
    global_num_experts: int
    top_k: int

    # Known from construction on
    paging: Paging | None = None
    """None without `expert_cache`."""
    index: int
    experts: int
    loader: LayerLoader

    # Known once the layer is loaded
    layout: BundleLayout
    slots: int
    pool: SlotPool
    _on_host: HostResolver
    _on_device: DeviceResolver | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        paging = Paging.current()
        if paging is None:
            super().__init__(*args, **kwargs)
            return
        with torch.device("cpu"):
            super().__init__(*args, **kwargs)
        self.paging = paging
        self.experts = self.global_num_experts
        try:
            refuse_layer(self)
            self.index = paging.adopt(self)
            self.loader = LayerLoader(self, paging)
        except VvllmError as error:
            paging.board.refuse(error)
            raise

    def loaded(self, pool: SlotPool) -> None:
        """All bundles are in the store, and the kernel that vLLM built last is for the slots of `pool`.

        Raises:
            UnsupportedError: a kernel that cannot run on slots.
        """
        assert self.paging is not None  # noqa: S101  # only a paged layer has a loader
        self.pool = pool
        kernel = None
        if self.paging.scratch is not None:
            from vvllm_pager.device_resolver import DeviceResolver

            kernel = put_on_slots(self)
            self._on_device = DeviceResolver(self, kernel, self.paging, self.paging.scratch)
        self._on_host = HostResolver(self, kernel, self.paging)

    def warm_up(self) -> None:
        """Compile what device-driven steps launch, before a request waits for it."""
        if self._on_device is not None:
            assert self.paging is not None  # noqa: S101
            self._on_device.warm_up(self.top_k, self.paging.device_tokens)

    def weight_loader(
        self, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's loader, and a note of what arrived."""
        result = super().weight_loader(param, loaded_weight, *args, **kwargs)
        if self.paging is not None and result is not False:
            named = dict(zip(("weight_name", "shard_id", "expert_id"), args, strict=False)) | kwargs
            self.loader.arrived(param, loaded_weight, named["shard_id"], named.get("expert_id"))
        return result

    # vLLM asks the loader itself whether it understands experts (routed_experts.py, last line).
    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `RoutedExperts.forward_modular`; the ids are experts, the kernel gets slots."""
        if self.paging is None:
            return super().forward_modular(x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        # vLLM reads the shared experts here only for all-to-all back ends (modular_kernel.py:1379), which need
        # expert parallelism: refused.
        if torch.compiler.is_compiling():
            return torch.ops.vvllm.paged_experts(x, topk_weights, topk_ids, self.layer_name)
        return self.run_paged(x, topk_weights, topk_ids)

    def run_paged(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """The experts' output [T, H]; ids [T, k] are experts. The size of the batch alone decides who pages."""
        compute = super().forward_modular
        assert self.paging is not None  # noqa: S101
        if self._on_device is not None and len(x) <= self.paging.device_tokens:
            return self._on_device.run(x, topk_weights, topk_ids, compute)
        return self._on_host.run(x, topk_weights, topk_ids, compute)


@torch.library.custom_op("vvllm::paged_experts", mutates_args=())
def _paged_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    """One paged layer as an operator that Dynamo does not look into.

    vLLM's CPU backend traces the MoE layer as plain Python down to the kernel (moe_runner.py:309), and reading ids
    on the host cannot be traced. Where stock's graph calls its kernel, ours calls this; the rest of the graph, the
    router and shared experts too, is stock's.
    """
    runner = get_forward_context().no_compile_layers[layer_name]
    return runner.routed_experts.run_paged(x, topk_weights, topk_ids)


@_paged_experts.register_fake
def _(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(x)
