"""What the daemon says of itself on `/vvllm/status`: one frozen value, one JSON shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    """Where the daemon is in its life."""

    STARTING = "starting"
    LOADING = "loading"
    """Expert tensors arrive from the checkpoint."""
    PROCESSING = "processing"
    """Layers become bundles in the host store."""
    WARMING = "warming"
    """Profiling, kernel compilation, KV cache."""
    READY = "ready"
    RESTARTING = "restarting"
    """The engine died; the next one starts."""
    DRAINING = "draining"
    """Running requests may finish; new ones are refused."""
    FAILED = "failed"
    """It ends, and `error` says why: the last status that `/vvllm/events` shows."""


@dataclass(frozen=True)
class CacheStatus:
    """The expert cache: its shape, and counters since the engine started.

    Attributes:
        brought_ahead: bundles that a guess asked for; those that were not used crossed the link beside `bytes_paged`.
        used_ahead: those that were wanted.
        traces_sent: messages to the policy process about what the router chose.
        traces_dropped: those that it was too slow for.
        advice_applied: layers that took advice; one message may be for all.
        by_layer: for decode and for prefill the counters of each layer, [hits, misses, bytes_paged, waves]; None
            leaves it out.
    """

    layers: int = 0
    experts: int = 0
    slots: int = 0
    bundle_bytes: int = 0
    hits: int = 0
    misses: int = 0
    bytes_paged: int = 0
    brought_ahead: int = 0
    used_ahead: int = 0
    token_waves: int = 0
    pair_waves: int = 0
    steps: int = 0
    traces_sent: int = 0
    traces_dropped: int = 0
    advice_applied: int = 0
    by_layer: Mapping[str, Sequence[Sequence[int]]] | None = None


@dataclass(frozen=True)
class PolicyStatus:
    """The policy process as the daemon sees it; the counters are of the daemon's whole life.

    Attributes:
        state: "live" (it advises the running engine), "fallback" (it does not now) or "off".
        reason: why it is not live.
        epoch: the number of its session with an engine.
        advice_applied: messages that the engine took; one may be for all layers.
        advice_stale: messages for an engine that is gone.
        bad_messages: messages that are not of the protocol, whoever sent them.
        restarts: processes that replaced one that ended.
    """

    state: str = "off"
    pid: int | None = None
    name: str = "off"
    reason: str = ""
    epoch: int = 0
    advice_applied: int = 0
    advice_stale: int = 0
    bad_messages: int = 0
    restarts: int = 0


@dataclass(frozen=True)
class Status:
    """The daemon's state at one moment.

    Attributes:
        progress: 0 to 1 within `stage`, or None where nothing can be counted.
        generation: how many engines this daemon has started.
        requests: requests in flight.
        error: the last failure, as `VvllmError.as_json()["error"]`.
    """

    stage: Stage
    model: str
    boot_id: str
    pid: int
    detail: str = ""
    progress: float | None = None
    generation: int = 0
    engine_pid: int | None = None
    uptime_s: float = 0.0
    requests: int = 0
    cache: CacheStatus = field(default_factory=CacheStatus)
    policy: PolicyStatus = field(default_factory=PolicyStatus)
    versions: dict[str, str] = field(default_factory=dict)
    error: object | None = None

    def as_json(self) -> dict[str, object]:
        """The body of `/vvllm/status`, and of the `status` event that each subscriber gets first."""
        shape = asdict(self)
        if self.cache.by_layer is None:
            del shape["cache"]["by_layer"]
        return shape
