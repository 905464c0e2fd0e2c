"""What the daemon's HTTP server answers, and to whom, over a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from gateway_client import CHAT, Serve, echo
from structlog.testing import capture_logs


async def test_a_listed_route_reaches_the_application(serve: Serve) -> None:
    async with serve(echo) as served:
        answer = await served.post(CHAT, b'{"a": 1}')
    assert (answer.status, answer.body) == (200, b'{"a": 1}')


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/responses/resp_1-x", "/v1/responses/resp_1/cancel", "/metrics", "/v1/messages"],
)
async def test_listed_routes(serve: Serve, path: str) -> None:
    async with serve(echo) as served:
        assert (await served.get(path)).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/invocations", "/", "/docs", "/v1/models/", "/v1/../pause", "/pause", "/collective_rpc", "//v1/models",
        "/v1/responses/a/b", "/v1/models%0a", "/vvllm/nothing", "/V1/models", "/v1/load_lora_adapter",
    ],
)  # fmt: skip
async def test_everything_else_does_not_exist(serve: Serve, path: str) -> None:
    async with serve(echo) as served:
        answer = await served.get(path)
    assert answer.status == 404
    assert answer.json["error"]["code"] == "not_found"


async def test_status_and_events(serve: Serve) -> None:
    async with serve(echo) as served:
        assert (await served.get("/vvllm/status")).json == served.backend.status(by_layer=True)
        reader = await served.connect()
        reader.send(b"GET /vvllm/events HTTP/1.1\r\nhost: x\r\n\r\n")
        status, headers = await reader.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        first = await reader.chunk()
        assert first.startswith(b"event: status\ndata: ")
        assert json.loads(first.split(b"data: ")[1]) == {"type": "status", **served.backend.status()}
        served.events.publish({"type": "engine", "generation": 2})
        assert await reader.chunk() == b'event: engine\ndata: {"type": "engine", "generation": 2}\n\n'


async def test_a_stop_ends_event_streams(serve: Serve) -> None:
    async with serve(echo) as served:
        reader = await served.connect()
        reader.send(b"GET /vvllm/events HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.head()
        await reader.chunk()
        served.events.close()
        assert await reader.chunk() == b""


async def test_without_an_engine_there_is_503_with_the_progress(serve: Serve) -> None:
    async with serve() as served:
        served.backend.stage = "loading"
        answer = await served.post(CHAT)
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json["error"]["code"] == "busy"
    assert "loading, 25% done" in answer.json["error"]["message"]
    assert answer.json["status"]["stage"] == "loading"


async def test_the_next_request_reaches_the_next_application(serve: Serve) -> None:
    async with serve() as served:
        assert (await served.post(CHAT)).status == 503
        served.backend.app = echo
        assert (await served.post(CHAT)).status == 200


async def test_requests_are_logged_with_their_peer(serve: Serve) -> None:
    async with serve(echo) as served:
        with capture_logs() as logged:
            await served.post(CHAT, b"abc")
            await asyncio.sleep(0.05)
    (line,) = [event for event in logged if event["event"] == "request"]
    assert {key: line[key] for key in ("method", "path", "status", "outcome", "bytes")} == {
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "outcome": "ok",
        "bytes": 3,
    }
    assert line["uid"] == os.geteuid()
    assert line["pid"] > 0
    assert line["seconds"] < 5


@pytest.mark.parametrize(("status", "outcome"), [(200, "ok"), (400, "refused"), (500, "failed")])
async def test_what_the_application_refuses_is_not_logged_as_ok(
    serve: Serve, status: int, outcome: str
) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async with serve(application) as served:
        with capture_logs() as logged:
            await served.post(CHAT, b"abc")
            await asyncio.sleep(0.05)
    (line,) = [event for event in logged if event["event"] == "request"]
    assert (line["status"], line["outcome"]) == (status, outcome)


async def test_a_foreign_user_is_refused_unless_in_the_group(serve: Serve) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    for group, expected in ((None, 403), (4711, 200), (4712, 403)):
        async with serve(echo, group=group) as served:
            served.path.chmod(0o666)
            served.path.parent.chmod(0o755)
            status = await asyncio.to_thread(_ask_as_nobody, str(served.path))
            assert status == expected


def _ask_as_nobody(path: str) -> int:
    """The status that a process of user 65534, also in group 4711, gets."""
    program = (
        "import os, socket, sys\n"
        "os.setgroups([4711]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "s.sendall(b'GET /v1/models HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n'); print(s.recv(4096).split()[1].decode())"
    )
    command = [sys.executable, "-I", "-S", "-c", program, path]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


async def test_many_at_once(serve: Serve) -> None:
    async with serve(echo) as served:
        answers = await asyncio.gather(*(served.post(CHAT, str(n).encode()) for n in range(100)))
    assert [answer.body for answer in answers] == [str(n).encode() for n in range(100)]


async def test_the_socket_is_not_inherited(serve: Serve) -> None:
    async with serve(echo) as served:
        client = await served.connect()
        await asyncio.sleep(0.02)
        sock = client.writer.get_extra_info("socket")
        assert isinstance(sock.fileno(), int)
        assert not sock.get_inheritable()
        assert sock.family == socket.AF_UNIX


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"])
@pytest.mark.parametrize("path", ["/vvllm/status", "/vvllm/events"])
async def test_our_own_routes_can_only_be_read(serve: Serve, method: str, path: str) -> None:
    async with serve() as served:
        client = await served.connect()
        client.send(f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        status, headers = await client.head()
    assert status == 405
    assert headers["allow"] == "GET, HEAD"
