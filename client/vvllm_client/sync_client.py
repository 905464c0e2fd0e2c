"""The client for programs without an event loop, and for the command."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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


class Client:
    """Talks to the daemon; every call is a connection of its own, so one client serves many threads.

    Args:
        socket: the daemon's Unix socket; None looks at `$VVLLM_HOST`, then at the usual places.

    Raises:
        UsageError, ConfigError: `socket` or `$VVLLM_HOST` can name no daemon.
    """

    def __init__(self, socket: str | Path | None = None) -> None:
        self._addresses = find_addresses(socket)
        self._model: str | None = None

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        think: bool | None = None,
        sampling: Sampling = DEFAULT_SAMPLING,
    ) -> Stream:
        """Continue a conversation (see `requests.chat_body`); use the stream in a `with` block.

        Raises:
            VvllmError: the daemon cannot be reached, loads, or refuses the request.
        """
        body = chat_body(self.model(), messages, system=system, think=think, sampling=sampling)
        return self._stream(CHAT_PATH, body)

    def complete(self, prompt: str, *, sampling: Sampling = DEFAULT_SAMPLING) -> Stream:
        """Continue a text as it is, without a chat template; otherwise as `chat`."""
        return self._stream(COMPLETION_PATH, completion_body(self.model(), prompt, sampling=sampling))

    def model(self) -> str:
        """The id of the daemon's model; asked once, and again after a request that was refused."""
        if self._model is None:
            self._model = answers.first_model(*self._query(MODELS_PATH))
        return self._model

    def status(self) -> dict[str, Any]:
        """What `/vvllm/status` says: stage, progress, cache counters, policy; also while the model loads."""
        return answers.json_object(*self._query(STATUS_PATH))

    def _query(self, path: str) -> tuple[bytes, Address]:
        connection = self._connect(_QUERY_SECONDS)
        connection.request("GET", path)
        return connection.read_all(), connection.address

    def _stream(self, path: str, body: Mapping[str, object]) -> Stream:
        connection = self._connect(None)
        try:
            connection.request("POST", path, body)
        except VvllmError:
            self._model = None  # the daemon may have come back with another one
            raise
        return Stream(connection)

    def _connect(self, timeout: float | None) -> _Connection:
        failed: list[tuple[Address, OSError]] = []
        for address in self._addresses:
            try:
                return _Connection(_open(address), address, timeout)
            except OSError as error:
                failed.append((address, error))
        raise unreachable(failed)


class Stream:
    """The events of one generation, as they come. Leaving its `with` block aborts what is left of it."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._cancelled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        """Each event once.

        Raises:
            GenerationError: the daemon reports a failure, or the answer ended too early.
        """
        decoder = answers.AnswerDecoder(self._connection.address)
        try:
            for piece in self._connection.pieces():
                yield from decoder.feed(piece)
                if decoder.done:
                    return
            decoder.finish()
        except VvllmError:
            if not self._cancelled:
                raise

    def cancel(self) -> None:
        """Abort the generation, from any thread; the iteration then ends without an `End`."""
        self._cancelled = True
        self._connection.shut_down()

    def close(self) -> None:
        """Close the connection; the daemon aborts what it has not sent yet."""
        self._connection.close()


class _Connection:
    """One request and its response on a connected socket."""

    def __init__(self, connected: socket.socket, address: Address, timeout: float | None) -> None:
        connected.settimeout(timeout)
        self.address = address
        self._socket = connected
        self._timeout = timeout
        self._response = ResponseReader()

    def request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> None:
        """Send a request and wait for the head of its response; close the connection if that fails.

        Raises:
            VvllmError: no response came, or its status is not 200.
        """
        try:
            # A daemon that refuses a request half-read closes; its answer says why.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(encode(method, path, self.address.host, body))
            while not self._response.status:
                self._receive()
            if self._response.status != 200:
                raise failures.from_http(
                    self._response.status, self._response.headers, self.read_all(), self.address
                )
        except OSError as error:
            self.close()
            raise failures.no_response(error, self.address, self._timeout) from None
        except BaseException:
            self.close()
            raise

    def pieces(self) -> Iterator[bytes]:
        """The response's body as it comes.

        Raises:
            GenerationError: the connection ended within it.
        """
        yield self._response.take_body()
        while not self._response.done:
            try:
                self._receive()
            except OSError:
                raise failures.cut_short(self.address) from None
            yield self._response.take_body()

    def read_all(self) -> bytes:
        """The whole body, of a bounded size; the connection is closed then."""
        body = bytearray()
        try:
            for piece in self.pieces():
                body += piece
                answers.check_size(body, self.address)
        finally:
            self.close()
        return bytes(body)

    def shut_down(self) -> None:
        """End the connection while another thread may be reading from it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _receive(self) -> None:
        self._response.feed(self._socket.recv(_READ_BYTES))


def _open(address: Address) -> socket.socket:
    if isinstance(address, TcpAddress):
        return socket.create_connection((address.name, address.port), _CONNECT_SECONDS)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(_CONNECT_SECONDS)
        connected.connect(str(address.path))
    except BaseException:
        connected.close()
        raise
    return connected
