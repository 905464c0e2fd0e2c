"""What the daemon says of itself on `/vvllm/status`: one frozen value, one JSON shape."""

from __future__ import annotations

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


@dataclass(frozen=True)
class CacheStatus:
    """The expert cache: its shape, and counters since the engine started."""

    layers: int = 0
    experts: int = 0
    slots: int = 0
    bundle_bytes: int = 0
    hits: int = 0
    misses: int = 0
    bytes_paged: int = 0
    token_waves: int = 0
    pair_waves: int = 0
    steps: int = 0


@dataclass(frozen=True)
class PolicyStatus:
    """The policy process as the daemon sees it; `reason` says why it is not running."""

    state: str = "off"
    pid: int | None = None
    name: str = "off"
    reason: str = ""


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
        return asdict(self)
