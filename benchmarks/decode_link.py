"""How fast this machine's copy engine moves pinned host memory to the device."""

from __future__ import annotations

import statistics

import torch

_MIB = 2**20
_BLOCK = 256 * _MIB


def link_speeds() -> dict[str, float]:
    """GB/s (10^9 bytes) by the size of a copy in MiB, each the median of 20 timings of 256 MiB in all."""
    source = torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=True)
    source.fill_(1)
    target = torch.empty(_BLOCK, dtype=torch.uint8, device="cuda")
    speeds = {f"{mib:g}": _median_speed(source, target, int(mib * _MIB)) for mib in (2.5, 9, 256)}
    del source, target
    torch.cuda.empty_cache()
    return speeds


def _median_speed(source: torch.Tensor, target: torch.Tensor, nbytes: int) -> float:
    pieces = [slice(at, at + nbytes) for at in range(0, len(source) - nbytes + 1, nbytes)]

    def seconds() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for piece in pieces:
            target[piece].copy_(source[piece], non_blocking=True)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    seconds()
    return len(pieces) * nbytes / statistics.median(seconds() for _ in range(20)) / 1e9
