"""A router that plays a trace from device memory, in place of the model's: one kernel launch a layer.

It is entered into vLLM's routing simulator (fused_moe/router/routing_simulator_router.py) under `STRATEGY`, which
`$VLLM_MOE_ROUTING_SIMULATION_STRATEGY` must name. Each layer has its own position in the trace, on the device, so a
replayed CUDA graph goes on where the last one stopped.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
    RoutingSimulator,
    RoutingStrategy,
)

STRATEGY = "vvllm_trace"
_BLOCK = 256


@triton.jit(do_not_specialize=["layer", "pairs", "steps", "step_pairs"])
def _play_step(  # type: ignore[no-untyped-def]  # noqa: PLR0917  # a kernel's arguments are pointers and numbers
    trace, position, ids, weights, layer, pairs, steps, step_pairs, weight, BLOCK: tl.constexpr
):
    # One program of one warp: nobody can read the position after it was advanced.
    step = tl.load(position + layer)
    source = trace + (layer.to(tl.int64) * steps + step % steps) * step_pairs
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < pairs
        tl.store(ids + at, tl.load(source + at % step_pairs, mask=inside), mask=inside)
        tl.store(weights + at, tl.zeros([BLOCK], tl.float32) + weight, mask=inside)
    tl.store(position + layer, step + 1)


class TracePlayer(RoutingStrategy):
    """Routes by a trace; all weights are 1 / top_k.

    vLLM asks once per MoE layer and forward pass, in the order of the layers, from which the layer is known. Rows
    beyond the trace's batch (a prefill's) repeat it; a trace that is used up begins again.

    Args:
        shape: (layers, steps, batch, top_k) of every trace that will be played.
        device: where.
    """

    def __init__(self, shape: tuple[int, int, int, int], device: str) -> None:
        self._trace = torch.zeros(shape, dtype=torch.int32, device=device)
        # Until there is a trace, as vLLM warms up: distinct experts.
        self._trace += torch.arange(shape[3], dtype=torch.int32, device=device)
        self._position = torch.zeros(shape[0], dtype=torch.int32, device=device)
        self._calls = 0

    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RoutingStrategy.route_tokens`: weights fp32 [T, k], ids [T, k]."""
        layers, steps, batch, trace_k = self._trace.shape
        assert top_k == trace_k, f"the model routes to {top_k} experts, the trace to {trace_k}"
        ids = hidden_states.new_empty((len(hidden_states), top_k), dtype=indices_type or torch.int32)
        weights = hidden_states.new_empty((len(hidden_states), top_k), dtype=torch.float32)
        layer = self._calls % layers
        self._calls += 1
        _play_step[(1,)](
            self._trace,
            self._position,
            ids,
            weights,
            layer,
            ids.numel(),
            steps,
            batch * top_k,
            1.0 / top_k,
            BLOCK=_BLOCK,
            num_warps=1,
        )
        return weights, ids

    def play(self, trace: NDArray[np.int32]) -> None:
        """Put another trace of the same shape in place, and begin it."""
        self._trace.copy_(torch.from_numpy(trace))
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
    """Make vLLM's routing simulator ask this player."""
    RoutingSimulator.register_strategy(STRATEGY, player)
