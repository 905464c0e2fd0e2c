"""What the policies advise, and whether the pager misses less when it follows."""

from __future__ import annotations

import numpy as np
import pytest

from vvllm_policy.policies import POLICIES, LayerAdvice, Policy
from vvllm_shared.messages import ALL_LAYERS, Advise, LayerShape, ToDaemon
from vvllm_shared.residency.page_table import PageTable, Weights
from vvllm_shared.wire import decode, encode

EXPERTS, TOP_K = 64, 4


def shape(experts: int = EXPERTS) -> LayerShape:
    return LayerShape("layer", experts, 8, TOP_K, 1 << 20)


def skewed_trace(steps: int, seed: int = 0) -> list[np.ndarray]:
    """Router choices of one layer: some experts are popular, half of the popularity changes every 300 steps."""
    rng = np.random.default_rng(seed)
    lasting = rng.permutation(1 / np.arange(1, EXPERTS + 1) ** 0.8)
    lasting /= lasting.sum()
    trace = []
    for step in range(steps):
        if step % 300 == 0:
            topic = rng.gamma(0.5, size=EXPERTS)
            topic /= topic.sum()
        scores = np.log((lasting + topic) / 2) + rng.gumbel(size=EXPERTS)
        trace.append(np.argsort(-scores)[:TOP_K].astype(np.int32))
    return trace


def misses(trace: list[np.ndarray], policy: Policy, slots: int) -> int:
    """Of a page table that does what the policy says."""
    table, total = PageTable.empty(EXPERTS, slots), 0
    weights = Weights()
    for step, ids in enumerate(trace):
        policy.observe_decode(ids.astype(np.int16).reshape(1, 1, 1, TOP_K))
        if step % 20 == 0:
            for advice in policy.advice():
                weights = Weights(advice.heat_weight, advice.age_weight, advice.heat_decay)
                table.bias[:] = advice.bias or 0.0
        table.touch(ids, weights.heat_decay)
        missing = ids[table.slot_of[ids] < 0]
        total += len(missing)
        if len(missing):
            keep = np.zeros(EXPERTS, bool)
            keep[ids] = True
            table.place(missing, table.victims(len(missing), keep, weights))
    return total


@pytest.mark.parametrize("slots", [8, 16, 32])
def test_lfru_misses_less_than_lru_where_some_experts_are_popular(slots: int) -> None:
    trace = skewed_trace(1500)
    lru = misses(trace, POLICIES["layer"]([shape()]), slots)
    assert misses(trace, POLICIES["lfru"]([shape()]), slots) < 0.97 * lru


def test_layer_is_exact_lru_and_says_so_always() -> None:
    policy = POLICIES["layer"]([shape(), shape()])
    before = policy.advice()
    policy.observe_decode(np.zeros((1, 2, 1, TOP_K), np.int16))
    policy.observe_prefill(np.ones((2, EXPERTS), np.int32), 10)
    assert policy.advice() == before == [LayerAdvice(ALL_LAYERS, 0.0, 1.0, 1.0, None)]


def test_lfru_weighs_heat_above_age() -> None:
    (advice,) = POLICIES["lfru"]([shape()]).advice()
    assert advice.heat_weight > advice.age_weight > 0
    assert 0 < advice.heat_decay < 1


def test_lfru_biases_each_layer_towards_what_it_chooses() -> None:
    policy = POLICIES["lfru"]([shape(), shape()])
    ids = np.array([5, 6, 7, 8], np.int16)
    for _ in range(500):
        policy.observe_decode(np.stack([ids, ids + 10]).reshape(1, 2, 1, TOP_K))
    advice = {entry.layer: entry for entry in policy.advice()}
    for layer, chosen in ((0, {5, 6, 7, 8}), (1, {15, 16, 17, 18})):
        bias = advice[layer].bias
        assert bias is not None
        assert {expert for expert, value in enumerate(bias) if value > 0} == chosen


def test_lfru_learns_from_prompts() -> None:
    policy = POLICIES["lfru"]([shape()])
    counts = np.zeros((1, EXPERTS), np.int32)
    counts[0, 3] = 1000
    policy.observe_prefill(counts, 1000)
    bias = policy.advice()[-1].bias
    assert bias is not None
    assert int(np.argmax(bias)) == 3


def test_lfru_repeats_itself_while_little_changes() -> None:
    policy = POLICIES["lfru"]([shape()])
    ids = np.array([1, 2, 3, 4], np.int16).reshape(1, 1, 1, TOP_K)
    changes, last = 0, policy.advice()
    for _ in range(1000):
        policy.observe_decode(ids)
        changes += (now := policy.advice()) != last
        last = now
    assert 1 <= changes <= 20


def test_padding_is_no_choice() -> None:
    policy = POLICIES["lfru"]([shape()])
    policy.observe_decode(np.full((3, 1, 5, TOP_K), -1, np.int16))
    assert policy.advice() == POLICIES["lfru"]([shape()]).advice()


def test_layers_may_differ_in_size_and_advice_is_valid_on_the_wire() -> None:
    """Each layer's bias has as many numbers as the layer has experts."""
    policy = POLICIES["lfru"]([shape(8), shape(EXPERTS)])
    counts = np.zeros((2, EXPERTS), np.int32)
    counts[:, 0] = 512
    policy.observe_prefill(counts, 512)
    for advice in policy.advice():
        bias = None if advice.bias is None else list(advice.bias)
        message = Advise(
            "b", 1, 1, advice.layer, advice.heat_weight, advice.age_weight, advice.heat_decay, bias
        )
        assert decode(encode(message), ToDaemon) == message
        if bias is not None:
            assert len(bias) == (8, EXPERTS)[advice.layer]
