"""A router that plays a trace from device memory, in place of the model's: one kernel launch a layer.

It is entered into vLLM's routing simulator (fused_moe/router/routing_simulator_router.py) under `STRATEGY`, which
`$VLLM_MOE_ROUTING_SIMULATION_STRATEGY` must name. Each layer has its own position in the trace, on the device, so a
replayed CUDA graph goes on where the last one stopped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from traces import MOST_GUESSED
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
    RoutingSimulator,
    RoutingStrategy,
)

from vvllm_pager.foresight import MOST_TOKENS, Foresight

assert MOST_GUESSED == MOST_TOKENS, "traces are guessed for as the pager guesses"
STRATEGY = "vvllm_trace"
_BLOCK = 256


@triton.jit(do_not_specialize=["layer", "layers", "pairs"])
def _play_step(  # type: ignore[no-untyped-def]  # noqa: PLR0917  # a kernel's arguments are pointers and numbers
    trace,
    guesses,
    shape,
    position,
    ids,
    weights,
    scores,
    layer,
    layers,
    pairs,
    top_k: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program of one warp: nobody can read the position after it was advanced.
    step = tl.load(position + layer)
    steps = tl.load(shape)
    step_pairs = tl.load(shape + 1)
    source = trace + (layer.to(tl.int64) * steps + step % steps) * step_pairs
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < pairs
        played = tl.load(source + at, mask=inside & (at < step_pairs), other=0)
        # A random first expert and an odd stride: distinct where E is a power of two.
        noise = (at // top_k + 1).to(tl.uint32) * 2654435761 + (step * 64 + layer).to(tl.uint32) * 2246822519
        noise = (noise ^ (noise >> 15)) * 3266489917
        first, stride = (noise >> 8).to(tl.int32), ((noise >> 16) | 1).to(tl.int32)
        drawn = (first + (at % top_k) * stride) & (E - 1)
        tl.store(ids + at, tl.where(pairs > step_pairs, drawn, played), mask=inside)
        tl.store(weights + at, tl.zeros([BLOCK], tl.float32) + 1.0 / top_k, mask=inside)
    tl.store(position + layer, step + 1)
    if (pairs == step_pairs) & (pairs // top_k <= MOST) & (layer + 1 < layers):
        # As scores of the next layer's experts: the first of the guess is the surest.
        e = tl.arange(0, E)
        guessed = guesses + ((layer + 1).to(tl.int64) * steps + step % steps) * step_pairs
        for token in range(pairs // top_k):
            score = tl.zeros([E], tl.float32)
            for rank in tl.static_range(top_k):
                score = tl.where(e == tl.load(guessed + token * top_k + rank), 1.0 * (top_k - rank), score)
            tl.store(scores + token * H + e, score)


class TracePlayer(RoutingStrategy):
    """Routes batches of the trace's size by it, and larger ones, a prefill's, at random; all weights are 1 / top_k.

    Args:
        layers, experts, top_k: of the model; `experts` is a power of two.
        hidden: the model's hidden size, at least `experts`.
        room: the most pairs that a trace will have, of all layers and steps.
        device: where.
        dtype: the model's.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        top_k: int,
        hidden: int,
        room: int,
        device: str,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        assert experts <= hidden, f"{experts} scores do not fit {hidden} columns"
        assert experts & (experts - 1) == 0, f"{experts} experts are no power of two"
        self._layers, self._experts, self._top_k = layers, experts, top_k
        # Until there is a trace, as vLLM warms up: one step that nobody's batch has the size of.
        self._trace = torch.zeros(max(room, layers), dtype=torch.int32, device=device)
        self._guesses = torch.zeros_like(self._trace)
        self.scores = torch.zeros(MOST_GUESSED, hidden, dtype=dtype, device=device)
        """What the next layer's gate would say of this layer's input, by the guess that is played: [T, H], of which the
        first E columns are used."""
        self.gate = torch.eye(experts, hidden, dtype=dtype, device=device)
        """[E, H]: makes of `scores` the scores."""
        self._shape = torch.tensor([1, 0], dtype=torch.int32, device=device)
        self._position = torch.zeros(layers, dtype=torch.int32, device=device)
        self._calls = 0

    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RoutingStrategy.route_tokens`: weights fp32 [T, k], ids [T, k]."""
        assert top_k == self._top_k, f"the model routes to {top_k} experts, the trace to {self._top_k}"
        ids = hidden_states.new_empty((len(hidden_states), top_k), dtype=indices_type or torch.int32)
        weights = hidden_states.new_empty((len(hidden_states), top_k), dtype=torch.float32)
        # Layers are called in order.
        layer = self._calls % self._layers
        self._calls += 1
        _play_step[(1,)](
            self._trace,
            self._guesses,
            self._shape,
            self._position,
            ids,
            weights,
            self.scores,
            layer,
            self._layers,
            ids.numel(),
            top_k=top_k,
            E=self._experts,
            H=self.scores.shape[1],
            MOST=MOST_GUESSED,
            BLOCK=_BLOCK,
            num_warps=1,
        )
        return weights, ids

    def play(self, trace: NDArray[np.int32], guesses: NDArray[np.int32] | None = None) -> None:
        """Put a trace [layers, steps, batch, top_k] in place, and begin it; when it is used up it begins again.

        Args:
            guesses: as the trace, what the layer before each guesses.
        """
        layers, steps, batch, top_k = trace.shape
        if guesses is not None:
            self._guesses[: guesses.size].copy_(torch.from_numpy(guesses.reshape(-1)))
        assert (layers, top_k) == (self._layers, self._top_k), trace.shape
        self._trace[: trace.size].copy_(torch.from_numpy(trace.reshape(-1)))
        self._shape.copy_(torch.tensor([steps, batch * top_k], dtype=torch.int32))
        self._position.zero_()

    def position(self) -> int:
        """Steps played so far. Waits for the device.

        Raises:
            AssertionError: the layers are not all at the same step, so the order of the calls was not the layers'.
        """
        positions = set(self._position.tolist())
        assert len(positions) == 1, f"the layers are at different steps of the trace: {sorted(positions)}"
        return int(positions.pop())


def install(player: TracePlayer) -> None:
    """Make vLLM's routing simulator ask this player, and the pager guess what is played."""
    RoutingSimulator.register_strategy(STRATEGY, player)
    own = Foresight.scoring

    def scoring(ahead: Foresight, layer: int, x: torch.Tensor) -> dict[str, Any]:
        given = own(ahead, layer, x)
        return given | {"x_p": player.scores[: len(x)], "gate_p": player.gate} if given else given

    Foresight.scoring = scoring  # type: ignore[method-assign]
