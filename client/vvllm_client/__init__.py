"""The light client of vvllm-ms: standard library only, sync and async, for people and for editor plugins.

    from vvllm_client import Client, Token

    with Client().chat("Why is the sky blue?") as stream:
        for event in stream:
            if isinstance(event, Token) and event.channel == "answer":
                print(event.text, end="", flush=True)

Leaving the `with` block closes the connection, and the daemon then aborts the request. Every failure is a
`VvllmError` with a sentence, a hint, a code and an exit code. Names are imported on first use, so that
`import vvllm_client` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vvllm_client.async_client import AsyncClient
    from vvllm_client.events import End, Event, Start, Token, Usage
    from vvllm_client.requests import Message, Sampling
    from vvllm_client.sync_client import Client, Stream
    from vvllm_shared.errors import VvllmError

__all__ = [
    "AsyncClient",
    "Client",
    "End",
    "Event",
    "Message",
    "Sampling",
    "Start",
    "Stream",
    "Token",
    "Usage",
    "VvllmError",
]

_HOME = {
    "AsyncClient": "vvllm_client.async_client",
    "Client": "vvllm_client.sync_client",
    "End": "vvllm_client.events",
    "Event": "vvllm_client.events",
    "Message": "vvllm_client.requests",
    "Sampling": "vvllm_client.requests",
    "Start": "vvllm_client.events",
    "Stream": "vvllm_client.sync_client",
    "Token": "vvllm_client.events",
    "Usage": "vvllm_client.events",
    "VvllmError": "vvllm_shared.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
