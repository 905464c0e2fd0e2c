"""Has the engine moved? vLLM's own health check stays green while the engine hangs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Watchdog:
    """The time since the engine last made progress while it had work. Pure: time comes in with each look.

    Args:
        limit: seconds without progress that are too long; 0 never.
    """

    limit: float
    _progress: int = -1
    _moved_at: float = 0.0

    def expired(self, now: float, progress: int, busy: bool) -> bool:
        """Whether the engine hangs.

        Args:
            now: monotonic seconds.
            progress: the board's counter of layers run.
            busy: the engine has unfinished requests, and nothing else (a kernel that is being compiled) explains
                why they wait. A request that waits behind others is fine as long as those move.
        """
        if not busy or progress != self._progress:
            self._progress = progress
            self._moved_at = now
        return 0 < self.limit <= now - self._moved_at
