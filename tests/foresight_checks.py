"""Tests of what is brought ahead: the guess, the mailbox, the lanes; collected as `kernel_checks.py` is."""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from couriers import functions
from kernel_checks import DEVICE
from vvllm_pager.bundle import BundleLayout
from vvllm_pager.courier import Courier
from vvllm_pager.device_resolver import DeviceResolver, Scratch
from vvllm_pager.foresight import Foresight, Gate
from vvllm_pager.guess_kernel import ASK, ENABLED, LATE, NUMBER, USED
from vvllm_pager.slot_pool import SlotPool

HIDDEN, TOP_K = 24, 3


class Layers:
    """Some layers with slots and gates, whose bundles are one word: 1000 x layer + expert."""

    def __init__(
        self, experts: int, slots: int, count: int, rng: np.random.Generator, *, corrected: bool
    ) -> None:
        device = torch.device(DEVICE)
        self.layers: list[Any] = []
        gates: list[Any] = []
        for index in range(count):
            values = {"value": torch.full((slots, 1), -1, dtype=torch.int64, device=device)}
            layout = BundleLayout.of(values)
            store = torch.zeros(experts, layout.record_bytes, dtype=torch.uint8)
            store.view(torch.int64)[:, 0] = 1000 * index + torch.arange(experts)
            store = store.pin_memory() if DEVICE == "cuda" else store
            layer = SimpleNamespace(
                experts=experts, slots=slots, index=index, layout=layout, hidden_size=HIDDEN
            )
            layer.values, layer.pool = values["value"], SlotPool(values, store, layout)
            module = SimpleNamespace(
                weight=torch.from_numpy(rng.normal(size=(experts, HIDDEN))).float().to(device)
            )
            if corrected:
                module.e_score_correction_bias = torch.from_numpy(rng.normal(size=experts)).float().to(device)
            self.layers.append(layer)
            gates.append(Gate.of(module, layer))
        self.gates = gates
        self.scratch = Scratch(experts, slots, device)
        self.ahead = self.scratch.foresight = Foresight(gates, self.layers, device)
        unused: Any = None
        self.resolvers = [DeviceResolver(layer, unused, unused, self.scratch) for layer in self.layers]

    def step(
        self,
        index: int,
        ids: np.ndarray,
        x: torch.Tensor | None,
        padding: np.ndarray | None = None,
        live: bool = True,
    ) -> None:
        mask = None if padding is None else torch.from_numpy(padding).to(DEVICE)
        on_device = torch.from_numpy(ids.astype(np.int32)).to(DEVICE)
        resolver = self.resolvers[index]
        resolver._resolve(on_device, mask, 0, 1, 0, live, 0, x)
        resolver._fill(resolver._ahead(x, ids.shape[1], live))

    def asked(self, layer: int) -> tuple[int, int, list[int]]:
        """(layer, number, experts) of the row that a layer looks at."""
        of, number, count, *experts = self.ahead.asked[layer % 2].tolist()
        return of, number, experts[: max(count, 0)]

    def check(self, index: int) -> None:
        """Each slot holds what the table says."""
        table = self.layers[index].pool.table.device["expert_in"].cpu()
        held = self.layers[index].values.flatten().cpu()
        assert torch.equal(held[table >= 0], 1000 * index + table[table >= 0].long())


@settings(max_examples=30, deadline=None)
@given(st.integers(4, 40), st.integers(1, 4), st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_the_best_experts_without_a_slot_are_asked_for(experts, tokens, seed, masked, corrected) -> None:
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(min(tokens * TOP_K, experts), experts + 1))
    model = Layers(experts, slots, 2, rng, corrected=corrected)
    following = model.layers[1].pool.table
    held = rng.permutation(experts)[: int(rng.integers(0, slots + 1))].astype(np.int32)
    following.host.place(held, np.arange(len(held), dtype=np.int32))
    following.write()
    padding = rng.random(tokens) < 0.3 if masked else None
    x = torch.from_numpy(rng.normal(size=(tokens, HIDDEN))).float()
    ids = np.stack([rng.permutation(experts)[:TOP_K] for _ in range(tokens)])
    model.step(0, ids, x.to(DEVICE), padding)
    gate = model.gates[1]
    scores = (x @ gate.weight.cpu().T).double().numpy()
    if corrected:
        scores = 1 / (1 + np.exp(-scores)) + gate.correction.cpu().double().numpy()
    best = np.argsort(-(scores if padding is None else scores[~padding]).max(axis=0, initial=-np.inf))[:TOP_K]
    nobody = padding is not None and bool(padding.all())
    wanted = [] if nobody else [expert for expert in best.tolist() if expert not in held][: ASK.value]
    assert model.asked(1) == (1, int(bool(wanted)), wanted)


