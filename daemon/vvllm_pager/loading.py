"""From a checkpoint's raw experts to bundles in the host store, through vLLM's own post-processing.

vLLM creates the raw parameters of all E experts in host RAM (the container's constructor runs under
`torch.device("cpu")`) and fills them. Then, layer by layer, chunks of S experts are built anew on the device with
the quant method's own `create_weights`, processed by its own `process_weights_after_loading`, and every row of what
came out goes to the store. The last chunk's tensors stay: they are the slots, and the kernel, its quant config and
its workspaces are natively those of a layer of S experts. Device memory never holds more than one chunk of one layer,
raw and processed, beyond the slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vvllm_pager import bundle, kernel
from vvllm_pager.bundle import BundleLayout, rows_as_bytes
from vvllm_pager.slot_pool import SlotPool, fill_with_nan
from vvllm_shared.board import Phase
from vvllm_shared.errors import CheckpointError, VvllmError

if TYPE_CHECKING:
    from vvllm_pager.paging import Paging
    from vvllm_pager.routed_experts import PagedExperts

Raw = dict[str, torch.Tensor]

_IDLE_BYTES = 512 << 20
"""Of VRAM that may lie idle while loading: a chunk's tensors may use it again, and giving it back costs time."""

_LARGEST_INPUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "w13_input_scale": torch.amax,
    "w2_input_scale": torch.amax,
    "w13_input_global_scale": torch.amin,  # how often an input fits into the range
    "w2_input_global_scale": torch.amin,
}
"""Static scales of activations, [E] or [E, 2], and which of them vLLM takes for all experts where a kernel that runs on
slots reads them: the input is quantised once (fp8_utils.py, `process_fp8_input_tensor_strategy_moe`; modelopt.py;
oracle/nvfp4.py, `EMULATION`)."""


class LayerLoader:
    """Stands in for the post-processing of one layer's quant method.

    Args:
        layer: the container, its raw parameters created and not yet loaded.
        paging: the engine's.
    """

    def __init__(self, layer: PagedExperts, paging: Paging) -> None:
        self._layer = layer
        self._paging = paging
        method = layer.quant_method
        self._process: Callable[[torch.nn.Module], None] = method.process_weights_after_loading
        self.done = False
        self._arrived: dict[tuple[int, str], set[int]] = {}
        method.process_weights_after_loading = self._on_loaded
        # The chunks are staged here; vLLM would move all E experts to the device at once.
        method.requires_device_loading = False

    def arrived(
        self, param: torch.Tensor, loaded: torch.Tensor, shard_id: str, expert_id: int | None
    ) -> None:
        """Note one tensor from the checkpoint, so that a missing expert is found (vLLM itself counts whole
        parameters, not experts)."""
        experts = self._arrived.setdefault((id(param), shard_id), set())
        whole_stack = loaded.dim() == param.dim() or expert_id is None
        experts.update(range(self._layer.experts) if whole_stack else [expert_id])  # type: ignore[list-item]
        board = self._paging.board
        board.add("bytes_done", loaded.nbytes)
        board.add("progress")

    def raw(self) -> Raw:
        """The raw per-expert parameters by name, aliases included."""
        return {
            name: p.data
            for name, p in self._layer._parameters.items()
            if p is not None and name not in bundle.ROUTING_SPACE
        }

    def _on_loaded(self, module: torch.nn.Module) -> None:
        """What vLLM calls once per layer after all tensors have arrived; the second call finds nothing to do."""
        if self.done:
            return
        paging = self._paging
        try:
            if paging.store is None:  # the first of the layers, whichever vLLM takes first
                _refuse_missing(paging.layers)
                _plan_layers(paging)
            self._fill_store()
        except VvllmError as error:
            paging.board.refuse(error)
            raise
        self.done = True
        self._arrived.clear()
        paging.board.add("layers_done")
        paging.board.add("progress")
        if all(layer.loader.done for layer in paging.layers):
            paging.loaded()

    def arrivals(self) -> dict[tuple[str, str], set[int]]:
        """(parameter, shard) to the experts that the checkpoint had it for."""
        names = {id(p): name for name, p in self._layer._parameters.items()}
        return {(names.get(param, "?"), shard): experts for (param, shard), experts in self._arrived.items()}

    def share_input_scales(self) -> None:
        """Give each expert that of the largest input, before chunks are made: a chunk would take its own largest."""
        raw = self.raw()
        for name in _LARGEST_INPUT.keys() & raw.keys():
            raw[name].fill_(_LARGEST_INPUT[name](raw[name]))

    def build(self, raw: Raw, experts: range) -> dict[str, torch.Tensor]:
        """Build, fill and process a layer of only these experts on the device.

        Returns:
            What its kernel reads, see `bundle.kernel_tensors`.
        """
        layer, method = self._layer, self._layer.quant_method
        count = len(experts)
        for name in self.raw():
            delattr(layer, name)
        # A kernel left in place would make the next processing an update of weights, which skips the repacking.
        method.moe_kernel = None
        method.moe_quant_config = None
        layer.moe_config.num_local_experts = layer.local_num_experts = layer.global_num_experts = count
        with torch.device(self._paging.device):
            method.create_weights(
                layer=layer,
                num_experts=count,
                hidden_size=layer.hidden_size,
                unpadded_hidden_size=layer.moe_config.hidden_dim_unpadded,
                intermediate_size_per_partition=layer.intermediate_size_per_partition,
                params_dtype=layer.params_dtype,
                weight_loader=layer.weight_loader,
                global_num_experts=count,
            )
        for name, data in self.raw().items():
            source = raw[name]
            per_expert = source.shape[:1] == (layer.experts,)
            data.copy_(source[experts.start : experts.stop] if per_expert else source)
        self._process(layer)
        _give_back_idle(self._paging.device)
        return bundle.kernel_tensors(layer)

    def probe(self) -> BundleLayout:
        """Learn the bundle's layout from two small chunks, and put the raw parameters back."""
        layer, raw = self._layer, self.raw()
        kept = {name: layer._parameters[name] for name in raw}
        small = range(min(layer.top_k, layer.experts))
        large = range(min(layer.top_k + 1, layer.experts))
        first = self.build(raw, small)
        tensors = bundle.per_expert(layer, self.build(raw, large), len(large), first, len(small))
        layout = BundleLayout.of(tensors)
        for name in self.raw():
            delattr(layer, name)
        for name, param in kept.items():
            layer.register_parameter(name, param)
        return layout

    def _fill_store(self) -> None:
        layer, raw, paging = self._layer, self.raw(), self._paging
        assert paging.store is not None  # noqa: S101  # planned with the first layer
        paging.board.set("phase", Phase.PROCESSING)
        records = paging.store.region(layer.index)
        starts = [*range(0, layer.experts - layer.slots, layer.slots), layer.experts - layer.slots]
        shared: dict[str, torch.Tensor] | None = None
        filled = 0
        for start in starts:
            chunk = range(start, start + layer.slots)
            tensors = self.build(raw, chunk)
            rest = {name: t for name, t in tensors.items() if name not in layer.layout.names}
            shared = {name: t.clone() for name, t in rest.items()} if shared is None else shared
            bundle.check_chunk(layer, chunk, tensors, shared)
            own_scale = kernel.scales_by_chunk(layer)  # of the kernel that this chunk built
            for part in layer.layout.parts:
                rows = rows_as_bytes(tensors[part.name])
                region = records[start : chunk.stop, part.offset : part.offset + part.nbytes]
                twice = filled - start  # the last chunk overlaps the one before
                if twice > 0 and not own_scale and not torch.equal(region[:twice], rows[:twice].cpu()):
                    raise bundle.refuse(layer, part.name, "depends on which experts are processed together")
                region.copy_(rows)
            filled = chunk.stop
        layer.layout = layer.layout.without_the_same(records)
        slots = {part.name: tensors[part.name] for part in layer.layout.parts}
        pool = SlotPool(slots, records, layer.layout)
        if paging.settings.poison:
            pool.poison()
            for unread in bundle.unread_parameters(layer).values():
                fill_with_nan(unread)
        layer.loaded(pool)


