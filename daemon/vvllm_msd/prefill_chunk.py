"""How many tokens of a prompt a step prefills: fewer sweeps over the experts against fewer slots for them.

A step that touches nearly all experts loads every one that has no slot, whether it prefills 2,048 tokens or 8,192. But
a larger step's activations take VRAM that slots could have, and then decode misses more. Both are bundles that cross
the same link, so its speed does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

_SIZES = (2048, 4096, 8192)
"""vLLM's defaults are the first, and on cards of 70 GiB the last (`EngineArgs.get_batch_defaults`)."""
_PROMPT, _ANSWER = 8192, 512
"""Tokens of the request that is weighed: an editor's, with the files that it sends along."""
_MISSES = 7.0
"""Decode misses e^(-7 f) of its look-ups where the share f of a layer's experts has slots: within 0.04 of what
BigMoeOnEdge's replay gives for per-layer LRU over its public trace of Qwen3-30B-A3B, from f = 1/7 up."""
_DENSE = 16
"""Activations outside the experts, in hidden sizes: residual, norms, the attention's projections and its output."""


@dataclass(frozen=True)
class Widths:
    """What the experts of a model compute with; see `ModelFacts`."""

    experts: int
    top_k: int
    hidden_size: int
    expert_width: int

    @property
    def activation_bytes(self) -> int:
        """Of a token in 16 bits: what vLLM's kernel holds between its GEMMs (modular_kernel.py, `workspace_shapes`:
        the wider of both outputs, and the input of the second), the rows that rounds merge, and the dense part."""
        expert = max(2 * self.expert_width, self.hidden_size) + self.expert_width + self.hidden_size
        return 2 * (self.top_k * expert + _DENSE * self.hidden_size)


def chunk_tokens(widths: Widths, slots: int, slot_bytes: int, longest: int) -> int:
    """Tokens of a prefill step at most.

    Args:
        widths: of the model.
        slots: experts per layer that have a place in VRAM.
        slot_bytes: what one slot in each layer takes together.
        longest: tokens of a prompt at most.
    """
    prompt = min(_PROMPT, longest)

    def bundles(chunk: int) -> float:
        """A layer's bundles that the request moves."""
        left = slots - (chunk - _SIZES[0]) * widths.activation_bytes / slot_bytes
        if left < widths.top_k:
            return float("inf")
        sweeps = -(-prompt // chunk) * (widths.experts - left)
        return sweeps + _ANSWER * widths.top_k * exp(-_MISSES * left / widths.experts)

    return min(_SIZES, key=bundles)