def test_nothing_is_asked_for_in_warm_up_or_while_guesses_are_wrong() -> None:
    rng = np.random.default_rng(0)
    model, x = Layers(8, 6, 2, rng, corrected=False), torch.ones(1, HIDDEN, device=DEVICE)
    ids = np.array([[0, 1, 2]])
    model.step(0, ids, x, live=False)
    assert model.asked(1) == (1, 0, [])
    model.ahead.counters[ENABLED.value] = 0
    model.step(0, ids, x)
    assert model.asked(1) == (1, 0, [])
    model.ahead.counters[ENABLED.value] = 1
    model.step(0, ids, x)
    _, number, experts = model.asked(1)
    assert number == 1
    assert experts
    model.ahead.counters[LATE.value] = 64  # nobody brings it in time
    model.step(0, ids, x)
    assert model.asked(1) == (1, 1, [])
    model.ahead.counters[LATE.value] = 0
    model.ahead.counters[NUMBER.value] = -1  # after which comes none that an empty lane has
    model.step(0, ids, x)
    assert model.asked(1)[1] == 1
    model.step(0, ids, None)  # a batch that is not guessed for
    assert model.asked(1)[0] == -1


@pytest.mark.parametrize("arrived", [True, False])
def test_a_miss_is_taken_from_its_lane_once_it_has_arrived_and_else_from_the_host(arrived: bool) -> None:
    """Lanes hold something else than the store, to tell them apart."""
    model = Layers(16, 8, 4, np.random.default_rng(1), corrected=False)
    ahead, index = model.ahead, 3
    ahead.asked[index % 2] = torch.tensor([index, 7, 2, 5, 9])
    ahead.lanes[2:, 0] = torch.tensor([500, 900])
    ahead.arrived[2:] = torch.tensor([7, 7 if arrived else 5])
    model.step(index, np.array([[4, 5, 9]]), None)
    values = model.layers[index].values.flatten().tolist()
    of_expert = {
        e: values[s] for s, e in enumerate(model.layers[index].pool.table.device["expert_in"].tolist())
    }
    assert of_expert[4] == 3004
    assert of_expert[5] == 500
    assert of_expert[9] == (900 if arrived else 3009)
    assert int(ahead.counters[USED.value]) == 1 + arrived
    assert int(ahead.counters[LATE.value]) == 1 - arrived


def test_what_was_asked_for_another_layer_is_nobodys() -> None:
    model = Layers(16, 8, 4, np.random.default_rng(1), corrected=False)
    model.ahead.asked[1] = torch.tensor([1, 7, 2, 5, 9])
    model.ahead.arrived[2:] = 7
    model.step(3, np.array([[4, 5, 9]]), None)
    model.check(3)
    assert int(model.ahead.counters[USED.value]) == 0


def test_a_step_takes_what_its_courier_brought() -> None:
    """Layer after layer, with gates that guess right: the router chooses what the gate says."""
    rng = np.random.default_rng(2)
    model = Layers(16, 6, 6, rng, corrected=False)
    ahead = model.ahead
    if DEVICE == "cuda":
        ahead.start()
    else:
        ahead.courier = _courier_on_the_host(model)
    try:
        for _ in range(12):
            x = torch.from_numpy(rng.normal(size=(1, HIDDEN))).float().to(DEVICE)
            for index in range(len(model.layers)):
                best = (
                    (x @ model.gates[index].weight.T).flatten().argsort(descending=True)[:TOP_K].cpu().numpy()
                )
                if DEVICE == "cpu" and index > 0 and model.asked(index)[2]:
                    _wait(lambda i=index: int(ahead.arrived[i % 2 * 2]) == model.asked(i)[1])
                model.step(index, best.reshape(1, -1), x)
                model.check(index)
        ahead.courier.stop()
        brought, used = ahead.courier.brought, int(ahead.counters[USED.value])
        assert used <= brought
        # Without a courier that is late, what is missed beyond the first layer was all brought, two at most.
        assert used > brought // 2
    finally:
        ahead.courier.stop()


def _courier_on_the_host(model: Layers) -> Courier:
    """The real thread, whose copies are plain ones."""
    addresses, records = model.ahead.route()
    return Courier(functions(), addresses, records)


def _wait(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "the courier did not come"
        time.sleep(0.0005)


def test_the_mailbox_words_are_what_the_courier_reads() -> None:
    model = Layers(16, 6, 3, np.random.default_rng(3), corrected=False)
    model.step(1, np.array([[0, 1, 2]]), torch.ones(1, HIDDEN, device=DEVICE))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    _, number, experts = model.asked(2)
    words = [ctypes.c_uint64(word).value for word in model.ahead.box.tolist()]
    assert [word >> 32 for word in words] == [*[number] * 3, 0]
    assert [(word >> 16 & 0xFFFF, word & 0xFFFF) for word in words[:2]] == [(2, e + 1) for e in experts]
