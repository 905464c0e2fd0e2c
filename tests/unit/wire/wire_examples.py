"""One valid message of each kind, with the direction that it goes."""

from __future__ import annotations

from typing import Any

from vvllm_shared.messages import (
    ALL_LAYERS,
    PROTOCOL,
    Advise,
    DecodeTrace,
    Heartbeat,
    Hello,
    LayerShape,
    Message,
    PrefillTrace,
    Ready,
    Refused,
    ResidencySnapshot,
    ToDaemon,
    ToPolicy,
    Trace,
)

LAYER = LayerShape("model.layers.0.mlp.experts", 8, 4, 2, 1 << 20)
EXAMPLES: list[tuple[Message, Any]] = [
    (Hello(PROTOCOL, "b-1", 1, "f" * 64, [LAYER]), ToPolicy),
    (Refused("no"), ToPolicy),
    (Ready(PROTOCOL, 4711, "lfru"), ToDaemon),
    (Heartbeat("b-1", 1, 2), ToDaemon),
    (Advise("b-1", 1, 3, ALL_LAYERS, 0.0, 1.0, 1.0), ToDaemon),
    (Advise("b-1", 1, 3, 0, 1.0, 0.5, 0.9, [0.0] * 8), ToDaemon),
    (DecodeTrace("b-1", 0, 7, steps=2, layers=1, tokens=3, top_k=2, ids=b"\0" * 24), Trace),
    (PrefillTrace("b-1", 1, 9, tokens=100, layers=1, experts=8, counts=b"\0" * 32), Trace),
    (ResidencySnapshot("b-1", 2, 9, layers=1, slots=4, expert_in=b"\xff" * 8), Trace),
]
