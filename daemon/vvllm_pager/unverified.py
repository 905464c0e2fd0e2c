"""Engines and layers that the pager was not verified with, each refused by its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import vllm
from vllm import envs
from vllm.config import VllmConfig

from vvllm_pager.settings import KEY
from vvllm_shared import PINNED_VLLM, is_pinned
from vvllm_shared.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from vvllm_pager.routed_experts import PagedExperts


def refuse_engine(config: VllmConfig) -> None:
    """Refuse an engine that the pager was not verified with.

    Raises:
        UnsupportedError: the first reason that there is.
    """
    for reason, hint in _objections(config):
        raise UnsupportedError(f"expert_cache does not work here: {reason}.", hint)


def refuse_layer(layer: PagedExperts) -> None:
    """Refuse a layer whose experts cannot be paged by themselves.

    Args:
        layer: constructed, and not yet loaded.

    Raises:
        UnsupportedError: the first reason that there is.
    """
    method = layer.quant_method
    name = f"{layer.layer_name}: {type(method).__name__}"
    if method.uses_meta_device:
        raise UnsupportedError(
            f"{name} quantises the experts while they are loaded, all at once.",
            "Take a checkpoint that is quantised already, and drop --quantization.",
        )
    if method.moe_kernel is None and getattr(method, "experts_cls", method) is None:
        raise UnsupportedError(
            f"{name} has no kernel on this device.",
            "Take a checkpoint in another format, or another moe_backend.",
        )
    if method.is_monolithic:
        raise UnsupportedError(
            f"{name} routes inside its kernel and cannot be paged.",
            'Choose a modular kernel with moe_backend (for example "triton", or "marlin" for 4 bits).',
        )
    if layer.expert_map_manager.num_fused_shared_experts:
        raise UnsupportedError(
            f"{layer.layer_name}: the shared expert is one of the routed experts here, and no router names it.",
            "Unset VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS.",
        )


def refuse_idle_options(config: VllmConfig) -> None:
    """Refuse an option that would do nothing here.

    Raises:
        ConfigError: by name.
    """
    if config.device_config.device_type == "cuda" and "pair_waves_above" in config.additional_config[KEY]:
        raise ConfigError(
            "expert_cache: pair_waves_above has no effect on a GPU, where large batches always run in exact rounds.",
            "Remove pair_waves_above.",
        )


_MOVES = "and vLLM would move what the pager already holds"
_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
)


def _objections(config: VllmConfig) -> Iterator[tuple[str, str]]:
    """(what is set, what to do) of everything that the pager was not verified with."""
    if not is_pinned(vllm.__version__):
        yield (
            f"vLLM {vllm.__version__} is installed",
            f"Install vllm=={PINNED_VLLM}: paging rests on its internals and was verified with it alone.",
        )
    parallel, offload = config.parallel_config, config.offload_config
    for size in _SIZES:
        if getattr(parallel, size) > 1:
            yield f"{size} is {getattr(parallel, size)}", f"Set --{size.replace('_', '-')} 1."
    switches = [
        (parallel.enable_expert_parallel, "expert parallelism is on", "--enable-expert-parallel"),
        (parallel.enable_eplb, "expert load balancing is on", "--enable-eplb"),
        (parallel.enable_dbo, "dual batch overlap is on", "--enable-dbo"),
        (config.lora_config is not None, "LoRA is on", "--enable-lora"),
        (offload.uva.cpu_offload_gb > 0, f"cpu_offload_gb is set, {_MOVES}", "--cpu-offload-gb"),
        (
            offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size > 0,
            f"prefetch offloading is on, {_MOVES}",
            "--offload-backend and --offload-group-size",
        ),
    ]
    for on, reason, flag in switches:
        if on:
            yield reason, f"Drop {flag}."
    if config.model_config.enable_sleep_mode:
        yield "sleep mode is on", "Drop --enable-sleep-mode."
    drafts = config.speculative_config
    if drafts is not None and drafts.method != "ngram":
        yield (
            f"speculative decoding by {drafts.method} is on, whose drafting model was not verified",
            'Use {"method": "ngram"} in --speculative-config, or drop it.',
        )
    if envs.VLLM_MARLIN_INPUT_DTYPE is not None:
        yield (
            f"VLLM_MARLIN_INPUT_DTYPE is {envs.VLLM_MARLIN_INPUT_DTYPE}, for which vLLM scales all experts together",
            "Unset VLLM_MARLIN_INPUT_DTYPE.",
        )
    if not envs.VLLM_MOE_SKIP_PADDING:
        yield (
            "VLLM_MOE_SKIP_PADDING is 0, so that rows of padding are not told from tokens",
            "Unset VLLM_MOE_SKIP_PADDING.",
        )
