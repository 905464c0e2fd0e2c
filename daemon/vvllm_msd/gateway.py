"""The daemon's HTTP server: one for its whole life, in front of one OpenAI application after another.

`/vvllm/status` and `/vvllm/events` are answered here. A listed route of vLLM's goes to the application of the
engine that serves now; without one the answer is 503 with the progress. Everything else does not exist: among
vLLM's own routes are some that administrate it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import uvicorn

from vvllm_msd.events import Event, EventHub
from vvllm_msd.exchange import Exchange, Scope
from vvllm_msd.http_connection import DEFAULT_LIMITS, HttpConnection, HttpLimits, Peer, SlowRequestError
from vvllm_shared import limits, logs
from vvllm_shared.errors import BadRequestError, BusyError, PermissionDeniedError, VvllmError

ROUTES = re.compile(
    r"/v1/(models|chat/completions|completions|messages|messages/count_tokens"
    r"|responses|responses/[\w-]{1,128}|responses/[\w-]{1,128}/cancel)"
    r"|/tokenize|/detokenize|/health|/metrics|/version"
)
"""vLLM's routes that clients may reach."""

OWN_ROUTES = ("/vvllm/status", "/vvllm/events")
TOKENIZE_ROUTES = ("/tokenize", "/detokenize")
"""vLLM answers these beside the event loop but under Python's lock, with no bound of its own."""

RETRY_SECONDS = 2
"""`Retry-After` of a 503."""

CLOSE_SECONDS = 2
"""How long the last answers may take to leave when the server stops."""


class Backend(Protocol):
    """What the gateway asks of the daemon's lifecycle."""

    @property
    def app(self) -> Any | None:
        """The ASGI application of the engine that serves now, or None."""

    def status(self, by_layer: bool = False) -> Mapping[str, object]:
        """`Status.as_json()` of this moment, on request with the counters of each layer."""


class NoSuchRouteError(BadRequestError):
    """A path that is not served here."""

    code, http_status = "not_found", 404


class MethodError(BadRequestError):
    """A route that only shows something was asked to do something."""

    code, http_status = "method_not_allowed", 405


