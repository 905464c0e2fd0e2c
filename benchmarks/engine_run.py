"""One engine of `speed.py`, in a process of its own: start it, play each trace, time its decode and its prefill."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import numpy as np
from jobs import GIB, REPEATS, Decode, Job, Measured, Played, Prefill

_PROMPT = 8
_WARM_UP = 64


def run(job: Job) -> Measured:
    """Start the engine in this process and measure it."""
    import torch
    from link import fill_speed, link_speeds, slow_down
    from router import STRATEGY, TracePlayer, install
    from vram import Sampler

    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = STRATEGY
    sampler = Sampler()  # before CUDA takes its own share
    link, fill = {}, 0.0
    if job.slots is not None:
        link, fill = link_speeds(), slow_down(job.link_gbps) if job.link_gbps else fill_speed()
        torch.cuda.empty_cache()
    sampler.reset()
    room = max((np.load(trace.path, mmap_mode="r").size for trace in job.traces), default=0)
    player = TracePlayer(job.layers, job.experts, job.top_k, job.hidden, room, "cuda")
    install(player)
    started = time.monotonic()
    llm = start(job)
    start_s = time.monotonic() - started
    highest = sampler.reset()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    decode = [_decode(llm, runner, player, job, trace) for trace in job.traces]
    prefill = [
        _prefill(llm, runner, tokens, chunk)
        for tokens in job.prompts
        for chunk in sorted({min(job.chunk, tokens), tokens})
    ]
    return Measured(
        torch.cuda.get_device_name(),
        type(runner).__module__,
        _kernel_name(runner),
        sampler.now() / GIB,
        highest / GIB,
        start_s,
        _bundle_bytes(llm, job.layers) if job.slots is not None else 0,
        link,
        fill,
        decode,
        prefill,
    )


def start(job: Job) -> Any:
    """The `vllm.LLM` of a job."""
    import random_weights
    from vllm import LLM

    longest = max([*job.prompts, 1024])
    arguments: dict[str, Any] = {
        "load_format": random_weights.LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "max_model_len": longest + 256,
        "max_num_batched_tokens": longest,
        "max_num_seqs": max((trace.batch for trace in job.traces), default=1),
        "kv_cache_memory_bytes": job.kv_bytes,
        # Otherwise unused then, but vLLM wants this share of the device free (v1/worker/utils.py:716).
        "gpu_memory_utilization": 0.01,
        "enable_prefix_caching": False,
        "moe_backend": job.moe_backend,
        "cpu_offload_gb": job.offload_gib,
        "additional_config": dict(job.additional_config),
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": job.captured,
        },
    }
    if job.slots is not None:
        from vvllm_msd.engine_arguments import WORKER_EXTENSION

        _register_pager()
        arguments["additional_config"] |= {"expert_cache": {"slots": job.slots}}
        arguments["worker_extension_cls"] = WORKER_EXTENSION
    return LLM(model=job.model, **arguments)


def _register_pager() -> None:
    """Where this project is on the path and not installed, vLLM finds no entry point of it."""
    from importlib.metadata import entry_points

    if "vvllm_pager" not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        import vvllm_pager

        vvllm_pager.register()


def _generate(llm: Any, batch: int, tokens: int, prompt: int = _PROMPT) -> float:
    """Seconds for `tokens` new tokens of each of `batch` prompts."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [100 + (31 * row + i) % 5000 for i in range(prompt)]} for row in range(batch)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    took = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return took


def _decode(llm: Any, runner: Any, player: Any, job: Job, trace: Played) -> Decode:
    import torch
    from graph import find_graph, mark_rows_as_tokens, profile, replay_ms

    graph = find_graph(runner, trace.batch) if trace.batch in job.captured else None
    if graph is not None:
        _generate(llm, trace.batch, _WARM_UP)  # its last step's inputs are what the replays compute
    torch.cuda.synchronize()  # vLLM schedules steps ahead
    player.play(np.load(trace.path), np.load(trace.guesses) if trace.guesses else None)
    bring_ahead(runner, wanted=trace.guesses is not None)
    graph_ms, kernels = [], []
    before = after = _counters(runner)
    if graph is not None:
        mark_rows_as_tokens(runner, trace.batch)
        torch.cuda.synchronize()
        for _ in range(trace.settle):
            graph.replay()
        before = _counters(runner)
        graph_ms = [replay_ms(graph, job.replays) for _ in range(REPEATS)]
        after = _counters(runner)
        bring_ahead(runner, wanted=trace.guesses is not None)
        played, wanted = player.position(), trace.settle + REPEATS * job.replays
        assert played == wanted, f"{wanted} replays played {played} steps: the router is not in the graph"
        kernels = profile(graph) if job.profile else []
    short, long = job.spans
    pairs = [(_generate(llm, trace.batch, short), _generate(llm, trace.batch, long)) for _ in range(REPEATS)]
    steps = REPEATS * job.replays
    if graph is None:
        after, steps = _counters(runner), REPEATS * (short + long)
    return Decode(
        graph_ms,
        statistics.median(1e3 * (b - a) / (long - short) for a, b in pairs),
        after["decode"][0] - before["decode"][0],
        after["decode"][1] - before["decode"][1],
        steps,
        kernels,
        after["ahead"][0] - before["ahead"][0],
        after["ahead"][1] - before["ahead"][1],
    )


def _prefill(llm: Any, runner: Any, tokens: int, chunk: int) -> Prefill:
    import torch

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    most, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, chunk
    _generate(llm, 1, 1, tokens)
    torch.cuda.synchronize()
    before, held = _counters(runner), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ms = [1e3 * _generate(llm, 1, 1, tokens) for _ in range(REPEATS)]
    scheduler.max_num_scheduled_tokens = most
    paged = _counters(runner)["prefill"][2] - before["prefill"][2]
    return Prefill(tokens, chunk, ms, paged / REPEATS, torch.cuda.max_memory_allocated() - held)


def bring_ahead(runner: Any, *, wanted: bool) -> None:
    """Let the pager ask for bundles ahead from now on, or not, whatever its courier made of the last guesses."""
    from vvllm_pager.guess_kernel import ENABLED

    paging = _paging(runner)
    if paging is not None and paging.scratch.foresight is not None:
        paging.scratch.foresight.counters[ENABLED.value] = int(wanted)


def _paging(runner: Any) -> Any:
    return next((p for m in runner.get_model().modules() if (p := getattr(m, "paging", None))), None)


def _counters(runner: Any) -> dict[str, tuple[int, ...]]:
    """By phase: the pager's hits, misses and paged bytes so far, and under "ahead" the bundles brought ahead and used;
    zeros in an engine without it."""
    import torch

    torch.cuda.synchronize()
    time.sleep(0.2)  # the pager counts device-driven steps a moment later
    paging = _paging(runner)
    if paging is None:
        return dict.fromkeys(("decode", "prefill", "ahead"), (0, 0, 0))
    counted = paging.board.layers(len(paging.layers))
    ahead = (paging.board.get("brought_ahead"), paging.board.get("used_ahead"))
    return {"ahead": ahead} | {
        phase: tuple(np.sum(layers, axis=0)[:3].tolist()) for phase, layers in counted.items()
    }


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
