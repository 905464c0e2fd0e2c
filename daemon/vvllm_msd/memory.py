"""Is there host memory for the experts? All of them lie in it, whatever the number of slots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vvllm_shared.errors import BusyError
from vvllm_shared.limits import GIB, KIB

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """What a process may still take, and what sets the bound: "machine", or the directory of a cgroup."""

    available: int
    bound: str


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> HostMemory:
    """What this process may still take: the least of what the machine and each of its cgroups (version 2) have left.

    Args:
        proc: where /proc is.
        cgroups: where the unified hierarchy is mounted.
    """
    found = [HostMemory(_available(proc), "machine")]
    for group in _groups(proc, cgroups):
        if (left := _left(group)) is not None:
            found.append(HostMemory(left, str(group)))
    return min(found, key=lambda memory: memory.available)


def check_host_memory(needed: int, memory: HostMemory) -> None:
    """Refuse experts that do not fit.

    Args:
        needed: bytes of all experts.
        memory: what may be taken.

    Raises:
        BusyError: naming both sizes.
    """
    if needed > memory.available:
        where = "this machine" if memory.bound == "machine" else f"the cgroup {memory.bound}"
        raise BusyError(
            f"The model's experts take {needed / GIB:.1f} GiB of host memory, and {where} has "
            f"{memory.available / GIB:.1f} GiB left.",
            "End what else uses memory, raise the limit, or take a smaller or more quantized model.",
        )


def _available(proc: Path) -> int:
    """The kernel's own estimate of what can be taken without swapping."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return next(int(line[1]) * KIB for line in lines if line[0] == "MemAvailable:")


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """The process's cgroup and those around it: each may have a limit."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    directory = cgroups / own
    return [directory, *(parent for parent in directory.parents if parent.is_relative_to(cgroups))]


def _left(group: Path) -> int | None:
    """Bytes that a cgroup may still take; None without a limit. Its cached files count as free, as the machine's do."""
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        if limit == "max":
            return None
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(size) for name, size in pairs if name in ("active_file", "inactive_file"))
        return max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError):  # no memory controller there, or a process that was moved meanwhile
        return None
