"""How fast this machine moves pinned host memory to the device: by its copy engine, and by the pager's *fill*."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from vvllm_pager import device_resolver
from vvllm_pager.bundle import BundleLayout
from vvllm_pager.device_resolver import DeviceResolver, Scratch
from vvllm_pager.slot_pool import SlotPool

_GB = 1e9
_MIB = 2**20
_BLOCK = 256 * _MIB
_MISSES, _MISS = 64, int(2.5 * _MIB)


def link_speeds() -> dict[str, float]:
    """GB/s (10^9 bytes) of the copy engine by the size of a copy in MiB, 256 MiB in all."""
    source = torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=True)
    source.fill_(1)
    target = torch.empty(_BLOCK, dtype=torch.uint8, device="cuda")

    def speed(nbytes: int) -> float:
        pieces = [slice(at, at + nbytes) for at in range(0, _BLOCK - nbytes + 1, nbytes)]

        def copy() -> None:
            for piece in pieces:
                target[piece].copy_(source[piece], non_blocking=True)

        return len(pieces) * nbytes / _median_seconds(copy) / _GB

    return {f"{mib:g}": speed(int(mib * _MIB)) for mib in (2.5, 9, 256)}


def fill_speed() -> float:
    """GB/s at which *fill* copies 64 misses of 2.5 MiB, launched as the pager would launch it now."""
    fill, nbytes = _fill()
    return nbytes / _median_seconds(fill) / _GB


def slow_down(wanted: float) -> float:
    """Launch *fill* with so few programs and warps that it reads at most at `wanted` GB/s, from now on.

    Returns:
        What it reads at.

    Raises:
        SystemExit: one program of one warp is faster.
    """
    fill, nbytes = _fill()
    found = []
    for launch in product((1, 2, 3, 4), (1, 2, 4, 8)):
        device_resolver._FILLERS, device_resolver._FILLER_WARPS = launch
        found.append((nbytes / _median_seconds(fill, 3) / _GB, launch))
    slower = [(speed, launch) for speed, launch in found if speed <= wanted]
    if not slower:
        raise SystemExit(f"fill reads at {min(found)[0]:.1f} GB/s at least, which is more than {wanted}")
    speed, (device_resolver._FILLERS, device_resolver._FILLER_WARPS) = max(slower)
    return speed


def _fill() -> tuple[Callable[[], None], int]:
    """*fill* over misses of its own, and the bytes that it copies."""
    rows = {"weight": torch.empty(_MISSES, _MISS, dtype=torch.uint8, device="cuda")}
    layout = BundleLayout.of(rows)
    store = torch.ones(_MISSES, layout.record_bytes, dtype=torch.uint8).pin_memory()
    scratch = Scratch(_MISSES, _MISSES, torch.device("cuda"))
    for order in (scratch.miss_experts, scratch.miss_slots):
        order.copy_(torch.arange(_MISSES))
    scratch.misses.fill_(_MISSES)
    layer: Any = SimpleNamespace(pool=SlotPool(rows, store, layout))
    unused: Any = None
    return DeviceResolver(layer, unused, unused, scratch)._fill, store.nbytes


def _median_seconds(work: Callable[[], None], repeats: int = 20) -> float:
    """GPU time, after one run that does not count."""

    def seconds() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    seconds()
    return statistics.median(seconds() for _ in range(repeats))
