"""Recency and frequency in one number, and a long memory beside it.

An expert's value is its uses, each weighed by `(1/2)^(age / half-life)`: the "combined recency and frequency" of
LRFU (D. Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently Used
Policies", IEEE Transactions on Computers 50(12), 2001), whose lambda is 1 / half-life. Decayed once a step that is
what the pager keeps as heat, so the advice is: go by heat. Age only orders experts whose heat has faded.

The bias is the share of tokens that chose an expert over thousands of tokens. The pager's heat forgets those, and
begins at zero with each engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vvllm_policy.policies.base import Counts, Ids, LayerAdvice, Policy
from vvllm_shared.messages import LayerShape

_HEAT_HALF_LIFE = 48
"""Steps. On synthetic traces with drifting topics 32 to 64 missed least, at 12, 24 and 48 of 128 experts."""
_AGE_WEIGHT = 1 / 4096
"""Small beside one use (1.0) within any half-life."""
_MEMORY_HALF_LIFE = 2048
"""Tokens."""
_BIAS_PER_SHARE = 20.0
"""An expert that every token chooses gets this; its heat is about 70."""
_BIAS_STEP = 1.0
"""A layer's bias is said again when one expert's has moved by this much: about one recent use."""
_PREFILL_TOKENS = 512
"""A longer prompt weighs no more than this: it would wipe out all that was before."""
_WEIGHTS = LayerAdvice(heat_weight=1.0, age_weight=_AGE_WEIGHT, heat_decay=0.5 ** (1 / _HEAT_HALF_LIFE))


class Lfru(Policy):
    """LRFU by the pager's heat, with a bias from long-term counts."""

    name = "lfru"

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        super().__init__(layers)
        self._experts = max(layer.experts for layer in layers)
        self._share = np.zeros((len(layers), self._experts))
        self._said = np.zeros_like(self._share)

    def observe_decode(self, ids: Ids) -> None:
        """Count the choices of each token."""
        by_layer = ids.swapaxes(0, 1).reshape(len(self.layers), -1)
        tokens = int((ids[:, 0] >= 0).any(axis=-1).sum())
        offset = np.arange(len(self.layers))[:, None] * self._experts
        chosen = (by_layer.astype(np.int64) + offset)[by_layer >= 0]
        counts = np.bincount(chosen, minlength=self._share.size).reshape(self._share.shape)
        self._learn(counts, tokens)

    def observe_prefill(self, counts: Counts, tokens: int) -> None:
        """A prompt says what the answer will be about."""
        self._learn(counts, tokens)

    def advice(self) -> list[LayerAdvice]:
        """The weights for all layers, and the bias of those that have one worth saying."""
        moved = np.abs(self._share * _BIAS_PER_SHARE - self._said).max(axis=1) >= _BIAS_STEP
        self._said[moved] = self._share[moved] * _BIAS_PER_SHARE
        return [
            _WEIGHTS,
            *(
                replace(_WEIGHTS, layer=index, bias=tuple(self._said[index, : shape.experts].tolist()))
                for index, shape in enumerate(self.layers)
                if self._said[index].any()
            ),
        ]

    def _learn(self, counts: Counts, tokens: int) -> None:
        if not tokens:
            return
        kept = 0.5 ** (min(tokens, _PREFILL_TOKENS) / _MEMORY_HALF_LIFE)
        self._share *= kept
        self._share += (1 - kept) * (counts / tokens)
