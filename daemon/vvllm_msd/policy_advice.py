"""Advice on its way to the engine: the newest for each layer, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from vvllm_shared.messages import ALL_LAYERS, Advise

Apply = Callable[[list[Advise]], Awaitable[None]]
"""Hands advice to the pager; the order in the list is the order in which it counts."""


class AdviceQueue:
    """Holds at most one `Advise` for each layer, and one for all.

    Args:
        apply: the call into the engine; what it raises is logged and the advice is lost.
        pause: seconds to gather advice in before a call.
        log: a structlog logger.
    """

    def __init__(self, apply: Apply, pause: float, log: Any) -> None:
        self.applied = 0
        self._apply = apply
        self._pause = pause
        self._log = log
        self._waiting: dict[int, Advise] = {}
        self._filled = asyncio.Event()
        self._failing = False

    def put(self, advise: Advise) -> None:
        """Replace what waits for the same layer, or for all of them."""
        if advise.layer == ALL_LAYERS:
            self._waiting.clear()
        self._waiting[advise.layer] = advise
        self._filled.set()

    def clear(self) -> None:
        """Forget what waits: its session is over."""
        self._waiting.clear()
        self._filled.clear()

    async def run(self) -> None:
        """Hand over what waits, for ever."""
        while True:
            await self._filled.wait()
            await asyncio.sleep(self._pause)  # advice for many layers comes as many messages
            batch = list(self._waiting.values())
            self.clear()
            if batch:
                await self._hand_over(batch)

    async def _hand_over(self, batch: list[Advise]) -> None:
        try:
            await self._apply(batch)
        except Exception as error:
            # Whatever the engine raises (it may just have died), the policy process is not worth the daemon.
            if not self._failing:
                self._log.warning(
                    "advice_not_applied", reason=f"{type(error).__name__}: {error}", advice=len(batch)
                )
            self._failing = True
        else:
            self._failing = False
            self.applied += len(batch)
