"""The client for programs with an event loop: the same calls; a task that is cancelled aborts its request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from vvllm_client import answers, failures
from vvllm_client.address import Address, TcpAddress, find_addresses, unreachable
from vvllm_client.events import Event
from vvllm_client.http11 import ResponseReader
from vvllm_client.requests import (
    CHAT_PATH,
    COMPLETION_PATH,
    DEFAULT_SAMPLING,
    MODELS_PATH,
    STATUS_PATH,
    Message,
    Sampling,
    chat_body,
    completion_body,
    encode,
)
from vvllm_shared.errors import VvllmError

_CONNECT_SECONDS = 5.0
_QUERY_SECONDS = 10.0
_READ_BYTES = 1 << 16


class AsyncClient:
    """Talks to the daemon; every call is a connection of its own, so one client serves many tasks.

    Args:
        socket: the daemon's Unix socket; None looks at `$VVLLM_HOST`, then at the usual places.

    Raises:
        UsageError, ConfigError: `socket` or `$VVLLM_HOST` can name no daemon.
    """

    def __init__(self, socket: str | Path | None = None) -> None:
        self._addresses = find_addresses(socket)
        self._model: str | None = None

    @asynccontextmanager
    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        think: bool | None = None,
        sampling: Sampling = DEFAULT_SAMPLING,
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """Continue a conversation (see `requests.chat_body`): `async with` gives its events as they come.

        Leaving the block, by cancellation too, closes the connection, and the daemon aborts what is left.

        Raises:
            VvllmError: the daemon cannot be reached, loads, or refuses the request; from the iteration
                GenerationError: it reports a failure, or the answer ended too early.
        """
        body = chat_body(await self.model(), messages, system=system, think=think, sampling=sampling)
        async with self._stream(CHAT_PATH, body) as events:
            yield events

    @asynccontextmanager
    async def complete(
        self, prompt: str, *, sampling: Sampling = DEFAULT_SAMPLING
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """Continue a text as it is, without a chat template; otherwise as `chat`."""
        body = completion_body(await self.model(), prompt, sampling=sampling)
        async with self._stream(COMPLETION_PATH, body) as events:
            yield events

    async def model(self) -> str:
        """The id of the daemon's model; asked once, and again after a request that was refused."""
        if self._model is None:
            self._model = answers.first_model(*await self._query(MODELS_PATH))
        return self._model

    async def status(self) -> dict[str, Any]:
        """What `/vvllm/status` says: stage, progress, cache counters, policy; also while the model loads."""
        return answers.json_object(*await self._query(STATUS_PATH))

    async def _query(self, path: str) -> tuple[bytes, Address]:
        async with self._connect() as connection:
            try:
                async with asyncio.timeout(_QUERY_SECONDS):
                    await connection.request("GET", path)
                    return await connection.read_all(), connection.address
            except TimeoutError as error:
                raise failures.no_response(error, connection.address, _QUERY_SECONDS) from None

    @asynccontextmanager
    async def _stream(self, path: str, body: Mapping[str, object]) -> AsyncIterator[AsyncIterator[Event]]:
        async with self._connect() as connection:
            try:
                await connection.request("POST", path, body)
            except VvllmError:
                self._model = None  # the daemon may have come back with another one
                raise
            async with aclosing(connection.events()) as events:
                yield events

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[_Connection]:
        failed: list[tuple[Address, OSError]] = []
        for address in self._addresses:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    reader, writer = await _open(address)
                break
            except OSError as error:
                failed.append((address, error))
        else:
            raise unreachable(failed)
        try:
            yield _Connection(reader, writer, address)
        finally:
            # Not close(): that would first send what is left of the request.
            writer.transport.abort()


class _Connection:
    """One request and its response on a connected pair of streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Address) -> None:
        self.address = address
        self._reader = reader
        self._writer = writer
        self._response = ResponseReader()

    async def request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> None:
        """Send a request and wait for the head of its response.

        Raises:
            VvllmError: no response came, or its status is not 200.
        """
        try:
            self._writer.write(encode(method, path, self.address.host, body))
            await self._writer.drain()
            while not self._response.status:
                await self._receive()
        except ConnectionError as error:
            raise failures.no_response(error, self.address, None) from None
        if self._response.status != 200:
            raise failures.from_http(
                self._response.status, self._response.headers, await self.read_all(), self.address
            )

    async def events(self) -> AsyncGenerator[Event]:
        """The events of a streamed answer, as they come."""
        decoder = answers.AnswerDecoder(self.address)
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                for event in decoder.feed(piece):
                    yield event
                if decoder.done:
                    return
        decoder.finish()

    async def read_all(self) -> bytes:
        """The whole body, of a bounded size."""
        body = bytearray()
        async for piece in self._pieces():
            body += piece
            answers.check_size(body, self.address)
        return bytes(body)

    async def _pieces(self) -> AsyncGenerator[bytes]:
        yield self._response.take_body()
        while not self._response.done:
            try:
                await self._receive()
            except ConnectionError:
                raise failures.cut_short(self.address) from None
            yield self._response.take_body()

    async def _receive(self) -> None:
        self._response.feed(await self._reader.read(_READ_BYTES))


async def _open(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, TcpAddress):
        return await asyncio.open_connection(address.name, address.port)
    # A Unix socket connects at once or not at all; asyncio would take "its queue is full" for "in progress".
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        connected.connect(str(address.path))
        return await asyncio.open_unix_connection(sock=connected)
    except BaseException:
        connected.close()
        raise
