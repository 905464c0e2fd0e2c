"""Raw connections to a gateway, and what stands where the lifecycle stands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vvllm_msd.events import EventHub
from vvllm_msd.gateway import Gateway

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


@dataclass
class FakeBackend:
    """Stands where the lifecycle stands: an application that a test chooses, and a status."""

    app: App | None = None
    stage: str = "ready"

    def status(self, by_layer: bool = False) -> dict[str, object]:
        return {"stage": self.stage, "progress": 0.25, "detail": ""} | (
            {"by_layer": True} if by_layer else {}
        )


@dataclass
class Answer:
    """One whole HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


@dataclass
class Client:
    """One raw connection: tests must be able to misbehave."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = (line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in fields}

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; b"" is the last."""
        size = int(await self.reader.readline(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self) -> Answer:
        status, headers = await self.head()
        if "content-length" in headers:
            return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return Answer(status, headers, body)

    async def closed(self) -> bool:
        """The server ended the connection, sooner or later."""
        try:
            return await self.reader.read(1 << 20) == b""
        except ConnectionResetError:
            return True


@dataclass
class Served:
    """A gateway that listens."""

    gateway: Gateway
    backend: FakeBackend
    events: EventHub
    path: Path
    clients: list[Client] = field(default_factory=list)

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_unix_connection(str(self.path)))
        self.clients.append(client)
        return client

    async def get(self, path: str) -> Answer:
        return await self.request(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    async def post(self, path: str, body: bytes = b"{}") -> Answer:
        return await self.request(post(path, body))

    async def request(self, raw: bytes) -> Answer:
        client = await self.connect()
        client.send(raw)
        return await client.answer()


def post(path: str, body: bytes = b"{}") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


Serve = Callable[..., Any]
"""`async with serve(app, body_bytes=10) as served` starts a gateway with these bounds."""


CHAT = "/v1/chat/completions"
SSE = [(b"content-type", b"text/event-stream")]


async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": message["body"]})


class Watched:
    """Streams one event each `pause` seconds for ever, and notes when it is told that its client left."""

    def __init__(self, pause: float = 0.01, piece: bytes = b"data: x\n\n") -> None:
        self.pause, self.piece = pause, piece
        self.started = asyncio.Event()
        self.left = asyncio.Event()
        self.sent = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        writing = asyncio.create_task(self._write(send))
        assert (await receive())["type"] == "http.disconnect"
        self.left.set()
        writing.cancel()

    async def _write(self, send: Any) -> None:
        while True:
            await send({"type": "http.response.body", "body": self.piece, "more_body": True})
            self.sent += 1
            self.started.set()
            await asyncio.sleep(self.pause)
