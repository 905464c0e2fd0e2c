"""What `speed.py` tells an engine's process to run, and what that gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30
REPEATS = 3


@dataclass(frozen=True)
class Played:
    """A trace to play."""

    path: str
    """Of a numpy file, see `traces.Trace`."""
    batch: int
    settle: int
    """Steps before the clock starts, so that LRU has forgotten the trace before."""
    predictability: float | None = None
    """Of the guesses that the pager is told; None where nothing is brought ahead."""
    guesses: str | None = None
    """Path of a numpy file, see `traces.guesses`."""


@dataclass(frozen=True)
class Job:
    """What to run."""

    model: str
    result: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    moe_backend: str
    additional_config: Mapping[str, Any]
    traces: list[Played]
    replays: int
    """Of the graph, in one timing; there are `REPEATS`."""
    spans: tuple[int, int]
    """New tokens of the answers whose difference in time is that of decode steps."""
    captured: list[int]
    """Batches whose decode steps vLLM captures in CUDA graphs."""
    prompts: list[int]
    """Tokens of the prompts whose prefill is timed."""
    chunk: int
    """Tokens of a prefill step at most where a prompt is cut; each is also timed as a whole."""
    kv_bytes: int
    slots: int | None = None
    """None for an engine without paging."""
    offload_gib: float = 0.0
    """For vLLM's own `cpu_offload_gb`."""
    link_gbps: float | None = None
    """To slow *fill* down to."""
    profile: bool = False

    @property
    def steps(self) -> int:
        """Steps of a trace that all of this takes, prefills and steps scheduled ahead included."""
        return (
            REPEATS * (self.replays + sum(self.spans) + 16)
            + 64
            + max((t.settle for t in self.traces), default=0)
        )


@dataclass(frozen=True)
class Decode:
    """One engine under one trace."""

    graph_ms: list[float]
    """A replay of the decode graph on the GPU, by repeat; empty where the batch is not captured."""
    generate_ms: float
    """A step of `LLM.generate`, sampling and scheduling included."""
    hits: int
    misses: int
    """Of all timed replays by the pager's counters, of the steps of `LLM.generate` where there is no graph."""
    steps: int
    """That were counted."""
    profile: list[tuple[str, float, float]]
    """(kernel, microseconds a step, launches a step), the longest first."""
    brought: int = 0
    used: int = 0
    """Bundles that were brought ahead, and those of them that were wanted."""


@dataclass(frozen=True)
class Prefill:
    """A prompt's first token."""

    tokens: int
    chunk: int
    """Tokens of a step at most."""
    ms: list[float]
    """From the request to its only token, by repeat."""
    paged_bytes: float
    """That the pager loaded for one prompt."""
    activation_bytes: int
    """The most that PyTorch held beyond what it holds between requests."""


@dataclass(frozen=True)
class Measured:
    """What one engine gave."""

    gpu: str
    runner: str
    kernel: str
    vram_gib: float
    """Of the whole process, by NVML, after the last trace."""
    vram_highest_gib: float
    """While loading, at most."""
    start_s: float
    bundle_bytes: int = 0
    link_gbps: dict[str, float] = field(default_factory=dict)
    fill_gbps: float = 0.0
    """What *fill* reads from host memory at, by itself."""
    decode: list[Decode] = field(default_factory=list)
    prefill: list[Prefill] = field(default_factory=list)
