"""From the daemon's refusals to errors and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vvllm_client.address import UnixAddress
from vvllm_client.failures import from_http, from_stream
from vvllm_shared.errors import (
    BadRequestError,
    BusyError,
    EngineDiedError,
    Exit,
    GenerationError,
    PermissionDeniedError,
    VvllmError,
)

ADDRESS = UnixAddress(Path("/a.sock"))


def refused(status: int, content: object = None, **headers: str) -> VvllmError:
    return from_http(status, headers, json.dumps(content).encode(), ADDRESS)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequestError),
        (413, BadRequestError),
        (422, BadRequestError),
        (403, PermissionDeniedError),
        (429, BusyError),
        (503, BusyError),
        (404, GenerationError),
        (500, GenerationError),
    ],
)
def test_the_status_decides_where_the_body_does_not(status: int, kind: type[VvllmError]) -> None:
    # vLLM's own errors: a code that is a number, no exit code.
    error = refused(status, {"error": {"message": "No.", "type": "X", "code": status}})
    assert type(error) is kind
    assert (error.sentence, error.http_status, error.exit_code) == ("No.", status, kind.exit_code)


def test_the_bodys_exit_code_wins() -> None:
    body = EngineDiedError("The engine died.", "Wait.").as_json()
    error = refused(503, body)
    assert type(error) is EngineDiedError
    assert error.as_json() == body


@pytest.mark.parametrize("code", [0, 2, 130, 7, -1, "65", None, 1.5])
def test_an_exit_code_that_no_failure_has_is_not_believed(code: object) -> None:
    assert refused(400, {"error": {"message": "No.", "exit_code": code}}).exit_code == Exit.BAD_INPUT


@pytest.mark.parametrize("content", [None, [], "text", {}, {"error": "text"}, {"error": {"message": 3}}])
def test_a_body_that_says_nothing(content: object) -> None:
    error = refused(500, content)
    assert error.sentence == "The daemon at /a.sock answered with HTTP status 500."
    assert error.hint


def test_a_body_that_is_no_json() -> None:
    assert "502" in from_http(502, {}, b"<html>", ADDRESS).sentence
    assert "502" in from_http(502, {}, b"[" * 100_000, ADDRESS).sentence


def test_loading_tells_how_far() -> None:
    body = {
        **BusyError("The model is not there yet.").as_json(),
        "status": {"stage": "loading", "progress": 0.42, "detail": "shard 3 of 8"},
    }
    error = refused(503, body, **{"retry-after": "5"})
    assert error.sentence == "The daemon at /a.sock is loading the model (42%): shard 3 of 8."
    assert "vvllm-ctl status" in error.hint
    assert error.hint.endswith("Try again in 5 s.")


def test_a_stage_of_a_newer_daemon_leaves_the_daemons_own_words() -> None:
    error = refused(503, {"error": {"message": "Busy."}, "status": {"stage": "dreaming", "progress": None}})
    assert error.sentence == "Busy."


def test_within_a_stream_every_error_is_a_failed_generation() -> None:
    error = from_stream(EngineDiedError("The engine died.", "Wait.").as_json()["error"])
    assert type(error) is GenerationError
    assert (error.sentence, error.hint, error.code, error.exit_code) == (
        "The engine died.",
        "Wait.",
        "engine_died",
        1,
    )
    assert from_stream("?").sentence
