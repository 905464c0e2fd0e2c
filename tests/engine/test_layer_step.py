"""One paged layer of a real engine, called directly: what routers on a CPU never send, but others do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import engine_args

from vvllm_msd.verify_engine import set_environment

pytestmark = pytest.mark.engine

TOP_K, EXPERTS, SLOTS = 4, 16, 5


class Layer:
    """The first paged layer of an engine, and a forward context to call it in."""

    def __init__(self, engine: Any) -> None:
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        self.config = runner.vllm_config
        self.paged = next(m for m in runner.get_model().modules() if getattr(m, "paging", None) is not None)
        self.hidden = self.paged.hidden_size

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, padding: Any = None
    ) -> torch.Tensor:
        from vllm.forward_context import get_forward_context, set_forward_context

        with torch.inference_mode(), set_forward_context({}, self.config):
            get_forward_context().is_padding = padding
            return self.paged.forward_modular(x, weights, ids).clone()

    def counters(self) -> dict[str, int]:
        return self.paged.paging.board.read()


@pytest.fixture(scope="module")
def layer(zoo_model: Callable[[str], Path]) -> Iterator[Layer]:
    set_environment()
    from vllm import LLM

    args = engine_args(additional_config={"expert_cache": {"slots": SLOTS, "pair_waves_above": 8}})
    engine = LLM(model=str(zoo_model("qwen3_moe")), **args)
    yield Layer(engine)
    del engine


def batch(layer: Layer, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, layer.hidden, generator=generator).to(torch.bfloat16)
    weights = torch.rand(tokens, TOP_K, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
    return x, weights, ids.to(torch.int32)


@pytest.mark.parametrize("tokens", [4, 8, 24])
def test_rows_of_padding_change_no_other_row_and_load_nothing(layer: Layer, tokens: int) -> None:
    """Token waves and pair waves; the padding routes to experts that nobody else needs."""
    x, weights, ids = batch(layer, tokens)
    ids %= EXPERTS - 2  # the last two experts are the padding's alone
    ids = torch.stack(
        [torch.tensor([row[0], *[(row[0] + j) % (EXPERTS - 2) for j in (1, 2, 3)]]) for row in ids]
    ).int()
    alone = layer(x[: tokens // 2], weights[: tokens // 2], ids[: tokens // 2])
    ids[tokens // 2 :] = torch.tensor([EXPERTS - 1, EXPERTS - 2, 0, 1], dtype=torch.int32)
    padding = torch.arange(tokens) >= tokens // 2
    padded = layer(x, weights, ids, padding)
    assert torch.equal(padded[: tokens // 2], alone)
    table = layer.paged.pool.table.host
    assert table.slot_of[EXPERTS - 1] == -1
    assert table.heat[EXPERTS - 1] == 0


@pytest.mark.parametrize("tokens", [3, 24])
def test_an_id_of_minus_one_within_a_row_counts_nothing(layer: Layer, tokens: int) -> None:
    """As if the pair had another expert and no weight."""
    x, weights, ids = batch(layer, tokens, seed=1)
    missing = ids.clone()
    missing[::2, 1] = -1
    without = layer(x, weights, missing)
    weights[::2, 1] = 0
    assert torch.equal(without, layer(x, weights, ids))


def test_a_batch_of_padding_alone_is_served(layer: Layer) -> None:
    x, weights, ids = batch(layer, 2)
    before = layer.counters()
    out = layer(x, weights, ids, torch.ones(2, dtype=torch.bool))
    after = layer.counters()
    assert out.shape == x.shape
    assert (after["hits"], after["misses"]) == (before["hits"], before["misses"])


def test_the_counters_count_hits_misses_bytes_and_waves(layer: Layer) -> None:
    x, weights, _ = batch(layer, 2)
    first = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]], dtype=torch.int32)
    layer(x, weights, first)
    before = layer.counters()
    layer(x, weights, first)
    layer(x, weights, torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], dtype=torch.int32))
    layer(x, weights, torch.tensor([[5, 6, 7, 8], [10, 11, 12, 13]], dtype=torch.int32))
    after = layer.counters()
    gained = {name: after[name] - before[name] for name in ("hits", "misses", "token_waves", "bytes_paged")}
    assert gained["hits"] == 5 + 0 + 4
    assert gained["misses"] == 0 + 5 + 4
    assert gained["token_waves"] == 1
    assert gained["bytes_paged"] == 9 * layer.paged.layout.bundle_bytes


def test_a_layer_that_has_run_compiles_nothing(layer: Layer) -> None:
    """A compilation that failed told of its beginning alone."""
    x, weights, ids = batch(layer, 2)
    layer.paged.paging.board.add("compiling")
    layer(x, weights, ids)
    assert layer.counters()["compiling"] == 0


def test_advice_changes_who_is_evicted(layer: Layer) -> None:
    from vvllm_pager.worker import PagerWorker

    x, weights, _ = batch(layer, 1)
    layer(x, weights, torch.tensor([[0, 1, 2, 3]], dtype=torch.int32))
    layer(x, weights, torch.tensor([[4, 5, 6, 7]], dtype=torch.int32))
    bias = [0.0] * EXPERTS
    bias[4] = 1e9
    worker = PagerWorker()
    worker._paging = lambda: layer.paged.paging  # type: ignore[method-assign]
    advice = {
        "layer": layer.paged.index,
        "heat_weight": 0.0,
        "age_weight": 1.0,
        "heat_decay": 1.0,
        "bias": bias,
    }
    assert worker.pager_apply([advice]) == 1
    for ids in ([8, 9, 10, 11], [12, 13, 14, 15], [0, 1, 2, 3]):
        layer(x, weights, torch.tensor([ids], dtype=torch.int32))
    assert layer.paged.pool.table.host.slot_of[4] != -1
    assert worker.pager_apply([advice | {"bias": None}]) == 1
    layer(x, weights, torch.tensor([[8, 9, 10, 11]], dtype=torch.int32))
    layer(x, weights, torch.tensor([[12, 13, 14, 15]], dtype=torch.int32))
    assert layer.paged.pool.table.host.slot_of[4] == -1
