"""A daemon that plays a script: HTTP over a real socket, one thread per connection, no engine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WAIT = 10.0

STATUS: dict[str, Any] = {
    "stage": "ready",
    "detail": "",
    "progress": None,
    "model": "tiny-moe",
    "boot_id": "b1",
    "generation": 1,
    "pid": 11,
    "engine_pid": 12,
    "uptime_s": 3725.4,
    "requests": 3,
    "cache": {
        "layers": 2,
        "experts": 8,
        "slots": 4,
        "bundle_bytes": 1 << 20,
        "hits": 100,
        "misses": 10,
        "bytes_paged": 10 << 20,
        "token_waves": 5,
        "pair_waves": 6,
        "steps": 7,
        "by_layer": {
            "decode": [[30, 0, 0, 0], [40, 5, 5 << 20, 1]],
            "prefill": [[30, 5, 5 << 20, 10], [0, 0, 0, 0]],
        },
    },
    "policy": {
        "state": "live",
        "pid": 13,
        "name": "lfru",
        "reason": "",
        "advice_applied": 1234,
        "restarts": 2,
    },
    "versions": {"vllm": "0.32.0", "vvllm-ms": "0.1.0"},
    "error": None,
}


class Connection:
    """One request, and the socket to answer it on."""

    def __init__(self, connected: socket.socket, head: bytes, body: bytes) -> None:
        self._socket = connected
        request, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.path, _ = request.split(" ")
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        self.body: Any = json.loads(body) if body else None

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send_json(self, value: object, status: int = 200, **headers: str) -> None:
        body = json.dumps(value).encode()
        lines = [f"{name.replace('_', '-')}: {text}" for name, text in headers.items()]
        head = [
            f"HTTP/1.1 {status} X",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *lines,
        ]
        self.send("\r\n".join([*head, "", ""]).encode() + body)

    def start_stream(self) -> None:
        self.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def send_event(self, value: object) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        data = f"data: {text}\n\n".encode()
        self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end_stream(self) -> None:
        self.send(b"0\r\n\r\n")

    def stream(self, events: Iterable[object], *, done: bool = True) -> None:
        self.start_stream()
        for event in events:
            self.send_event(event)
        if done:
            self.send_event("[DONE]")
        self.end_stream()

    def wait_closed(self) -> bool:
        """Whether the client closes its end within WAIT."""
        self._socket.settimeout(WAIT)
        try:
            return self._socket.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


Script = Callable[[Connection], None]


def chunk(
    content: str | None = None, *, reasoning: str | None = None, finish: str | None = None, **delta: object
) -> dict[str, object]:
    """One chunk of a streamed chat answer, as vLLM sends it."""
    fields: dict[str, object] = dict(delta)
    if content is not None:
        fields["content"] = content
    if reasoning is not None:
        fields["reasoning"] = reasoning
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return {"id": "chatcmpl-1", "model": "tiny-moe", "choices": [choice]}


def usage(prompt: int, completion: int) -> dict[str, object]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"id": "chatcmpl-1", "model": "tiny-moe", "choices": [], "usage": counts}


HELLO = [chunk("", role="assistant"), chunk("Hel"), chunk("lo"), chunk("", finish="stop"), usage(5, 3)]
"""An answer of two pieces."""


def answer(events: Iterable[object] = HELLO, *, done: bool = True) -> Script:
    return lambda connection: connection.stream(events, done=done)


def refusal(value: object, status: int, **headers: str) -> Script:
    return lambda connection: connection.send_json(value, status, **headers)


@dataclass
class ScriptedDaemon:
    """Answers `/v1/models` and `/vvllm/status` like a ready daemon; `routes` says what else, or otherwise."""

    listener: socket.socket
    path: Path | None = None
    routes: dict[str, Script] = field(default_factory=dict)
    seen: list[Connection] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._statuses = 0
        self.routes.setdefault("/v1/models", refusal({"data": [{"id": "tiny-moe"}, {"id": "other"}]}, 200))
        self.routes.setdefault("/vvllm/status", self._status)
        self.listener.listen(64)
        self._start(self._accept)

    @classmethod
    def at(cls, path: Path) -> ScriptedDaemon:
        path.parent.mkdir(parents=True, exist_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        return cls(listener, path)

    @property
    def chats(self) -> list[Any]:
        """The bodies of the generations that were asked for."""
        return [c.body for c in self.seen if c.method == "POST"]

    def close(self) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self._threads:
            thread.join(WAIT)
        assert not self.failures, self.failures

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connected, _ = self.listener.accept()
                self._start(self._serve, connected)

    def _serve(self, connected: socket.socket) -> None:
        with connected:
            try:
                data = b""
                while b"\r\n\r\n" not in data:
                    if not (more := connected.recv(65536)):
                        return
                    data += more
                head, _, body = data.partition(b"\r\n\r\n")
                length = next(
                    (int(x[15:]) for x in head.split(b"\r\n") if x.startswith(b"Content-Length:")), 0
                )
                while len(body) < length:
                    body += connected.recv(65536)
                connection = Connection(connected, head, body)
                self.seen.append(connection)
                self.routes[connection.path](connection)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client went away in mid-answer, as some tests want
            except BaseException as error:  # shown by close(), in the test's own thread
                self.failures.append(error)

    def _status(self, connection: Connection) -> None:
        """Counters that grow with every look: 30 hits, 10 misses, 10 MiB."""
        n = self._statuses
        self._statuses += 1
        cache = {
            **STATUS["cache"],
            "hits": 100 + 30 * n,
            "misses": 10 + 10 * n,
            "bytes_paged": (10 + 10 * n) << 20,
        }
        connection.send_json({**STATUS, "cache": cache})
