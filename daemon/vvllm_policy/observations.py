"""Traces as arrays that are known to fit the model: whatever a policy indexes with them is in range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vvllm_policy.policies.base import Counts, Ids
from vvllm_shared.errors import ProtocolError
from vvllm_shared.messages import DecodeTrace, LayerShape, PrefillTrace, ResidencySnapshot, Trace


@dataclass(frozen=True)
class Decode:
    """See `DecodeTrace`."""

    ids: Ids


@dataclass(frozen=True)
class Prefill:
    """See `PrefillTrace`."""

    counts: Counts
    tokens: int


@dataclass(frozen=True)
class Residency:
    """See `ResidencySnapshot`."""

    expert_in: Ids


Observation = Decode | Prefill | Residency


def observe(trace: Trace, layers: Sequence[LayerShape]) -> Observation:
    """The trace's table, checked against the model.

    Raises:
        ProtocolError: other layers, or experts that the model does not have.
    """
    if trace.layers != len(layers):
        raise ProtocolError(f"A trace has {trace.layers} layers, the model has {len(layers)}.")
    experts = np.array([layer.experts for layer in layers])
    match trace:
        case DecodeTrace():
            shape = (trace.steps, trace.layers, trace.tokens, trace.top_k)
            ids = np.frombuffer(trace.ids, "<i2").reshape(shape)
            _check_ids(ids.min(axis=(0, 2, 3)), ids.max(axis=(0, 2, 3)), experts)
            return Decode(ids)
        case PrefillTrace():
            counts = np.frombuffer(trace.counts, "<i4").reshape(trace.layers, trace.experts)
            if trace.experts != experts.max() or counts.min() < 0 or counts.max() > trace.tokens:
                raise ProtocolError(
                    f"A trace counts up to {counts.max()} uses by {trace.tokens} tokens of {trace.experts} experts; "
                    f"the model has {experts.max()}."
                )
            return Prefill(counts, trace.tokens)
        case ResidencySnapshot():
            table = np.frombuffer(trace.expert_in, "<i2").reshape(trace.layers, trace.slots)
            _check_ids(table.min(axis=1), table.max(axis=1), experts)
            return Residency(table)


def _check_ids(lowest: Ids, highest: Ids, experts: Counts) -> None:
    if (lowest < -1).any() or (highest >= experts).any():
        raise ProtocolError(f"A trace names the experts {lowest.min()} to {highest.max()}, out of range.")