def _give_back_idle(device: torch.device) -> None:
    """Give the GPU what earlier chunks left, before it adds up.

    vLLM loads with an allocator that splits no block of 20 MiB (gpu_worker.py:592): a tensor of 18 MiB, say, takes such
    a block and never one that the chunk before has left.
    """
    if device.type == "cuda" and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _IDLE_BYTES:
        torch.cuda.empty_cache()


def _refuse_missing(layers: list[PagedExperts]) -> None:
    """Refuse a checkpoint that lacks what other experts, or other layers, have."""
    arrivals = [(layer, layer.loader.arrivals()) for layer in layers]
    everywhere = {key for _, arrived in arrivals for key in arrived}
    for layer, arrived in arrivals:
        for name, shard in sorted(everywhere):
            missing = sorted(set(range(layer.experts)) - arrived.get((name, shard), set()))
            if missing and name in layer._parameters:
                raise CheckpointError(
                    f"{layer.layer_name}: the checkpoint has no {shard} of {name} for expert {missing[0]}"
                    + (f" and {len(missing) - 1} others." if missing[1:] else "."),
                    "The checkpoint is incomplete: download it again.",
                )


def _plan_layers(paging: Paging) -> None:
    """Learn every layer's layout (once per shape) and size the slots."""
    known: dict[Any, BundleLayout] = {}
    for layer in paging.layers:
        layer.loader.share_input_scales()
        raw = layer.loader.raw()
        shape = (type(layer.quant_method), layer.top_k, *((n, t.shape, t.dtype) for n, t in raw.items()))
        if shape not in known:
            known[shape] = layer.loader.probe()
        layer.layout = known[shape]
    slots = paging.plan_slots([layer.layout for layer in paging.layers])
    for layer in paging.layers:
        layer.slots = min(slots, layer.experts)
