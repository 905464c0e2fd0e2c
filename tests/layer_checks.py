"""Tests of a whole step, by device and by host, with a kernel in plain torch; collected as `kernel_checks.py` is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context

from kernel_checks import DEVICE
from resolve_driver import random_step
from streams import Streams
from vvllm_pager import blocks as blocks_module
from vvllm_pager import host_resolver as host_resolver_module
from vvllm_pager import kernel as kernel_module
from vvllm_pager import launches as launches_module
from vvllm_pager import staging as staging_module
from vvllm_pager.bundle import BundleLayout
from vvllm_pager.device_resolver import DeviceResolver, Scratch
from vvllm_pager.host_resolver import HostResolver
from vvllm_pager.kernel import SlotKernel
from vvllm_pager.rounds import Launch
from vvllm_pager.slot_pool import SlotPool
from vvllm_pager.staging import Staging
from vvllm_shared.board import Board

EXPERTS, SLOTS, TOP_K, HIDDEN = 12, 5, 3, 4


class Toy(SlotKernel):
    """An expert multiplies by its number; what no slot holds is NaN, as are the rows of nobody's pairs."""

    def __init__(self, values: torch.Tensor, block: int, streams: Streams | None) -> None:
        self.values, self.block, self.streams = values, block, streams

    def widths(self) -> tuple[int, ...]:
        return (64,)

    def block_size(self, tokens: int, top_k: int, experts: int) -> int:
        return self.block

    def compute(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for launch in self.rounds:
            self.moe_sum(self.launch(launch, x, weights), out)
        return out

    def launch(self, launch: Launch, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The rows [T, k, H] of one launch."""
        pairs = weights.numel()
        factors = torch.full((pairs + 1,), float("nan"), device=x.device)
        if launch.blocks is not None:
            for at in range(0, int(launch.blocks.filled), self.block):
                owner = int(launch.blocks.owners[at // self.block])
                mine = launch.blocks.pairs[at : at + self.block].long()
                factors[mine] = self.values[owner]
                if self.streams and self._used(mine, launch, pairs):
                    self.streams.access("read", self.values[owner].data_ptr())
        else:
            assert launch.slots is not None
            found = launch.slots.flatten().long()
            for slot in set(found[found >= 0].tolist()) if self.streams else ():
                self.streams.access("read", self.values[slot].data_ptr())
            factors[:-1] = torch.where(found >= 0, self.values[found.clamp(min=0)].flatten(), factors[:-1])
        rows = x[:, None, :] * (weights * factors[:-1].view(weights.shape))[:, :, None]
        if self.rounds.rows is None:
            return rows
        computed = factors[:-1].isfinite()
        self.rounds.rows[computed] = rows.view(pairs, -1)[computed]
        return self.rounds.rows.view_as(rows)

    def _used(self, mine: torch.Tensor, launch: Launch, pairs: int) -> bool:
        """Whether a launch takes any of these pairs."""
        if launch.slots is None:
            return bool((mine < pairs).any())
        return bool(torch.isin(mine, (launch.slots >= 0).flatten().nonzero()).any())


def _paging(layers: list[Any], record_bytes: int, device: torch.device) -> Any:
    return SimpleNamespace(
        graphs=False,
        tokens_each=1,
        board=Board.from_env(),
        host_trace=None,
        untold=[],
        swept=0,
        settings=SimpleNamespace(pair_waves_above=0),
        layers=layers,
        device=device,
        staging=Staging(record_bytes, 40, device),
    )


class Step:
    """One of two equal layers with its resolvers on the toy kernel."""

    def __init__(self, block: int, streams: Streams | None, layers: list[Any]) -> None:
        slots = {"value": torch.full((SLOTS, 1), float("nan"), device=DEVICE)}
        layout = BundleLayout.of(slots)
        store = torch.zeros(EXPERTS, layout.record_bytes, dtype=torch.uint8)
        store[:, :4] = torch.arange(1.0, EXPERTS + 1).view(EXPERTS, 1).view(torch.uint8)
        store = store.pin_memory() if DEVICE == "cuda" else store
        self.toy = Toy(slots["value"], block, streams)
        method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=self.toy))
        sizes = {"experts": EXPERTS, "slots": SLOTS, "index": len(layers), "layout": layout}
        layer: Any = SimpleNamespace(pool=SlotPool(slots, store, layout), quant_method=method, **sizes)
        device = torch.device(DEVICE)
        paging = layers[0].paging if layers else _paging(layers, layout.record_bytes, device)
        layer.paging = paging
        layers.append(layer)
        self.layer = layer
        self.on_device = DeviceResolver(layer, self.toy, paging, Scratch(EXPERTS, SLOTS, device))
        self.on_host = HostResolver(layer, self.toy, paging)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: np.ndarray, padding: np.ndarray, by: str
    ) -> torch.Tensor:
        resolver = self.on_device if by == "device" else self.on_host
        with set_forward_context({}, VllmConfig()):
            get_forward_context().is_padding = torch.from_numpy(padding).to(DEVICE)
            arguments = x.to(DEVICE), weights.to(DEVICE), torch.from_numpy(ids).to(DEVICE)
            return resolver.run(*arguments, self.toy.compute).cpu()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams | None:
    """What a CPU lacks, and on it a watch over what the streams do to slots and lanes."""
    monkeypatch.delenv("VVLLM_BOARD", raising=False)
    if DEVICE == "cuda":
        return None
    monkeypatch.setattr(kernel_module.ops, "moe_sum", lambda rows, out: out.copy_(rows.sum(1)), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    one = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: one)
    return Streams(monkeypatch, staging_module)


def _check(step: Step, rng: np.random.Generator, tokens: int, by: str, *, alike: bool) -> None:
    ids, padding = random_step(rng, EXPERTS, TOP_K, tokens)
    ids[:] = np.where(ids < 0, (ids.max(axis=1, keepdims=True) + 1) % EXPERTS, ids)
    if alike:
        ids[:] = ids[0]
    padding[0] = False
    x = torch.from_numpy(rng.normal(size=(tokens, HIDDEN))).float()
    weights = torch.from_numpy(rng.random((tokens, TOP_K))).float()
    out = step(x, weights, ids, padding, by)
    right = x * (weights * torch.from_numpy(ids + 1.0)).sum(1, keepdim=True).float()
    assert torch.allclose(out[~padding], right[~padding], rtol=1e-5)
    if by == "host" and len(np.unique(ids[~padding])) > SLOTS:
        assert out[padding].isfinite().all(), "rows that are nobody's are no garbage"


@pytest.mark.parametrize("block", [0, 2, 8])
def test_a_step_computes_each_token_with_its_experts(
    block: int, streams: Streams | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one to four rounds, by device and host in turns; blocks of two have experts with more rows than one."""
    if block and DEVICE == "cpu":
        monkeypatch.setattr(blocks_module, "moe_align_block_size", _align)
    rng = np.random.default_rng(block)
    step = Step(block, streams, [])
    for number in range(14):
        tokens = int(rng.integers(1, 4 * SLOTS // TOP_K + 1))
        _check(step, rng, tokens, "device" if number % 4 else "host", alike=number % 3 == 0)


@pytest.mark.parametrize("block", [0, 2, 8])
@pytest.mark.parametrize("lane", [1, 2, 1 << 20])
def test_a_large_batch_sweeps_over_its_experts_while_they_arrive(
    block: int, lane: int, streams: Streams | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers in turns, each sending for the next one; lanes of one, two and all records; small batches between,
    for which was sent what nobody wants."""
    if block and DEVICE == "cpu":
        monkeypatch.setattr(blocks_module, "moe_align_block_size", _align)
    monkeypatch.setattr(staging_module, "_LANE_BYTES", lane * 256)
    monkeypatch.setattr(staging_module, "_MOST_BYTES", 6 * lane * 256)
    monkeypatch.setattr(host_resolver_module, "_NEARLY_ALL", 2)
    monkeypatch.setattr(launches_module, "aligned_by_chance", lambda pairs, experts: pairs > 60)
    rng = np.random.default_rng(block + lane)
    layers: list[Any] = []
    steps = [Step(block, streams, layers) for _ in range(2)]
    for number in range(8):
        tokens = int(rng.integers(8, 40)) if number % 3 else int(rng.integers(1, 8))
        for step in steps if number % 4 else steps[:1]:
            _check(step, rng, tokens, "host", alike=number == 5)
    assert streams is None or streams.overlapped


@pytest.mark.parametrize("lane", [1, 2])
def test_two_lanes_are_enough(lane: int, streams: Streams | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches of the device's change what is resident between two large ones."""
    monkeypatch.setattr(staging_module, "_LANE_BYTES", lane * 256)
    monkeypatch.setattr(staging_module, "_MOST_BYTES", 2 * lane * 256)
    monkeypatch.setattr(host_resolver_module, "_NEARLY_ALL", 2)
    rng = np.random.default_rng(lane)
    layers: list[Any] = []
    first, second = (Step(0, streams, layers) for _ in range(2))
    for _ in range(6):
        _check(first, rng, 20, "host", alike=False)
        _check(second, rng, 20, "host", alike=False)
        for _ in range(3):
            _check(second, rng, 2, "device", alike=False)


@pytest.mark.parametrize("by", ["device", "host", "sweep"])
def test_a_step_that_fails_in_its_middle_leaves_nothing_resident(
    by: str, streams: Streams | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots may hold what the table does not say; who goes on all the same gets right answers."""
    monkeypatch.setattr(host_resolver_module, "_NEARLY_ALL", 2 if by == "sweep" else 100)
    rng = np.random.default_rng(7)
    step = Step(0, streams, [])
    tokens, driver = (5, "device") if by == "device" else (20, "host")
    _check(step, rng, tokens, driver, alike=False)
    launch, launched = step.toy.launch, []

    def fail_in_the_second_round(*args: Any) -> torch.Tensor:
        launched.append(1)
        if len(launched) == 2:
            raise MemoryError
        return launch(*args)

    step.toy.launch = fail_in_the_second_round  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        _check(step, rng, tokens, driver, alike=False)
    step.toy.launch = launch  # type: ignore[method-assign]
    table = step.layer.pool.table.device
    assert (table["slot_of"] == -1).all()
    assert (table["expert_in"] == -1).all()
    for number in range(6):
        _check(step, rng, *((4, "device") if number % 2 else (20, "host")), alike=False)


def test_a_sweep_tells_what_was_chosen_once_its_last_layer_is_queued(
    streams: Streams | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_resolver_module, "_NEARLY_ALL", 2)
    layers: list[Any] = []
    steps = [Step(0, streams, layers) for _ in range(2)]
    told: list[tuple[int, int, list[list[int]]]] = []
    observe = SimpleNamespace(observe=lambda step, layer, ids: told.append((step, layer, ids.tolist())))
    layers[0].paging.host_trace = observe
    x, weights = torch.ones(12, HIDDEN), torch.ones(12, TOP_K)
    ids = np.stack([np.random.default_rng(row).permutation(EXPERTS)[:TOP_K] for row in range(12)]).astype(
        np.int32
    )
    padding = np.arange(12) > 9
    for number in (1, 2):
        for step in steps:
            step(x, weights, ids, padding, "host")
        wanted = np.where(padding[:, None], -1, ids).tolist()
        assert told == [(number, layer, wanted) for layer in (0, 1)]
        told.clear()


def _align(
    ids: torch.Tensor, size: int, experts: int, expert_map: None, *, ignore_invalid_experts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """vLLM's alignment, which only its GPU build has."""
    assert expert_map is None
    assert ignore_invalid_experts
    flat = ids.flatten().tolist()
    pairs: list[int] = []
    owners: list[int] = []
    for expert in range(experts):
        mine = [i for i, chosen in enumerate(flat) if chosen == expert]
        blocks = -(-len(mine) // size)
        pairs += mine + [len(flat)] * (blocks * size - len(mine))
        owners += [expert] * blocks
    kind = {"dtype": torch.int32, "device": ids.device}
    return torch.tensor(pairs, **kind), torch.tensor(owners, **kind), torch.tensor([len(pairs)], **kind)  # type: ignore[arg-type]
