"""What the engine is started with: environment, options by name, and the arguments of vLLM's front end.

With `vvllm_msd.engine` the part of the daemon that touches vLLM, under the same contract test.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vvllm_msd.device_options import moe_backend, quantization
from vvllm_shared import PINNED_VLLM
from vvllm_shared.board import ENV as BOARD_ENV
from vvllm_shared.errors import ConfigError
from vvllm_shared.limits import GIB

WORKER_EXTENSION = "vvllm_pager.worker.PagerWorker"
_OURS = {
    "model": "Use the key model.",
    "served_model_name": "The model is served under the name of its directory.",
    "worker_cls": "The pager works in vLLM's own.",
    "worker_extension_cls": "It is the pager's.",
    "trust_remote_code": "Remove it: Python code of a model is never executed here.",
    "max_num_seqs": "Use server.max_num_seqs.",
    "max_model_len": "Use server.max_model_len.",
    "reasoning_parser": "Use server.reasoning_parser.",
    "tool_call_parser": "Use server.tool_parser.",
    "enable_auto_tool_choice": "Use server.tool_parser.",
}
"""Engine options that the daemon sets, and what to do instead."""


@dataclass(frozen=True)
class EngineSpec:
    """What to start.

    Attributes:
        model: directory of the checkpoint.
        name: the model's name in the API.
        expert_cache: the pager's options, {"slots": n} or {"cache_gb": x}.
        fingerprint: names the checkpoint for the policy's profiles.
        moe_layers: numbers of the layers that have experts; exactly these must be paged.
        options: the daemon's choices, fields of `AsyncEngineArgs` and of vLLM's front end.
        on_gpu: more of them where the engine runs on a GPU.
        user_options: the configuration's `[engine]` table, which overrides `options`.
        fit_context: `max_model_len` is a wish, to be shortened to what the KV cache holds.
    """

    model: Path
    name: str
    expert_cache: Mapping[str, int | float]
    fingerprint: str
    moe_layers: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: Mapping[str, Any] = field(default_factory=dict)
    user_options: Mapping[str, Any] = field(default_factory=dict)
    fit_context: bool = False


def set_common_environment(env: MutableMapping[str, str]) -> None:
    """What every engine of ours reads: no network, no usage statistics; the user's choices stand."""
    env.update({"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    env.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if importlib.util.find_spec("flashinfer") is None:
        env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def set_environment(rpc_dir: Path, board_fd: int, env: MutableMapping[str, str] = os.environ) -> None:
    """What vLLM and its processes read from the environment. Call it before vllm is imported.

    What the user may choose is only a default here. The rest is ours: a forked engine would inherit the daemon's
    listening socket and lock, and ipc files belong into the private directory.
    """
    set_common_environment(env)
    env.update(
        {
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_RPC_BASE_PATH": str(rpc_dir),
            BOARD_ENV: f"/proc/{os.getpid()}/fd/{board_fd}",
        }
    )
    # Its process removes the shared memory of a killed engine, and would say so at each end of the daemon.
    env.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    # A large model may load for longer than vLLM's 10 minutes; the daemon shows the progress instead.
    env.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", "86400")


def split_options(spec: EngineSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of `AsyncEngineArgs` and those of the front end.

    Raises:
        ConfigError: an option that vLLM does not have, or that the daemon sets itself.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs

    engine_names = {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    app_names = {f.name for f in dataclasses.fields(BaseFrontendArgs)}
    for name in spec.user_options:
        if name in _OURS:
            raise ConfigError(f"engine.{name} is set by the daemon.", _OURS[name])
        if name not in engine_names | app_names:
            raise ConfigError(f"vLLM {PINNED_VLLM} has no option {name}.", f"Remove engine.{name}.")
    # vLLM's bar counts files; the daemon shows its own, which counts what the pager has done.
    given = {"use_tqdm_on_load": False, **spec.options, **platform_options(spec), **spec.user_options}
    additional = dict(given.pop("additional_config", {}))
    if "expert_cache" in additional:
        raise ConfigError(
            "engine.additional_config has an expert_cache.", "Use cache.slots or cache.cache_gb."
        )
    engine = {name: value for name, value in given.items() if name in engine_names} | {
        "model": str(spec.model),
        "served_model_name": [spec.name],
        "worker_extension_cls": WORKER_EXTENSION,
        "additional_config": additional | {"expert_cache": dict(spec.expert_cache)},
    }
    return engine, {name: value for name, value in given.items() if name in app_names - engine_names}


def platform_options(spec: EngineSpec) -> dict[str, Any]:
    """The daemon's choices that rest on vLLM's platform, without those that the user has made.

    Raises:
        CheckpointError: the checkpoint's quantization cannot be read.
    """
    from vllm.platforms import current_platform

    options: dict[str, Any] = {}
    if current_platform.is_cpu():
        # vLLM would compile the model there, for a minute or more at each start.
        options["enforce_eager"] = True
        # Its own KV cache is 92 % of the machine's memory.
        if "gpu_memory_utilization" not in spec.user_options:
            options["kv_cache_memory_bytes"] = GIB
    elif current_platform.is_cuda():
        options |= {**spec.on_gpu, **kernel_options(spec.model)}
    # The same choice by another name, which vLLM would overwrite with ours (engine/arg_utils.py:2757).
    kernels = spec.user_options.get("kernel_config")
    if isinstance(kernels, Mapping) and "moe_backend" in kernels:
        options.pop("moe_backend", None)
    return {name: value for name, value in options.items() if name not in spec.user_options}


def kernel_options(model: Path) -> dict[str, str]:
    """The option that chooses the experts' kernel for the checkpoint in `model`; on the CPU vLLM has one alone.

    Raises:
        CheckpointError: the checkpoint's quantization cannot be read.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return {}
    backend = moe_backend(quantization(model), current_platform.supports_fp8())
    return {} if backend is None else {"moe_backend": backend}


def app_args(options: Mapping[str, Any], config: Any) -> Namespace:
    """The front end's arguments as `vllm serve` would have parsed them.

    Args:
        options: what was given, of engine and front end.
        config: vLLM's own of this engine.

    Raises:
        ValueError, TypeError, KeyError: vLLM refuses them.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import validate_api_server_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    vars(args).update(options)
    args.structured_outputs_config = config.structured_outputs_config  # has the reasoning parser's name
    args.disable_fastapi_docs = True
    validate_parsed_serve_args(args)
    validate_api_server_args(args)
    return args
