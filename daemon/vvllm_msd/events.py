"""Events of the daemon, from one publisher to many readers, none of whom can hold another up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

Event = Mapping[str, object]
"""One event; `type` names it, the other fields are its own. JSON values only."""

QUEUE = 256
"""Events that may wait for one slow reader before its oldest are dropped."""


class Subscription:
    """One reader's bounded queue. Iterate it; it ends when the hub closes."""

    def __init__(self, limit: int) -> None:
        self._waiting: deque[Event] = deque(maxlen=limit)
        self._lost = 0
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, event: Event) -> None:
        """Queue `event`; when the queue is full its oldest event is lost, and counted."""
        self._lost += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(event)
        self._changed.set()

    def close(self) -> None:
        """End the iteration after what is queued."""
        self._closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events in order; `{"type": "lost", "count": n}` stands where n events were dropped."""
        while True:
            while self._waiting:
                if self._lost:
                    lost, self._lost = self._lost, 0
                    yield {"type": "lost", "count": lost}
                yield self._waiting.popleft()
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()


class EventHub:
    """Where the daemon publishes. All calls are made on the daemon's event loop.

    Args:
        limit: events that may wait for one reader.
    """

    def __init__(self, limit: int = QUEUE) -> None:
        self._limit = limit
        self._readers: set[Subscription] = set()
        self._closed = False

    def publish(self, event: Event) -> None:
        """Hand `event` to every reader. Never blocks."""
        for reader in self._readers:
            reader.put(event)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """A reader that gets all events published inside the `with` block."""
        reader = Subscription(self._limit)
        if self._closed:
            reader.close()
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)

    def close(self) -> None:
        """End every reader's iteration; later readers get none."""
        self._closed = True
        for reader in self._readers:
            reader.close()
