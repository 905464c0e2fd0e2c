"""What the tests of the policy process share."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vvllm_shared.messages import LayerShape
from vvllm_shared.paths import RuntimePaths

PEERS = str(Path(__file__).with_name("policy_peers.py"))
LAYERS = [LayerShape(f"model.layers.{index}.mlp.experts", 8, 4, 2, 1 << 20) for index in range(3)]


@contextmanager
def runtime_directory() -> Iterator[RuntimePaths]:
    """A runtime directory with a short name: pytest's own are too long for a socket's path."""
    root = Path(tempfile.mkdtemp(prefix="vvllm-"))
    try:
        paths = RuntimePaths(root)
        paths.private.mkdir(mode=0o700)
        yield paths
    finally:
        shutil.rmtree(root)


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for a condition that the event loop brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)
