"""What the client asks for."""

from __future__ import annotations

import json
import math

import pytest

from vvllm_client.requests import Sampling, chat_body, completion_body, encode
from vvllm_shared import limits
from vvllm_shared.errors import BadRequestError, TooLargeError, UsageError


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 2.0},
        {"top_p": math.nan},
        {"seed": -1},
        {"seed": 1 << 63},
        {"stop": ("ok", "")},
    ],
)
def test_numbers_that_no_sampler_could_use_are_refused(fields: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(UsageError):
        Sampling(**fields)


def test_only_what_is_set_is_sent() -> None:
    assert Sampling().as_json() == {}
    assert Sampling(1, 0.0, 1.0, 0, ("a", "b")).as_json() == {
        "max_tokens": 1,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
        "stop": ["a", "b"],
    }


def test_a_chat() -> None:
    body = chat_body("m", "hi", system="be brief", think=False, sampling=Sampling(max_tokens=3))
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_a_conversation_goes_as_it_is() -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    body = chat_body("m", turns, system=None, think=None, sampling=Sampling())
    assert body["messages"] == turns
    assert "chat_template_kwargs" not in body


def test_a_completion() -> None:
    body = completion_body("m", "Once", sampling=Sampling())
    assert body == {
        "model": "m",
        "prompt": "Once",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_on_the_wire() -> None:
    head, _, body = encode("POST", "/x", "localhost", {"a": "ü\n"}).partition(b"\r\n\r\n")
    assert json.loads(body) == {"a": "ü\n"}
    assert head.split(b"\r\n") == [
        b"POST /x HTTP/1.1",
        b"Host: localhost",
        b"Connection: close",
        b"Accept-Encoding: identity",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
    ]


def test_half_a_character_is_refused() -> None:
    with pytest.raises(BadRequestError, match="not valid Unicode"):
        encode("POST", "/x", "localhost", {"a": "\udcff"})


def test_a_body_over_the_daemons_limit_is_not_sent() -> None:
    with pytest.raises(TooLargeError):
        encode("POST", "/x", "localhost", {"a": "x" * limits.BODY_BYTES})
