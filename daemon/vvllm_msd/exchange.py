"""One request and its answer between the socket and an application that may fail, hang or lose its engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from vvllm_msd.http_connection import Arrival, HeadersTooLargeError, HttpLimits, SlowRequestError
from vvllm_shared.errors import BadRequestError, EngineDiedError, GenerationError, TooLargeError, VvllmError

Scope = dict[str, Any]
Message = dict[str, Any]

_TYPED_ERRORS = ("/v1/messages", "/v1/responses")
"""APIs whose streams name their events; OpenAI's older ones send bare data and end with [DONE]."""


class Exchange:
    """A request that is read whole, handed to an application, and always answered.

    Args:
        receive: the server's ASGI callable.
        send: the server's ASGI callable.
        bounds: on the body and on the time it may take.
    """

    def __init__(self, scope: Scope, receive: Any, send: Any, bounds: HttpLimits) -> None:
        self.scope = scope
        self.arrival: Arrival = scope["state"]["arrival"]
        self.status = 0
        self.sent_bytes = 0
        self.outcome = "ok"
        self._receive = receive
        self._send = send
        self._bounds = bounds
        self._streaming = False
        self._complete = False
        self._body: bytes | None = None
        self._over = asyncio.Event()
        self._cause: VvllmError | None = None
        self._lost: Callable[[], bool] = lambda: False

    @property
    def path(self) -> str:
        """The request's path, decoded, without its query."""
        return str(self.scope["path"])

    # The request

    def check_headers(self) -> None:
        """h11 bounds only headers that have not arrived as a whole.

        Raises:
            HeadersTooLargeError: request line and headers are over their limit.
        """
        line = len(self.scope["raw_path"]) + len(self.scope["query_string"])
        size = line + sum(len(name) + len(value) + 4 for name, value in self.scope["headers"])
        if size > self._bounds.header_bytes:
            raise HeadersTooLargeError(self._bounds.header_bytes)

    async def read_body(self, limit: int) -> bool:
        """Read the request to its end, within its bounds; False when the client left meanwhile.

        Args:
            limit: bytes of its body.

        Raises:
            TooLargeError: the body is over its limit; the rest is not kept.
            BadRequestError: it did not arrive in time.
        """
        too_large = TooLargeError(f"The request's body is over the limit of {limit} bytes.", "Send less.")
        if self._declared_length() > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout_at(self.arrival.began + self._bounds.read_seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        return False
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        self._body = bytes(body)
                        return True
        except TimeoutError:
            raise SlowRequestError(self._bounds.read_seconds) from None

    def _declared_length(self) -> int:
        """h11 has checked that it is a number, and that there is one at most."""
        return next((int(value) for name, value in self.scope["headers"] if name == b"content-length"), 0)

    # The application

    async def run(
        self, app: Any, patience: float | None = None, lost: Callable[[], bool] = lambda: False
    ) -> BaseException | None:
        """Let `app` answer; where it does not, answer for it.

        The client's leaving, or `abort`, reaches `app` as `http.disconnect` at once; an app that does not end
        within `patience` seconds then (by default `bounds.leave_seconds`) is cancelled.

        Args:
            lost: whether the app has lost its engine; what it then says of an error is replaced by the cause.

        Returns:
            What `app` raised.
        """
        self._lost = lost
        watcher = asyncio.create_task(self._watch_client())
        inner = asyncio.create_task(app(self._inner_scope(), self._give, self._pass_on))
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({inner, over}, return_when=asyncio.FIRST_COMPLETED)
            if not inner.done():
                await asyncio.wait(
                    {inner}, timeout=self._bounds.leave_seconds if patience is None else patience
                )
        finally:
            for task in (watcher, over, inner):
                task.cancel()
            await asyncio.gather(watcher, over, inner, return_exceptions=True)
        failure = None if inner.cancelled() else inner.exception()
        # A client that does not read holds this up no longer; its connection is cut then.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._bounds.leave_seconds):
                await self._make_whole(failure)
        return failure

    def abort(self, cause: VvllmError) -> None:
        """End the exchange; the client is told `cause`, in the stream where one has begun."""
        self._cause = self._cause or cause
        self._over.set()

    def _inner_scope(self) -> Scope:
        return {**self.scope, "state": {}}

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._over.set()

    async def _give(self) -> Message:
        """ASGI `receive` for the application: the whole body, then nothing until the exchange is over."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _pass_on(self, message: Message) -> None:
        """ASGI `send` for the application; after the end nothing passes (a cancelled handler says `null`)."""
        if _is_error(message) and self._lost():
            # vLLM points at a stack trace "above", which the client cannot see.
            self.abort(
                EngineDiedError(
                    "The engine died while it answered.",
                    "The daemon starts a new one; try again in a moment.",
                )
            )
        if not self._over.is_set():
            await self._put(message)

    async def _make_whole(self, failure: BaseException | None) -> None:
        """Nobody waits for ever: finish an answer that the application did not."""
        if self._complete:
            return
        if self._over.is_set() and self._cause is None:
            self.outcome = "client left"
            return
        error = self._cause or _told(failure)
        self.outcome = error.code
        if not self.status:
            await self.refuse(error)
        elif self._streaming:
            await self._put({"type": "http.response.body", "body": self._error_event(error)})
        # A half-sent body that is no stream cannot be repaired: the server cuts the connection, and it shows.

    def _error_event(self, error: VvllmError) -> bytes:
        """The error as the last event of a stream, as vLLM sends its own."""
        data = json.dumps({"type": "error"} | error.as_json()).encode()
        if self.path in _TYPED_ERRORS:
            return b"event: error\ndata: " + data + b"\n\n"
        return b"data: " + data + b"\n\ndata: [DONE]\n\n"

    # The answer

    async def refuse(
        self, error: VvllmError, headers: Mapping[str, str] | None = None, **extra: object
    ) -> None:
        """Answer with `error`, and with `extra` beside it in the body."""
        self.outcome = error.code
        await self.respond(error.http_status, error.as_json() | extra, headers)

    async def respond(
        self, status: int, body: Mapping[str, object], headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with a JSON body."""
        data = json.dumps(body).encode()
        fields = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
        raw = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})
        await self._put({"type": "http.response.body", "body": data})

    async def _put(self, message: Message) -> None:
        await self._send(message)  # first: whoever is cancelled while it waits has sent nothing
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status >= 400 and self.outcome == "ok":  # the application's own refusal
                self.outcome = "refused" if self.status < 500 else "failed"
            self._streaming = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", ())
            )
        else:
            self.sent_bytes += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)


def _is_error(message: Message) -> bool:
    """An error status, or an event of a stream that carries an error."""
    return message.get("status", 0) >= 500 or b'"error"' in message.get("body", b"")[:64]


def _told(failure: BaseException | None) -> VvllmError:
    """What the client is told of an application that raised, or ended without an answer."""
    if isinstance(failure, RecursionError):
        return BadRequestError("The request is nested too deeply.", "Send flatter JSON.")
    reason = f": {type(failure).__name__}" if failure else ""
    return GenerationError(f"The server ended the request without an answer{reason}.", "Try it again.")
