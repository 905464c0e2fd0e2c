"""What the client asks for: bodies in the shape of OpenAI's API, and their bytes on the wire."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vvllm_shared import limits
from vvllm_shared.errors import BadRequestError, TooLargeError, UsageError

Message = Mapping[str, object]
"""One message of a conversation, as OpenAI's API has it: `{"role": "user", "content": "…"}`."""

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
MODELS_PATH = "/v1/models"
STATUS_PATH = "/vvllm/status"

_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when to stop; None leaves it to the daemon's and the model's defaults.

    Raises:
        UsageError: a number that no sampler could use.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max-tokens must be at least 1, not {self.max_tokens}.")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature must be a number from 0 up, not {self.temperature}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must be above 0 and at most 1, not {self.top_p}.")
        if self.seed is not None and not 0 <= self.seed < _SEEDS:
            raise UsageError(f"seed must be from 0 to 2^63 - 1, not {self.seed}.")
        if "" in self.stop:
            raise UsageError("An empty stop string would stop before the first token.")

    def as_json(self) -> dict[str, object]:
        """The fields that are set, by OpenAI's names."""
        fields: dict[str, object] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": list(self.stop) or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


DEFAULT_SAMPLING = Sampling()


def chat_body(
    model: str,
    messages: str | Sequence[Message],
    *,
    system: str | None,
    think: bool | None,
    sampling: Sampling,
) -> dict[str, object]:
    """A conversation to continue; a plain string is one message of the user's.

    Args:
        model: the id that `/v1/models` names.
        messages: the conversation so far.
        system: put before the messages as the system's.
        think: switch the model's reasoning on or off; None leaves it to its chat template.
        sampling: how to choose tokens.
    """
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    if system is not None:
        conversation = [{"role": "system", "content": system}, *conversation]
    body = {"model": model, "messages": conversation, **_streaming(sampling)}
    if think is not None:
        body["chat_template_kwargs"] = {"enable_thinking": think}
    return body


def completion_body(model: str, prompt: str, *, sampling: Sampling) -> dict[str, object]:
    """A text to continue as it is, without a chat template."""
    return {"model": model, "prompt": prompt, **_streaming(sampling)}


def encode(method: str, path: str, host: str, body: Mapping[str, object] | None = None) -> bytes:
    """One HTTP/1.1 request, whose connection ends with it.

    Raises:
        BadRequestError: a text in the body is not Unicode (half a surrogate pair, or undecodable bytes).
        TooLargeError: the body is larger than the daemon takes.
    """
    try:
        content = b"" if body is None else json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"The request holds text that is not valid Unicode ({error.reason}).",
            "Convert the prompt and the options to UTF-8.",
        ) from None
    if len(content) > limits.BODY_BYTES:
        raise TooLargeError(
            f"The request is {len(content):,} bytes long; the daemon takes {limits.BODY_BYTES:,}.",
            "Shorten the prompt.",
        )
    head = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Accept-Encoding: identity"]
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*head, "", ""]).encode("ascii") + content


def _streaming(sampling: Sampling) -> dict[str, object]:
    return {"stream": True, "stream_options": {"include_usage": True}, **sampling.as_json()}
