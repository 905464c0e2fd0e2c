"""From the body of the daemon's answer to what a caller wants: events, a JSON object, a model's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vvllm_client import failures
from vvllm_client.address import Address
from vvllm_client.events import End, Event, Start, Token, Usage
from vvllm_client.sse import SseDecoder
from vvllm_shared import limits
from vvllm_shared.errors import GenerationError

_BROKEN_OFF = ("abort", "error")
"""Finish reasons of vLLM's that mean: the answer is not what was asked for."""


class AnswerDecoder:
    """Turns the body of `/v1/chat/completions` or `/v1/completions` into events, as its bytes come in.

    Args:
        address: the daemon's, for errors.

    Attributes:
        done: the answer is complete; what comes after is none of it.
    """

    def __init__(self, address: Address) -> None:
        self.done = False
        self._address = address
        self._sse = SseDecoder()
        self._started = False
        self._finish_reason: str | None = None

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that `piece` completes; those before an error are given before it is raised.

        Raises:
            GenerationError: the daemon reports a failure, or the answer was broken off.
            ProtocolError: what came is no chunk of an answer.
        """
        for data in self._sse.feed(piece):
            if data == "[DONE]":
                yield self._end()
                return
            chunk = failures.parse_object(data)
            if chunk is None:
                raise failures.not_understood(self._address, "a chunk that is not a JSON object")
            yield from self._chunk(chunk)

    def finish(self) -> None:
        """Say that the body has ended.

        Raises:
            GenerationError: it ended too early.
        """
        if not self.done:
            raise failures.cut_short(self._address)

    def _end(self) -> End:
        if self._finish_reason is None:
            raise failures.cut_short(self._address)
        if self._finish_reason in _BROKEN_OFF:
            raise GenerationError(
                f"The daemon broke the generation off (finish reason: {self._finish_reason}).",
                "`vvllm-ctl status` and the daemon's log say why.",
            )
        self.done = True
        return End(self._finish_reason)

    def _chunk(self, chunk: Mapping[str, object]) -> Iterator[Event]:
        if "error" in chunk:
            raise failures.from_stream(chunk["error"])
        if not self._started:
            self._started = True
            yield Start(str(chunk.get("model", "")), str(chunk.get("id", "")))
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            yield from self._choice(choices[0])
        if isinstance(usage := chunk.get("usage"), dict):
            yield Usage(_count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))

    def _choice(self, choice: Mapping[str, object]) -> Iterator[Event]:
        delta = choice.get("delta")
        fields = delta if isinstance(delta, dict) else {}
        # vLLM 0.32 says `reasoning`; before, and elsewhere, it is `reasoning_content`.
        reasoning = fields.get("reasoning") or fields.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning:
            yield Token(reasoning, "reasoning")
        answer = fields.get("content") or choice.get("text")
        if isinstance(answer, str) and answer:
            yield Token(answer)
        if isinstance(reason := choice.get("finish_reason"), str):
            self._finish_reason = reason


def check_size(body: bytearray, address: Address) -> None:
    """Refuse a body that is larger than any answer of a daemon's that is taken whole.

    Raises:
        ProtocolError: it is.
    """
    if len(body) > limits.BODY_BYTES:
        raise failures.not_understood(address, f"more than {limits.BODY_BYTES:,} bytes")


def json_object(body: bytes, address: Address) -> dict[str, Any]:
    """The JSON object that a body is.

    Raises:
        ProtocolError: it is something else.
    """
    if (content := failures.parse_object(body)) is None:
        raise failures.not_understood(address, "something else than a JSON object")
    return content


def first_model(body: bytes, address: Address) -> str:
    """The first id in the answer of `/v1/models`.

    Raises:
        ProtocolError: there is none.
    """
    match json_object(body, address):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    raise failures.not_understood(address, "a list of models without a name")


def _count(usage: Mapping[str, object], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) else 0
