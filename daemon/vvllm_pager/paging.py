"""What the paged layers of one engine share: settings, sizes, the store, scratch on the device, the counters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from vvllm_pager.bundle import BundleLayout
from vvllm_pager.host_store import HostStore
from vvllm_pager.ring import RingThread
from vvllm_pager.settings import KEY, CacheSettings
from vvllm_pager.trace import StepTrace, TraceSender
from vvllm_pager.unverified import refuse_engine, refuse_idle_options
from vvllm_shared import limits
from vvllm_shared.board import Board, Phase
from vvllm_shared.errors import ConfigError, VvllmError
from vvllm_shared.residency import graph_sizes, most_tokens

if TYPE_CHECKING:
    from vvllm_pager.device_resolver import Scratch
    from vvllm_pager.routed_experts import PagedExperts
    from vvllm_pager.staging import Staging

# vLLM's own logger: without a daemon this is a guest in vLLM's log; with one, the daemon logs the same facts.
log = init_logger("vllm.vvllm_pager")


class Paging:
    """One engine's paging. Its layers find it through vLLM's own registry of layers.

    Raises:
        ConfigError: see `CacheSettings.parse`.
        UnsupportedError: an engine that the pager was not verified with.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self.board = Board.from_env()
        try:
            self.settings = CacheSettings.parse(config.additional_config[KEY])
            refuse_engine(config)
            refuse_idle_options(config)
        except VvllmError as error:
            self.board.refuse(error)
            raise
        self.device = torch.device(config.device_config.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        drafts = config.speculative_config
        self.tokens_each = 1 + (drafts.num_speculative_tokens if drafts is not None else 0)
        """Tokens of a request in a decode step, its drafts included."""
        self.layers: list[PagedExperts] = []
        self.store: HostStore | None = None
        self.scratch: Scratch | None = None
        """On a GPU, once the slots are planned."""
        self.staging: Staging | None = None
        """As `scratch`."""
        self.device_tokens = 0
        """The largest batch that is device-driven."""
        self.host_trace: StepTrace | None = None
        self.untold: list[tuple[int, int, torch.Tensor]] = []
        """(step, layer, ids [T, k]) of a step that runs ahead of the device, on their way to the host."""
        self.swept = 0
        """The layer that was planned last without the device's word; the tables of those behind are the host's to read,
        up to the end of the step."""
        self._ring: RingThread | None = None
        self.board.set("phase", Phase.LOADING)

    @classmethod
    def current(cls) -> Paging | None:
        """The paging of the engine under construction; None where the user asked for none."""
        config = get_current_vllm_config()
        if not is_wanted(config):
            return None
        return cls.find(config) or cls(config)

    @classmethod
    def find(cls, config: VllmConfig) -> Paging | None:
        """The paging of the layers that this engine has so far; None while none is paged."""
        for other in _runners(config):
            if other.routed_experts.paging is not None:
                return other.routed_experts.paging
        return None

    @property
    def graphs(self) -> bool:
        """Whether this engine captures CUDA graphs, as far as vLLM has decided: it may still lower the mode."""
        config = self._config.compilation_config
        captures = config.cudagraph_mode != CUDAGraphMode.NONE and bool(config.cudagraph_capture_sizes)
        return self.device.type == "cuda" and captures

    def adopt(self, layer: PagedExperts) -> int:
        """Take in a layer under construction; returns its index.

        Raises:
            ConfigError: CUDA graphs of batches that cannot run in one.
        """
        if self.settings.slots is not None and self.settings.slots >= layer.top_k:
            self._check_graphs(min(self.settings.slots, layer.experts), layer.top_k)
        self.layers.append(layer)
        self.board.set("layers_total", len(self.layers))
        self.board.add("bytes_total", sum(p.nbytes for p in layer.parameters(recurse=False)))
        return len(self.layers) - 1

    def plan_slots(self, layouts: list[BundleLayout]) -> int:
        """Slots per layer, and the host store in the size that all layers need.

        A layer whose bundles have another size has as many slots: where layers are used alike, each byte of slots then
        saves as many bytes of misses in one as in the other, and no other division moves fewer.

        Args:
            layouts: each layer's bundle layout, in order.

        Raises:
            ConfigError: fewer slots than a single token needs, more than there are experts, too small a budget.
        """
        experts = max(layer.experts for layer in self.layers)
        top_k = max(layer.top_k for layer in self.layers)
        budget = self.settings.cache_gb
        slots = self.settings.slots
        if budget is not None:
            per_slot = sum(layout.bundle_bytes for layout in layouts)
            slots = min(int(budget * limits.GIB) // per_slot, experts, limits.SLOTS)
            # Rounded up, so that it is enough.
            least = f"{math.ceil(top_k * per_slot / limits.GIB * 1000) / 1000:.3f} GiB"
        else:
            least = f"slots = {top_k}"
        assert slots is not None  # noqa: S101  # CacheSettings has exactly one of the two
        if slots < top_k:
            raise ConfigError(
                f"expert_cache: {slots} slots a layer, but one token needs {top_k} experts at a time.",
                f"Give at least {least}; below {3 * top_k} slots a cache is usually slower than none.",
            )
        if slots > experts:
            raise ConfigError(
                f"expert_cache: {slots} slots a layer, but the model has {experts} experts a layer.",
                f"Give at most slots = {experts}.",
            )
        if slots < 3 * top_k:
            log.warning(
                "expert_cache: %d slots a layer are less than three times the %d experts of a token: "
                "most are paged in anew for every token.",
                slots,
                top_k,
            )
        self.store = HostStore(
            [(layer.experts, layout.record_bytes) for layer, layout in zip(self.layers, layouts, strict=True)]
        )
        if self.device.type == "cuda":
            from vvllm_pager.device_resolver import Scratch
            from vvllm_pager.staging import Staging

            for layer in self.layers:
                self._check_graphs(min(slots, layer.experts), layer.top_k)
            self.device_tokens = min(
                most_tokens(min(slots, layer.experts), layer.top_k) for layer in self.layers
            )
            self.scratch = Scratch(experts, slots, self.device)
            most = self._config.scheduler_config.max_num_batched_tokens
            self.staging = Staging(max(layout.record_bytes for layout in layouts), most, self.device)
        return slots

    def _check_graphs(self, slots: int, top_k: int) -> None:
        """Refuse CUDA graphs of batches that only the host can page for."""
        if not self.graphs:
            return
        sizes = self._config.compilation_config.cudagraph_capture_sizes
        most, largest = most_tokens(slots, top_k), max(sizes or [0])
        if largest > most:
            raise ConfigError(
                f"expert_cache: CUDA graphs are to be captured for up to {largest} tokens at a time, and with {slots} "
                f"slots and {top_k} experts a token at most {most} run in one.",
                f"Set --compilation-config '{{\"cudagraph_capture_sizes\": {graph_sizes(most)}}}', or --enforce-eager.",
            )

    def loaded(self) -> None:
        """All layers are in the store."""
        assert self.store is not None  # noqa: S101
        if self.scratch is not None:
            self.store.pin()
            self._ring = RingThread(
                self.scratch.ring, [layer.layout.bundle_bytes for layer in self.layers], self.board
            )
            weakref.finalize(self, self._ring.stop)
            self._look_ahead(self.scratch)
        self.board.set("phase", Phase.WARMING)
        # A guess is for the layer behind.
        behind = [layer.experts for layer in self.layers[1:]] + [0]
        kinds = {
            (layer.experts, layer.slots, layer.top_k, following): layer
            for layer, following in zip(self.layers, behind, strict=True)
        }
        for layer in kinds.values():
            layer.warm_up()
        slot_bytes = sum(layer.slots * layer.layout.bundle_bytes for layer in self.layers)
        log.info(
            "Paged experts: %d layers, %s of %s experts in slots, %.2f GiB of slots, %.2f GiB of lanes, "
            "%.2f GiB in the host store",
            len(self.layers),
            "/".join(map(str, sorted({layer.slots for layer in self.layers}))),
            "/".join(map(str, sorted({layer.experts for layer in self.layers}))),
            slot_bytes / limits.GIB,
            self._lane_bytes() / limits.GIB,
            self.store.nbytes / limits.GIB,
        )

    def _lane_bytes(self) -> int:
        """Of VRAM in which records arrive."""
        nbytes = self.staging.nbytes if self.staging is not None else 0
        if self.scratch is not None and self.scratch.foresight is not None:
            nbytes += self.scratch.foresight.lanes.nbytes
        return nbytes

    def _look_ahead(self, scratch: Scratch) -> None:
        from vvllm_pager.foresight import look_ahead

        gate_of = {id(runner.routed_experts): runner.gate for runner in _runners(self._config)}
        gates = [gate_of.get(id(layer)) for layer in self.layers]
        scratch.foresight = look_ahead(gates, self.layers, self.device)
        if scratch.foresight is not None and scratch.foresight.courier is not None:
            weakref.finalize(self, scratch.foresight.courier.stop)
            assert self._ring is not None  # noqa: S101  # made just before
            self._ring.courier = scratch.foresight.courier

    def trace_to(self, sender: TraceSender) -> None:
        """From now on tell `sender` what the routers choose."""
        self.host_trace = StepTrace(sender, len(self.layers))
        if self._ring is not None:
            self._ring.trace = StepTrace(sender, len(self.layers))


def is_wanted(config: VllmConfig) -> bool:
    """Whether the user asked for paging."""
    return KEY in (config.additional_config or {})


def _runners(config: VllmConfig) -> Iterator[MoERunner]:
    for module in config.compilation_config.static_forward_context.values():
        if isinstance(module, MoERunner):
            yield module


def describe(paging: Paging) -> list[dict[str, Any]]:
    """One entry per layer for the daemon's report."""
    return [
        {
            "name": layer.layer_name,
            "experts": layer.experts,
            "slots": layer.slots,
            "top_k": layer.top_k,
            "bundle_bytes": layer.layout.bundle_bytes,
        }
        for layer in paging.layers
    ]