class Gateway:
    """An ASGI application and its server.

    Args:
        backend: asked anew for each request.
        events: what `/vvllm/events` shows; closed when the server stops.
        group: members of this group may connect besides the daemon's own user and root.
        bounds: limits on what arrives and how long it may take.
    """

    def __init__(
        self,
        backend: Backend,
        events: EventHub,
        group: int | None = None,
        bounds: HttpLimits = DEFAULT_LIMITS,
    ) -> None:
        self._backend = backend
        self._events = events
        self._group = group
        self._bounds = bounds
        self._draining = False
        self._running: dict[Exchange, asyncio.Event] = {}
        """What the engine's application answers now, and the event of its end."""
        self._log = logs.get()

    @property
    def in_flight(self) -> int:
        """Requests that the engine's application is answering now."""
        return len(self._running)

    @asynccontextmanager
    async def listening(self, sock: socket.socket) -> AsyncIterator[None]:
        """Serve on `sock` (bound and listening) inside the `async with` block, then close everything."""
        server = _Server(
            uvicorn.Config(
                self,
                http=partial(HttpConnection, bounds=self._bounds),
                h11_max_incomplete_event_size=self._bounds.header_bytes,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield
        finally:
            self._events.close()
            server.should_exit = True
            await serving
            for connection in list(server.server_state.connections):
                connection.transport.abort()

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, let the running ones go on for `seconds`, then abort them.

        Returns:
            How many were aborted; each client was told.
        """
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended()
        left = self.in_flight
        await self.abort(BusyError("The daemon is stopping; it ended this request.", "Try it again later."))
        return left

    async def abort(self, cause: VvllmError) -> None:
        """End every running request with `cause`, and wait until their applications have ended."""
        for exchange in self._running:
            exchange.abort(cause)
        await self._ended()

    async def _ended(self) -> None:
        """The requests that run now have ended. Later ones are not waited for."""
        for ended in list(self._running.values()):
            await ended.wait()

    # ASGI

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer one request, and log it."""
        exchange = Exchange(scope, receive, send, self._bounds)
        began = time.monotonic()
        try:
            await self._answer(exchange)
        except MethodError as error:
            await exchange.refuse(error, {"allow": "GET, HEAD"})
        except SlowRequestError as error:
            # What is missing of it may still come, and must not be taken for the next request.
            await exchange.refuse(error, {"connection": "close"})
        except VvllmError as error:
            await exchange.refuse(error)
        finally:
            peer = exchange.arrival.peer
            # Whoever watches the status asks many times a minute.
            say = self._log.debug if exchange.path == "/vvllm/status" else self._log.info
            say(
                "request",
                method=scope["method"],
                path=exchange.path[:256],
                status=exchange.status,
                outcome=exchange.outcome,
                seconds=round(time.monotonic() - began, 4),
                bytes=exchange.sent_bytes,
                uid=peer and peer.uid,
                pid=peer and peer.pid,
            )

    async def _answer(self, exchange: Exchange) -> None:
        exchange.check_headers()
        if not self._admits(exchange.arrival.peer):
            raise PermissionDeniedError(
                "You are not allowed to use this daemon.", "Ask its owner to add you to the socket's group."
            )
        if exchange.path in OWN_ROUTES and exchange.scope["method"] not in ("GET", "HEAD"):
            raise MethodError(f"{exchange.path} can only be read.", "Use GET.")
        if exchange.path == "/vvllm/status":
            await exchange.respond(200, self._backend.status(by_layer=True))
        elif exchange.path == "/vvllm/events":
            await exchange.run(self._show_events, patience=0)
        elif ROUTES.fullmatch(exchange.path):
            await self._forward(exchange)
        else:
            raise NoSuchRouteError(f"There is no {exchange.path[:256]} here.", "See GET /vvllm/status.")

    def _admits(self, peer: Peer | None) -> bool:
        """The mode of the socket is the first gate, this is the second: it holds whoever changed the mode."""
        return peer is not None and (peer.uid in (0, os.geteuid()) or self._group in peer.gids)

    async def _forward(self, exchange: Exchange) -> None:
        small = exchange.path in TOKENIZE_ROUTES
        if not await exchange.read_body(limits.TOKENIZE_BYTES if small else self._bounds.body_bytes):
            exchange.outcome = "client left"
            return
        app = self._backend.app
        if self._draining or app is None:
            await self._refuse_for_now(exchange)
            return
        with self._counted(exchange):
            failure = await exchange.run(app, lost=lambda: self._backend.app is not app)
        # The traceback of a RecursionError takes seconds to format, and says nothing.
        if isinstance(failure, Exception) and not isinstance(failure, RecursionError):
            self._log.error("application raised", path=exchange.path, exc_info=failure)

    @contextmanager
    def _counted(self, exchange: Exchange) -> Iterator[None]:
        ended = self._running[exchange] = asyncio.Event()
        try:
            yield
        finally:
            del self._running[exchange]
            ended.set()

    async def _refuse_for_now(self, exchange: Exchange) -> None:
        status = self._backend.status()
        stage = "draining" if self._draining else status["stage"]
        progress = status.get("progress")
        done = f", {progress:.0%} done" if isinstance(progress, float) else ""
        error = BusyError(f"The daemon is {stage}{done}.", "Try again when vvllm-ctl status says ready.")
        await exchange.refuse(error, {"retry-after": str(RETRY_SECONDS)}, status=status)

    async def _show_events(self, _scope: Scope, _receive: Any, send: Any) -> None:
        """Server-sent events: the status as it is, then what happens, until the client or the daemon ends."""

        async def put(event: Event) -> None:
            data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})

        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        with self._events.subscribe() as events:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await put({"type": "status", **self._backend.status()})
            async for event in events:
                await put(event)
        await send({"type": "http.response.body", "body": b""})


class _Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:
        """Signals are the daemon's."""
        return nullcontext()
