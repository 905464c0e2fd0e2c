"""Has the engine moved? vLLM's own health check stays green while the engine hangs."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_STEPS = 32
"""Steps of the model that an engine gets more time for: the first prompts and tokens are the first real shapes,
and Triton compiles its kernels for them inside the step, layer by layer."""
FIRST_STEPS_PATIENCE = 10
"""How many times the limit a step may take until then: many kernels compile, each for seconds to a minute."""


@dataclass
class Watchdog:
    """The time since the engine last made progress while it had work. Pure: time comes in with each look.

    Within an engine's first `FIRST_STEPS` steps of serving the limit is `FIRST_STEPS_PATIENCE` times as long. A
    kernel that is compiled later, for a shape that came no sooner, has to be ready within the limit itself.

    Args:
        limit: seconds without progress that are too long; 0 never.
        steps_before: the board's counter of forward passes when the engine began to serve.
    """

    limit: float
    steps_before: int
    _progress: int = -1
    _moved_at: float = 0.0

    def late(self, now: float, progress: int, steps: int, busy: bool) -> float:
        """The limit that the engine is over, in seconds; 0 while it is well.

        Args:
            now: monotonic seconds.
            progress: the board's counter of layers run.
            steps: the board's counter of forward passes.
            busy: the engine serves and has unfinished requests. A request that waits behind others is fine as
                long as those move.
        """
        if not busy or progress != self._progress:
            self._progress = progress
            self._moved_at = now
        new = steps - self.steps_before < FIRST_STEPS
        limit = self.limit * (FIRST_STEPS_PATIENCE if new else 1)
        return limit if 0 < limit <= now - self._moved_at else 0.0
