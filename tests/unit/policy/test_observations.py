"""A trace that does not fit the model never reaches a policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vvllm_policy.observations import Decode, Prefill, Residency, observe
from vvllm_shared.errors import ProtocolError
from vvllm_shared.messages import DecodeTrace, LayerShape, PrefillTrace, ResidencySnapshot

LAYERS = [LayerShape("a", 8, 4, 2, 1), LayerShape("b", 16, 4, 2, 1)]


def decode_trace(ids: list[int], layers: int = 2) -> DecodeTrace:
    data = np.array(ids, "<i2")
    return DecodeTrace("b", 0, 0, steps=1, layers=layers, tokens=1, top_k=2, ids=data.tobytes())


def test_tables_have_their_shapes() -> None:
    decoded = observe(decode_trace([0, 7, 15, -1]), LAYERS)
    assert isinstance(decoded, Decode)
    assert decoded.ids.tolist() == [[[[0, 7]], [[15, -1]]]]
    counts = np.arange(32, dtype="<i4").reshape(2, 16)
    prefill = observe(PrefillTrace("b", 0, 0, 40, 2, 16, counts.tobytes()), LAYERS)
    assert isinstance(prefill, Prefill)
    assert (prefill.counts == counts).all()
    table = np.array([[0, 1, 2, -1], [15, 3, -1, -1]], "<i2")
    residency = observe(ResidencySnapshot("b", 0, 0, 2, 4, table.tobytes()), LAYERS)
    assert isinstance(residency, Residency)
    assert (residency.expert_in == table).all()


@pytest.mark.parametrize("ids", [[0, 8, 0, 0], [0, 0, 16, 0], [-2, 0, 0, 0], [0, 0, 0, 32767]])
def test_experts_that_the_layer_does_not_have_are_refused(ids: list[int]) -> None:
    with pytest.raises(ProtocolError):
        observe(decode_trace(ids), LAYERS)


def test_other_layers_are_refused() -> None:
    with pytest.raises(ProtocolError):
        observe(decode_trace([0, 0], layers=1), LAYERS)


@pytest.mark.parametrize("value", [-1, 41])
def test_counts_no_prompt_can_have_are_refused(value: int) -> None:
    counts = np.zeros((2, 16), "<i4")
    counts[1, 3] = value
    with pytest.raises(ProtocolError):
        observe(PrefillTrace("b", 0, 0, 40, 2, 16, counts.tobytes()), LAYERS)


@given(st.binary(min_size=8, max_size=8))
def test_whatever_the_ids_are_they_are_in_range_or_refused(ids: bytes) -> None:
    try:
        observed = observe(DecodeTrace("b", 0, 0, 1, 2, 1, 2, ids), LAYERS)
    except ProtocolError:
        return
    assert isinstance(observed, Decode)
    assert observed.ids.min() >= -1
    assert observed.ids[:, 0].max() < 8
    assert observed.ids[:, 1].max() < 16
