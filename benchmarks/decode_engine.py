"""One engine of `decode_speed`, in a process of its own: start it, play each trace, time its captured decode graph."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GIB = 2**30
_PROMPT = 8
_WARM_UP = 64
_SHORT, _LONG = 32, 160
REPEATS = 3
GENERATED = REPEATS * (_SHORT + _LONG + 8)
"""Steps of a trace that the end-to-end runs take, prefills and steps scheduled ahead included."""


@dataclass(frozen=True)
class Job:
    """What to run."""

    model: str
    result: str
    shape: tuple[int, int, int, int]
    """(layers, steps, batch, top_k) of the traces."""
    traces: list[str]
    """Files of numpy, one for each hit rate."""
    settle: int
    """Replays before the clock starts, so that LRU has forgotten the trace before."""
    replays: int
    """Of the graph, in one timing; there are `REPEATS`."""
    slots: int | None
    """None for the stock engine."""
    profile: bool


@dataclass(frozen=True)
class Timing:
    """One engine under one trace."""

    graph_ms: list[float]
    """A replay of the decode graph on the GPU, by repeat."""
    generate_ms: float
    """A step of `LLM.generate`, sampling and scheduling included."""
    hits: int | None
    misses: int | None
    """Of all timed replays, by the pager's counters; None where nothing counts."""
    profile: list[tuple[str, float, float]]
    """(kernel, microseconds a step, launches a step), the longest first."""


@dataclass(frozen=True)
class Measured:
    """What one engine gave."""

    gpu: str
    runner: str
    kernel: str
    vram_gib: float
    """Held after the last trace, beyond what CUDA itself takes at its start."""
    start_s: float
    bundle_bytes: int | None
    link_gbps: dict[str, float]
    timings: list[Timing]


def run(job: Job) -> Measured:
    """Start the engine in this process and measure it under each trace."""
    import torch
    from decode_graph import find_graph
    from decode_link import link_speeds
    from decode_router import STRATEGY, TracePlayer, install

    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = STRATEGY

    link = link_speeds() if job.slots is not None else {}
    free_before = torch.cuda.mem_get_info()[0]
    player = TracePlayer(job.shape, "cuda")
    install(player)
    started = time.monotonic()
    llm = start(job)
    start_s = time.monotonic() - started
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    _, _, batch, _ = job.shape
    graph = find_graph(runner, batch)
    bundle_bytes = _bundle_bytes(llm, job.shape[0]) if job.slots is not None else None
    generate(llm, batch, _WARM_UP)  # its last step's inputs are what the replays compute
    timings = [_measure(llm, runner, graph, player, job, Path(path)) for path in job.traces]
    return Measured(
        torch.cuda.get_device_name(),
        type(runner).__module__,
        _kernel_name(runner),
        (free_before - torch.cuda.mem_get_info()[0]) / GIB,
        start_s,
        bundle_bytes,
        link,
        timings,
    )


def start(job: Job, **changes: Any) -> Any:
    """The `vllm.LLM` of a job; `changes` override its arguments."""
    import decode_model
    from vllm import LLM

    _, _, batch, _ = job.shape
    arguments: dict[str, Any] = {
        "load_format": decode_model.LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": batch,
        "kv_cache_memory_bytes": GIB,
        # Otherwise unused then, but vLLM wants this share of the device free (v1/worker/utils.py:716).
        "gpu_memory_utilization": 0.01,
        "enable_prefix_caching": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [batch],
        },
    }
    if job.slots is not None:
        from vvllm_msd.engine_arguments import WORKER_EXTENSION

        _register_pager()
        arguments |= {
            "additional_config": {"expert_cache": {"slots": job.slots}},
            "worker_extension_cls": WORKER_EXTENSION,
        }
    return LLM(model=job.model, **arguments | changes)


def _register_pager() -> None:
    """Where this project is on the path and not installed, vLLM finds no entry point of it."""
    from importlib.metadata import entry_points

    if "vvllm_pager" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        import vvllm_pager

        vvllm_pager.register()


def generate(llm: Any, batch: int, tokens: int) -> float:
    """Seconds for `tokens` new tokens of each of `batch` short prompts."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [100 + 31 * row + i for i in range(_PROMPT)]} for row in range(batch)]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    took = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return took


def _measure(llm: Any, runner: Any, graph: Any, player: Any, job: Job, trace: Path) -> Timing:
    import torch
    from decode_graph import mark_rows_as_tokens, profile, replay_ms

    _, _, batch, _ = job.shape
    torch.cuda.synchronize()  # vLLM schedules steps ahead
    player.play(np.load(trace))
    mark_rows_as_tokens(runner, batch)
    torch.cuda.synchronize()
    for _ in range(job.settle):
        graph.replay()
    before = _counters(runner)
    graph_ms = [replay_ms(graph, job.replays) for _ in range(REPEATS)]
    after = _counters(runner)
    played = player.position()
    wanted = job.settle + REPEATS * job.replays
    assert played == wanted, f"{wanted} replays played {played} steps: the router is not in the graph"
    kernels = profile(graph) if job.profile else []
    spans = [(generate(llm, batch, _SHORT), generate(llm, batch, _LONG)) for _ in range(REPEATS)]
    generate_ms = statistics.median(1e3 * (long - short) / (_LONG - _SHORT) for short, long in spans)
    gained = {name: after[name] - before[name] for name in after}
    counted = sum(gained.values()) > 0
    return Timing(
        graph_ms,
        generate_ms,
        gained["hits"] if counted else None,
        gained["misses"] if counted else None,
        kernels,
    )


def _counters(runner: Any) -> dict[str, int]:
    """The pager's hits and misses so far; zeros in a stock engine."""
    import torch

    torch.cuda.synchronize()
    time.sleep(0.2)  # the pager counts device-driven steps a moment later
    paging = next((p for m in runner.get_model().modules() if (p := getattr(m, "paging", None))), None)
    board = paging.board.read() if paging is not None else {}
    return {name: board.get(name, 0) for name in ("hits", "misses")}


def _bundle_bytes(llm: Any, layers: int) -> int:
    report = llm.collective_rpc("pager_report")[0]
    assert not report["unpaged"], f"not paged: {report['unpaged']}"
    assert len(report["layers"]) == layers, f"{len(report['layers'])} layers are paged of {layers}"
    sizes = {layer["bundle_bytes"] for layer in report["layers"]}
    assert len(sizes) == 1, sizes
    return int(sizes.pop())


def _kernel_name(runner: Any) -> str:
    methods = (getattr(m, "quant_method", None) for m in runner.get_model().modules())
    kernels = {type(k.fused_experts).__name__ for m in methods if (k := getattr(m, "moe_kernel", None))}
    return "/".join(sorted(kernels))
