"""A real gateway on a real Unix socket, with a small application in the place of vLLM's."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_client import App, FakeBackend, Serve, Served

from vvllm_msd.events import EventHub
from vvllm_msd.gateway import Gateway
from vvllm_msd.http_connection import HttpLimits


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """pytest's own directories have long names, and a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="vv-") as directory:
        yield Path(directory)


@pytest.fixture
def serve(short_dir: Path) -> Serve:
    @asynccontextmanager
    async def start(app: App | None = None, group: int | None = None, **bounds: Any) -> AsyncIterator[Served]:
        path = short_dir / "http.sock"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(path))
        sock.listen()
        sock.setblocking(False)
        backend, events = FakeBackend(app), EventHub(limit=4)
        gateway = Gateway(backend, events, group, HttpLimits(**bounds))
        served = Served(gateway, backend, events, path)
        try:
            async with gateway.listening(sock):
                yield served
        finally:
            for client in served.clients:
                client.writer.transport.abort()
            path.unlink()

    return start
