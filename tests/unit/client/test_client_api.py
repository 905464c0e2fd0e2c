"""The Python API, sync and async, against a real socket: both must do the same."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_daemon import HELLO, WAIT, Connection, ScriptedDaemon, answer, chunk, refusal, usage

from vvllm_client import AsyncClient, Client, End, Event, Sampling, Start, Token, Usage
from vvllm_shared.errors import (
    BadRequestError,
    BusyError,
    DaemonAbsentError,
    EngineDiedError,
    GenerationError,
    ProtocolError,
    VvllmError,
)

CHAT, RAW = "/v1/chat/completions", "/v1/completions"

Collect = Callable[..., list[Event]]


def collect_sync(
    socket: Path | None, prompt: Any = "hi", *, raw: bool = False, **options: Any
) -> list[Event]:
    client = Client(socket)
    with client.complete(prompt, **options) if raw else client.chat(prompt, **options) as stream:
        return list(stream)


def collect_async(
    socket: Path | None, prompt: Any = "hi", *, raw: bool = False, **options: Any
) -> list[Event]:
    async def collect() -> list[Event]:
        client = AsyncClient(socket)
        async with client.complete(prompt, **options) if raw else client.chat(prompt, **options) as events:
            return [event async for event in events]

    return asyncio.run(collect())


@pytest.fixture(params=[collect_sync, collect_async], ids=["sync", "async"])
def collect(request: pytest.FixtureRequest) -> Collect:
    """Run a generation to its end with either client."""
    return request.param  # type: ignore[no-any-return]


def test_a_chat_from_start_to_end(daemon: ScriptedDaemon, collect: Collect) -> None:
    daemon.routes[CHAT] = answer()
    assert collect(daemon.path) == [
        Start("tiny-moe", "chatcmpl-1"),
        Token("Hel"),
        Token("lo"),
        Usage(5, 3),
        End("stop"),
    ]
    assert daemon.chats[0]["model"] == "tiny-moe"


def test_both_names_of_reasoning(daemon: ScriptedDaemon, collect: Collect) -> None:
    events = [
        chunk(reasoning="a"),
        chunk(reasoning_content="b"),
        chunk("c", reasoning="d"),
        chunk(finish="stop"),
    ]
    daemon.routes[CHAT] = answer(events)
    tokens = [event for event in collect(daemon.path) if isinstance(event, Token)]
    assert tokens == [Token("a", "reasoning"), Token("b", "reasoning"), Token("d", "reasoning"), Token("c")]


def test_a_completion(daemon: ScriptedDaemon, collect: Collect) -> None:
    choices = [{"text": "x", "finish_reason": None}, {"text": "y", "finish_reason": "length"}]
    daemon.routes[RAW] = answer(
        {"id": "cmpl-1", "model": "tiny-moe", "choices": [choice]} for choice in choices
    )
    assert collect(daemon.path, "Once", raw=True, sampling=Sampling(max_tokens=2)) == [
        Start("tiny-moe", "cmpl-1"),
        Token("x"),
        Token("y"),
        End("length"),
    ]
    assert daemon.chats[0]["prompt"] == "Once"
    assert daemon.chats[0]["max_tokens"] == 2


def test_over_tcp(tcp_daemon: ScriptedDaemon, collect: Collect, monkeypatch: pytest.MonkeyPatch) -> None:
    tcp_daemon.routes[CHAT] = answer()
    host = f"127.0.0.1:{tcp_daemon.listener.getsockname()[1]}"
    monkeypatch.setenv("VVLLM_HOST", f"http://{host}")
    assert collect(None)[-1] == End("stop")
    assert {connection.headers["host"] for connection in tcp_daemon.seen} == {host}


def test_events_before_an_error_are_given(daemon: ScriptedDaemon, collect: Collect) -> None:
    daemon.routes[CHAT] = answer([chunk("Hel"), EngineDiedError("The engine died.", "Again.").as_json()])
    with Client(daemon.path).chat("hi") as stream:
        events = iter(stream)
        assert [next(events), next(events)] == [Start("tiny-moe", "chatcmpl-1"), Token("Hel")]
        with pytest.raises(GenerationError, match="The engine died"):
            next(events)
    with pytest.raises(GenerationError, match="The engine died"):
        collect(daemon.path)


def cut_in_chunk(connection: Connection) -> None:
    connection.start_stream()
    connection.send_event(chunk("Hel"))
    connection.send(b"ff\r\ndata: {")


def garbage(connection: Connection) -> None:
    connection.send(b"220 smtp.example\r\n\r\n")


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (answer(HELLO, done=False), GenerationError, "before the answer was complete"),
        (answer([chunk("Hel")]), GenerationError, "before the answer was complete"),
        (cut_in_chunk, GenerationError, "before the answer was complete"),
        (answer([chunk("a", finish="abort")]), GenerationError, "finish reason: abort"),
        (answer(["not json"]), ProtocolError, "not a JSON object"),
        (answer(["[1]"]), ProtocolError, "not a JSON object"),
        (lambda connection: None, DaemonAbsentError, "without an answer"),
        (garbage, ProtocolError, "does not speak HTTP"),
        (refusal({"error": {"message": "Too long."}}, 400), BadRequestError, "Too long."),
        (refusal(BusyError("Loading.").as_json(), 503), BusyError, "Loading."),
        (refusal({}, 200), GenerationError, "before the answer was complete"),
    ],
)
def test_what_goes_wrong(
    daemon: ScriptedDaemon, collect: Collect, script: Any, kind: type[VvllmError], words: str
) -> None:
    daemon.routes[CHAT] = script
    with pytest.raises(kind, match=words):
        collect(daemon.path)


@pytest.mark.parametrize("content", [{}, {"data": []}, {"data": [{"id": 3}]}, []])
def test_a_list_of_models_without_a_name(daemon: ScriptedDaemon, collect: Collect, content: object) -> None:
    daemon.routes["/v1/models"] = refusal(content, 200)
    with pytest.raises(ProtocolError):
        collect(daemon.path)


def test_an_odd_chunk_is_tolerated_where_it_says_nothing(daemon: ScriptedDaemon, collect: Collect) -> None:
    odd = [
        {"choices": "x"},
        {"choices": [3]},
        {"choices": [{"delta": None}]},
        {"usage": {"prompt_tokens": "x"}},
    ]
    daemon.routes[CHAT] = answer([*odd, chunk("a", finish="stop")])
    assert Token("a") in collect(daemon.path)


def test_the_model_is_asked_once_and_again_after_a_refusal(daemon: ScriptedDaemon) -> None:
    client = Client(daemon.path)

    def chat() -> list[Event]:
        with client.chat("hi") as stream:
            return list(stream)

    daemon.routes[CHAT] = answer()
    chat()
    chat()
    daemon.routes[CHAT] = refusal({"error": {"message": "The model `tiny-moe` does not exist."}}, 404)
    with pytest.raises(GenerationError, match="does not exist"):
        chat()
    daemon.routes[CHAT] = answer()
    daemon.routes["/v1/models"] = refusal({"data": [{"id": "new"}]}, 200)
    chat()
    assert [connection.path for connection in daemon.seen].count("/v1/models") == 2
    assert daemon.chats[-1]["model"] == "new"


def endless(closed: threading.Event) -> Callable[[Connection], None]:
    def script(connection: Connection) -> None:
        connection.start_stream()
        connection.send_event(chunk("Hel"))
        if connection.wait_closed():
            closed.set()

    return script


def test_leaving_the_block_closes_the_connection(daemon: ScriptedDaemon) -> None:
    closed = threading.Event()
    daemon.routes[CHAT] = endless(closed)
    with Client(daemon.path).chat("hi") as stream:
        assert next(iter(stream)) == Start("tiny-moe", "chatcmpl-1")
    assert closed.wait(WAIT)


def test_another_thread_may_cancel(daemon: ScriptedDaemon) -> None:
    closed = threading.Event()
    daemon.routes[CHAT] = endless(closed)
    with Client(daemon.path).chat("hi") as stream:
        timer = threading.Timer(0.2, stream.cancel)
        timer.start()
        assert list(stream) == [Start("tiny-moe", "chatcmpl-1"), Token("Hel")]
        timer.join()
    assert closed.wait(WAIT)


async def test_cancelling_the_task_closes_the_connection(daemon: ScriptedDaemon) -> None:
    closed, streaming = threading.Event(), asyncio.Event()
    daemon.routes[CHAT] = endless(closed)

    async def consume() -> None:
        async with AsyncClient(daemon.path).chat("hi") as events:
            async for event in events:
                if isinstance(event, Token):
                    streaming.set()

    task = asyncio.create_task(consume())
    await asyncio.wait_for(streaming.wait(), WAIT)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(closed.wait, WAIT)


async def test_one_client_serves_many_tasks(daemon: ScriptedDaemon) -> None:
    daemon.routes[CHAT] = lambda c: c.stream(
        [chunk(c.body["messages"][0]["content"], finish="stop"), usage(1, 1)]
    )
    client = AsyncClient(daemon.path)

    async def echo(text: str) -> str:
        async with client.chat(text) as events:
            return "".join([event.text async for event in events if isinstance(event, Token)])

    texts = [f"text {i}" for i in range(20)]
    assert await asyncio.gather(*map(echo, texts)) == texts


def test_status_in_both(daemon: ScriptedDaemon) -> None:
    assert Client(daemon.path).status()["model"] == "tiny-moe"
    assert asyncio.run(AsyncClient(daemon.path).status())["stage"] == "ready"


def test_no_daemon_in_both(tmp_path: Path, collect: Collect) -> None:
    with pytest.raises(DaemonAbsentError, match="no socket"):
        collect(tmp_path / "none.sock")


def test_a_daemon_whose_queue_is_full_is_busy(tmp_path: Path, collect: Collect) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))
        with pytest.raises(BusyError, match="too many connections"):
            collect(path)


def test_a_silent_daemon_is_not_waited_for(
    daemon: ScriptedDaemon, collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vvllm_client.sync_client._QUERY_SECONDS", 0.2)
    monkeypatch.setattr("vvllm_client.async_client._QUERY_SECONDS", 0.2)
    daemon.routes["/v1/models"] = lambda connection: connection.wait_closed() and None  # type: ignore[func-returns-value]
    with pytest.raises(BusyError, match=r"did not answer within 0\.2 s"):
        collect(daemon.path)
