"""No request ends without a reply: applications that fail, engines that die, daemons that stop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI
from gateway_client import CHAT, SSE, Serve, Watched, echo, post
from pydantic import BaseModel
from structlog.testing import capture_logs

from vvllm_shared.errors import EngineDiedError


async def test_an_application_that_raises_before_its_answer(serve: Serve) -> None:
    async def broken(scope: dict[str, Any], receive: Any, send: Any) -> None:
        raise LookupError("secret")

    async with serve(broken) as served:
        with capture_logs() as logged:
            answer = await served.post(CHAT)
    assert answer.status == 500
    assert "LookupError" in answer.json["error"]["message"]
    assert "secret" not in answer.body.decode()
    assert any(event["event"] == "application raised" for event in logged)


async def test_an_application_that_never_answers(serve: Serve) -> None:
    async def silent(scope: dict[str, Any], receive: Any, send: Any) -> None:
        pass

    async with serve(silent) as served:
        answer = await served.post(CHAT)
    assert (answer.status, answer.json["error"]["code"]) == (500, "generation_failed")


@pytest.mark.parametrize("raises", [False, True])
async def test_a_stream_that_breaks_off_ends_with_an_error(serve: Serve, raises: bool) -> None:
    async def half(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        if raises:
            raise RuntimeError

    async with serve(half) as served:
        events = (await served.post(CHAT)).body.decode().split("\n\n")
        assert events[0] == "data: 1"
        assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "generation_failed"
        assert events[2] == "data: [DONE]"
        typed = (await served.post("/v1/messages")).body.decode().split("\n\n")
        assert typed[1].startswith('event: error\ndata: {"type": "error", "error": {')


async def test_abort_tells_the_cause_in_the_stream(serve: Serve) -> None:
    app = Watched()
    async with serve(app) as served:
        client = await served.connect()
        client.send(post(CHAT))
        await app.started.wait()
        await served.gateway.abort(EngineDiedError("The engine died."))
        assert app.left.is_set()
        answer = await client.answer()
    event = answer.body.decode().split("\n\n")[-3]
    assert json.loads(event.removeprefix("data: "))["error"]["message"] == "The engine died."


async def test_abort_answers_a_request_that_waits(serve: Serve) -> None:
    started = asyncio.Event()

    async def waits(scope: dict[str, Any], receive: Any, send: Any) -> None:
        started.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        # What vLLM's handlers do when they are told of a disconnect: an empty answer to nobody.
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"null"})

    async with serve(waits) as served:
        request = asyncio.create_task(served.post(CHAT))
        await started.wait()
        await served.gateway.abort(EngineDiedError("The engine died."))
        answer = await request
    assert (answer.status, answer.json["error"]["code"]) == (503, "engine_died")


class Nested(BaseModel):
    a: Any = None


@pytest.mark.parametrize(
    "bomb", [b"[" * 200_000, b'{"a":' * 200_000, b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"]
)
async def test_nested_json_is_refused_and_harms_nobody(serve: Serve, bomb: bytes) -> None:
    app = FastAPI()

    @app.post(CHAT)
    async def chat(body: Nested) -> str:
        return "ok"

    async with serve(app) as served:
        assert 400 <= (await served.post(CHAT, bomb)).status < 500
        assert (await served.post(CHAT)).status == 200


async def test_recursion_without_an_answer_is_the_requests_fault(serve: Serve) -> None:
    async def deep(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await deep(scope, receive, send)

    async with serve(deep) as served:
        answer = await served.post(CHAT)
    assert (answer.status, answer.json["error"]["code"]) == (400, "bad_request")


async def test_a_drain_lets_running_requests_finish(serve: Serve) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        started.set()
        await release.wait()
        await echo(scope, receive, send)

    async with serve(app) as served:
        running = asyncio.create_task(served.post(CHAT, b"kept"))
        await started.wait()
        drain = asyncio.create_task(served.gateway.drain(5))
        await asyncio.sleep(0)
        refused = await served.post(CHAT)
        assert (refused.status, refused.json["error"]["code"]) == (503, "busy")
        assert "draining" in refused.json["error"]["message"]
        release.set()
        assert (await running).body == b"kept"
        assert await drain == 0


async def test_a_drain_ends_what_takes_too_long(serve: Serve) -> None:
    app = Watched()
    async with serve(app) as served:
        client = await served.connect()
        client.send(post(CHAT))
        await app.started.wait()
        assert await served.gateway.drain(0.1) == 1
        assert "The daemon is stopping" in (await client.answer()).body.decode()


async def test_a_client_that_does_not_read_holds_no_drain_up(serve: Serve) -> None:
    app = Watched(pause=0, piece=b"x" * 100_000)
    async with serve(app, leave_seconds=0.2) as served:
        client = await served.connect()
        client.writer.transport.pause_reading()
        client.send(post(CHAT))
        await app.started.wait()
        await asyncio.sleep(0.1)
        await asyncio.wait_for(served.gateway.drain(0.1), 2)


@pytest.mark.parametrize("streaming", [True, False])
async def test_what_an_application_says_of_its_dead_engine_is_replaced_by_the_cause(
    serve: Serve, streaming: bool
) -> None:
    """vLLM's own sentence points at a stack trace that the client cannot see."""
    async with serve() as served:

        async def dying(scope: dict[str, Any], receive: Any, send: Any) -> None:
            served.backend.app = None
            if streaming:
                await send({"type": "http.response.start", "status": 200, "headers": SSE})
                body = b'data: {"error": {"message": "see stack trace above"}}\n\n'
                await send({"type": "http.response.body", "body": body, "more_body": True})
            else:
                await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"see stack trace above"})

        served.backend.app = dying
        answer = await served.post(CHAT)
    assert b"stack trace" not in answer.body
    text = answer.body.decode().removeprefix("data: ").split("\n\n")[0]
    assert json.loads(text)["error"]["code"] == "engine_died"
    assert answer.status == (200 if streaming else 503)


async def test_an_error_of_a_live_engine_passes_as_it_is(serve: Serve) -> None:
    async def refusing(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "mine"}}'})

    async with serve(refusing) as served:
        answer = await served.post(CHAT)
    assert (answer.status, answer.json["error"]["message"]) == (500, "mine")
