"""What a policy is: it sees what the router chooses, and says which experts to give up first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vvllm_shared.messages import ALL_LAYERS, LayerShape

Ids = NDArray[np.int16]
Counts = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class LayerAdvice:
    """The victim formula's parameters for one layer; see `vvllm_shared.messages.Advise`."""

    layer: int = ALL_LAYERS
    heat_weight: float = 0.0
    age_weight: float = 1.0
    heat_decay: float = 1.0
    bias: tuple[float, ...] | None = None


class Policy(ABC):
    """One policy for all layers of one model.

    Args:
        layers: the paged layers, in the order in which traces and advice number them.
    """

    name: ClassVar[str]

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        self.layers = layers

    @abstractmethod
    def observe_decode(self, ids: Ids) -> None:
        """Take in what the router chose: `[steps, layers, tokens, top_k]`, -1 is padding."""

    @abstractmethod
    def observe_prefill(self, counts: Counts, tokens: int) -> None:
        """Take in how often the router chose each expert for `tokens` tokens: `[layers, experts]`."""

    @abstractmethod
    def advice(self) -> list[LayerAdvice]:
        """What the pager should do now. Small differences from the last answer cost a message: leave them out."""
