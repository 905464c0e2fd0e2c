"""The captured CUDA graph of a decode step: find it, time it, take it apart."""

from __future__ import annotations

from typing import Any

import torch


def find_graph(runner: Any, batch: int) -> Any:
    """The captured graph of a decode step of `batch` tokens, in either of vLLM's model runners.

    Raises:
        SystemExit: there is none.
    """
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is not None:  # v1/worker/gpu/cudagraph_utils.py, CudaGraphManager.graphs
        graphs = {d.num_tokens: graph for d, graph in manager.graphs.items() if d.cg_mode.name == "FULL"}
    else:  # compilation/cuda_graph.py
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        graphs = {
            descriptor.num_tokens: entry.cudagraph
            for wrapper in CUDAGraphWrapper._all_instances
            if wrapper.runtime_mode.name == "FULL"
            for descriptor, entry in wrapper.concrete_cudagraph_entries.items()
            if entry.cudagraph is not None
        }
    if batch not in graphs:
        raise SystemExit(
            f"{type(runner).__module__} captured no full decode graph for {batch} tokens, only for {sorted(graphs)}"
        )
    return graphs[batch]


def mark_rows_as_tokens(runner: Any, batch: int) -> None:
    """Padding rows need no experts; the graph reads the mask from the runner's buffer."""
    buffers = getattr(runner, "input_buffers", runner)
    mask = getattr(buffers, "is_padding", None)
    if mask is not None:
        with torch.inference_mode():  # vLLM may have made the buffer in it
            mask[:batch].fill_(False)


def replay_ms(graph: Any, replays: int) -> float:
    """Milliseconds of GPU time for one of `replays` replays."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / replays


def profile(graph: Any, replays: int = 3) -> list[tuple[str, float, float]]:
    """(kernel, microseconds a replay, launches a replay) of the 25 kernels that take longest."""

    def traced(count: int) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(count):
                graph.replay()
            torch.cuda.synchronize()
        return profiler

    traced(1)  # the first one starts the tracing
    rows = [
        (event.key, event.self_device_time_total / replays, event.count / replays)
        for event in traced(replays).key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row[1])[:25]
