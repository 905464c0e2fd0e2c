"""LRU in each layer: what the pager does by itself, said aloud."""

from __future__ import annotations

from vvllm_policy.policies.base import Counts, Ids, LayerAdvice, Policy


class Layer(Policy):
    """Give up the expert that was not needed for the longest time. Learns nothing from traces."""

    name = "layer"

    def observe_decode(self, ids: Ids) -> None:
        """Recency is the pager's own."""

    def observe_prefill(self, counts: Counts, tokens: int) -> None:
        """Recency is the pager's own."""

    def advice(self) -> list[LayerAdvice]:
        """The same always: age alone."""
        return [LayerAdvice()]
