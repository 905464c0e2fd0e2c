"""What the pager's two kernels cost in a captured graph, by themselves.

    python benchmarks/kernel_cost.py

Prints, for a graph of 48 layers of 128 experts and 32 slots, what *resolve* and *fill* add to a layer that misses
nothing and guesses nothing: as launched, without programmatic dependent launch, and without statistics. Then what
*fill* takes for one to eight misses of the bundles of Qwen3-30B-A3B, by the number of its programs, against the copy
engine's time for the same bytes as one block. Each layer reads other experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from link import link_speeds

from vvllm_pager import device_resolver
from vvllm_pager.bundle import BundleLayout
from vvllm_pager.device_resolver import DeviceResolver, Scratch
from vvllm_pager.slot_pool import SlotPool

LAYERS, EXPERTS, SLOTS, TOP_K = 48, 128, 32, 8
MIB = 2**20
NVFP4 = {
    "w13": (2048 * 1536 // 2,),
    "w2": (768 * 2048 // 2,),
    "w13_scale": (2048 * 1536 // 16,),
    "w2_scale": (768 * 2048 // 16,),
    "w13_global": (4,),
    "w2_global": (4,),
}
BF16 = {"w13": (2048 * 1536 * 2,), "w2": (768 * 2048 * 2,)}
"""Bytes of the tensors of a bundle."""


class Layer:
    """A layer's pool and resolver, without a model around it."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        slots = {
            name: torch.zeros(SLOTS, *shape, dtype=torch.uint8, device=device)
            for name, shape in shapes.items()
        }
        layout = BundleLayout.of(slots)
        store = torch.ones(EXPERTS, layout.record_bytes, dtype=torch.uint8).pin_memory()
        self.bundle_bytes = layout.bundle_bytes
        self.scratch = Scratch(EXPERTS, SLOTS, device)
        pool = SlotPool(slots, store, layout)
        layer: Any = SimpleNamespace(pool=pool, experts=EXPERTS, slots=SLOTS, index=0)
        unused: Any = None
        self.resolver = DeviceResolver(layer, unused, unused, self.scratch)


def micros(body: Callable[[int], None]) -> float:
    """Microseconds a layer of a graph of `body(layer)` for each layer; the median of seven timings of 20 replays."""
    for layer in range(LAYERS):
        body(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            body(layer)

    def once() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 20 * 1e3 / LAYERS

    once()
    return statistics.median(once() for _ in range(7))


def without_misses(device: torch.device) -> None:
    """What the kernels add to two small ones."""
    layer = Layer(NVFP4, device)
    ids = torch.arange(TOP_K, dtype=torch.int32, device=device).view(1, TOP_K)
    padding = torch.zeros(1, dtype=torch.bool, device=device)
    x = torch.zeros(2048, device=device)
    early = layer.scratch.early

    def body(live: bool | None) -> Callable[[int], None]:
        def run(_: int) -> None:
            x.add_(1)
            if live is not None:
                layer.resolver._resolve(ids, padding, 0, 1, 0, live, 0)
                layer.resolver._fill()
            x.add_(1)

        return run

    base = micros(body(None))
    print(f"two small kernels {base:.2f} us a layer; with resolve and fill, which miss nothing, more by")
    for name, live, started in (
        ("as launched", True, early),
        ("not started early", True, False),
        ("without statistics", False, early),
    ):
        layer.scratch.early = started
        print(f"  {micros(body(live)) - base:5.2f} us {name}")


def with_misses(name: str, shapes: dict[str, tuple[int, ...]], link: float, device: torch.device) -> None:
    """What *fill* takes."""
    layer, own = Layer(shapes, device), device_resolver._FILLERS
    scratch = layer.scratch
    lists = torch.stack([torch.randperm(EXPERTS, device=device)[:SLOTS] for _ in range(LAYERS)]).int()
    scratch.miss_slots.copy_(torch.arange(SLOTS))
    print(
        f"fill, {name}: us a layer, by the link's time of the same bytes in one block; {own} programs are the pager's"
    )
    for programs in (16, 32, 64, 132):
        device_resolver._FILLERS = programs
        cells = []
        for misses in (1, 2, 4, 8):

            def body(number: int) -> None:
                scratch.miss_experts = lists[number]
                layer.resolver._fill()

            scratch.misses.fill_(misses)
            took = micros(body)
            cells.append(
                f"{misses} misses {took:7.1f} ({took * link * 1e3 / (misses * layer.bundle_bytes):.3f})"
            )
        print(f"  {programs:4} programs: {', '.join(cells)}")
    device_resolver._FILLERS = own


def main() -> None:
    """Measure and print."""
    device = torch.device("cuda")
    link = link_speeds()["256"]
    print(f"{torch.cuda.get_device_name()}; copy engine {link:.1f} GB/s at 256 MiB")
    without_misses(device)
    with_misses("NVFP4, 2.5 MiB", NVFP4, link, device)
    with_misses("bf16, 9 MiB", BF16, link, device)


if __name__ == "__main__":
    main()
