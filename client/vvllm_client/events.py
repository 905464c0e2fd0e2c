"""What a generation sends, one value per event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Channel = Literal["answer", "reasoning"]


@dataclass(frozen=True, slots=True)
class Start:
    """The daemon took the request."""

    model: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of text: usually one token, never empty."""

    text: str
    channel: Channel = "answer"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt and of everything generated, reasoning too."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """The generation is complete.

    Attributes:
        finish_reason: `stop` (the model ended, or a stop string came), `length` (max-tokens or the model's
            limit), or another word of vLLM's.
    """

    finish_reason: str


Event = Start | Token | Usage | End
