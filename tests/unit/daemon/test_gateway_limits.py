"""Bounds on what arrives at the daemon's HTTP server, and on clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from gateway_client import CHAT, Serve, Watched, echo, post

from vvllm_shared import limits


async def test_a_declared_body_over_the_limit(serve: Serve) -> None:
    async with serve(echo, body_bytes=100) as served:
        assert (await served.post(CHAT, b"x" * 100)).status == 200
        answer = await served.request(post(CHAT, b"x" * 101))
    assert answer.status == 413
    assert answer.json["error"]["code"] == "too_large"


async def test_a_chunked_body_over_the_limit_is_refused_while_it_arrives(serve: Serve) -> None:
    reached = False

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        nonlocal reached
        reached = True

    async with serve(app, body_bytes=1000, read_seconds=0.5) as served:
        client = await served.connect()
        client.send(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for _ in range(3):
            client.send(b"1f4\r\n" + b"x" * 500 + b"\r\n")
        assert (await client.answer()).status == 413
        # It never ends: the connection does, when the time for a request is over.
        assert await asyncio.wait_for(client.closed(), 2)
    assert not reached


async def test_a_connection_goes_on_after_a_body_that_was_too_large(serve: Serve) -> None:
    async with serve(echo, body_bytes=1000) as served:
        client = await served.connect()
        client.send(post(CHAT, b"x" * 200_000) + post(CHAT, b"fine"))
        assert (await client.answer()).status == 413
        assert (await client.answer()).body == b"fine"


async def test_headers_over_the_limit(serve: Serve) -> None:
    async with serve(echo, header_bytes=4096) as served:
        assert (await served.get("/v1/models")).status == 200
        answer = await served.request(
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 5000 + b"\r\n\r\n"
        )
    assert answer.status == 431
    assert answer.json["error"]["code"] == "too_large"


async def test_headers_that_never_end(serve: Serve) -> None:
    async with serve(echo, header_bytes=4096) as served:
        client = await served.connect()
        for _ in range(6):
            client.send(b"x" * 1000)
        assert (await client.answer()).status == 431
        assert await client.closed()


async def test_what_is_no_http(serve: Serve) -> None:
    async with serve(echo) as served:
        answer = await served.request(b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.status == 400
    assert answer.json["error"]["code"] == "bad_request"


@pytest.mark.parametrize("part", [b"", b"GET /v1/mod", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"])
async def test_headers_that_arrive_too_slowly(serve: Serve, part: bytes) -> None:
    async with serve(echo, read_seconds=0.3) as served:
        client = await served.connect()
        began = time.monotonic()
        client.send(part)
        answer = await asyncio.wait_for(client.answer(), 2)
        assert answer.status == 408
        assert await client.closed()
        assert 0.25 < time.monotonic() - began < 1.5


async def test_a_byte_now_and_then_does_not_prolong_the_time(serve: Serve) -> None:
    async with serve(echo, read_seconds=0.3) as served:
        client = await served.connect()
        answer = asyncio.create_task(client.answer())
        began = time.monotonic()
        while not answer.done() and time.monotonic() - began < 2:
            client.send(b"G")
            await asyncio.sleep(0.05)
        assert (await answer).status == 408
        assert time.monotonic() - began < 1


async def test_a_body_that_arrives_too_slowly(serve: Serve) -> None:
    async with serve(echo, read_seconds=0.3) as served:
        client = await served.connect()
        client.send(post(CHAT, b"x" * 100)[:-50])
        answer = await asyncio.wait_for(client.answer(), 2)
        assert answer.status == 408
        assert answer.json["error"]["code"] == "too_slow"
        assert await client.closed()


async def test_the_second_request_of_a_connection_has_its_own_time(serve: Serve) -> None:
    async with serve(echo, read_seconds=0.3) as served:
        client = await served.connect()
        client.send(post(CHAT, b"one"))
        assert (await client.answer()).body == b"one"
        await asyncio.sleep(0.4)
        client.send(post(CHAT, b"two"))
        assert (await client.answer()).body == b"two"
        client.send(b"GET /v1/mod")
        assert (await asyncio.wait_for(client.answer(), 2)).status == 408


async def test_a_long_answer_is_not_under_the_time_of_a_request(serve: Serve) -> None:
    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await asyncio.sleep(0.5)
        await echo(scope, receive, send)

    async with serve(slow, read_seconds=0.2) as served:
        assert (await served.post(CHAT)).status == 200


async def test_a_pipelined_request_is_not_charged_for_the_answer_before_it(serve: Serve) -> None:
    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await asyncio.sleep(0.4)
        await echo(scope, receive, send)

    async with serve(slow, read_seconds=0.3) as served:
        client = await served.connect()
        client.send(post(CHAT, b"one") + post(CHAT, b"x" * 200_000))
        assert (await client.answer()).body == b"one"
        second = await client.answer()
        assert (second.status, len(second.body)) == (200, 200_000)


async def test_a_connection_too_many(serve: Serve) -> None:
    async with serve(echo, connections=2) as served:
        first, _ = [await served.connect() for _ in range(2)]
        await asyncio.sleep(0.05)
        third = await served.connect()
        answer = await third.answer()
        assert (answer.status, answer.json["error"]["code"]) == (503, "busy")
        assert await third.closed()
        first.send(post(CHAT, b"first"))
        assert (await first.answer()).body == b"first"
        first.writer.close()
        await asyncio.sleep(0.05)
        assert (await served.post(CHAT)).status == 200


async def test_a_disconnect_reaches_the_application_at_once(serve: Serve) -> None:
    app = Watched()
    async with serve(app) as served:
        client = await served.connect()
        client.send(post(CHAT))
        await app.started.wait()
        assert served.gateway.in_flight == 1
        began = time.monotonic()
        client.writer.transport.abort()
        await asyncio.wait_for(app.left.wait(), 1)
        assert time.monotonic() - began < 0.1
        await asyncio.sleep(0.05)
        assert served.gateway.in_flight == 0


async def test_a_disconnect_cancels_a_real_streaming_response(serve: Serve) -> None:
    app, cancelled, started = FastAPI(), asyncio.Event(), asyncio.Event()

    @app.post(CHAT)
    async def chat() -> StreamingResponse:
        async def pieces() -> Any:
            try:
                while True:
                    yield "data: x\n\n"
                    started.set()
                    await asyncio.sleep(0.01)
            finally:
                cancelled.set()

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async with serve(app) as served:
        client = await served.connect()
        client.send(post(CHAT))
        await started.wait()
        began = time.monotonic()
        client.writer.transport.abort()
        await asyncio.wait_for(cancelled.wait(), 1)
        assert time.monotonic() - began < 0.1


async def test_an_application_that_ignores_a_disconnect_is_cancelled(serve: Serve) -> None:
    cancelled, started = asyncio.Event(), asyncio.Event()

    async def deaf(scope: dict[str, Any], receive: Any, send: Any) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async with serve(deaf, leave_seconds=0.2) as served:
        client = await served.connect()
        client.send(post(CHAT))
        await started.wait()
        client.writer.transport.abort()
        await asyncio.wait_for(cancelled.wait(), 2)


async def test_a_client_that_stops_reading_is_cut_off_and_others_are_not(serve: Serve) -> None:
    app = Watched(pause=0, piece=b"data: " + b"x" * 1000 + b"\n\n")
    async with serve(app, write_stall_seconds=0.3) as served:
        stalled = await served.connect()
        stalled.writer.transport.pause_reading()
        stalled.send(post(CHAT))
        await app.started.wait()
        other_app = served.backend.app = Watched(pause=0.005)
        other = await served.connect()
        other.send(post(CHAT))
        await other.head()
        await asyncio.wait_for(app.left.wait(), 3)
        for _ in range(20):
            assert await other.chunk() == b"data: x\n\n"
        assert not other_app.left.is_set()
        other.writer.close()
        assert app.sent < 2000


async def test_an_unread_answer_does_not_hold_its_connection_for_ever(serve: Serve) -> None:
    async def large(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 4_000_000})

    async with serve(large, write_stall_seconds=0.2) as served:
        client = await served.connect()
        client.writer.transport.pause_reading()
        client.send(post(CHAT))
        await asyncio.sleep(0.6)
        client.writer.transport.resume_reading()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await client.answer()


async def test_a_slow_reader_that_reads_is_served(serve: Serve) -> None:
    app = Watched(pause=0, piece=b"x" * 50_000)
    async with serve(app, write_stall_seconds=0.3) as served:
        client = await served.connect()
        client.send(post(CHAT))
        await client.head()
        for _ in range(20):
            assert len(await client.chunk()) == 50_000
            await asyncio.sleep(0.05)


async def test_a_slow_reader_of_events_loses_some_and_is_told(serve: Serve) -> None:
    async with serve(echo) as served:
        client = await served.connect()
        client.send(b"GET /vvllm/events HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.head()
        await client.chunk()
        for number in range(10):  # four may wait, and nothing is read before the loop runs again
            served.events.publish({"type": "n", "number": number})
        got = [json.loads((await client.chunk()).split(b"data: ")[1]) for _ in range(5)]
        assert got[0] == {"type": "lost", "count": 6}
        assert [event["number"] for event in got[1:]] == [6, 7, 8, 9]


async def test_a_connection_too_many_leaves_no_trace_but_its_answer(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(echo, connections=1) as served:
        first = await served.connect()
        second = await served.connect()
        assert (await second.head())[0] == 503
        await second.reader.read()
        second.writer.close()
        first.writer.close()
        await asyncio.sleep(0.1)
        assert (await served.post(CHAT)).status == 200
    assert not caplog.records, "asyncio logs what a protocol raises"


async def test_a_request_that_only_tokenizes_is_small(serve: Serve) -> None:
    """It holds Python's lock as long as it takes, and everyone's streams with it."""
    async with serve(echo) as served:
        for path in ("/tokenize", "/detokenize"):
            assert (await served.post(path, b"x" * (limits.TOKENIZE_BYTES + 1))).status == 413
            assert (await served.post(path, b"x" * limits.TOKENIZE_BYTES)).status == 200
        assert (await served.post(CHAT, b"x" * (limits.TOKENIZE_BYTES + 1))).status == 200
