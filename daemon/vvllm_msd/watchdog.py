"""Has the engine moved? vLLM's own health check stays green while the engine hangs."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_STEPS = 32
"""Steps of the model that an engine gets more time for: the first prompts and tokens are the first real shapes,
and kernels are compiled for them inside the step, layer by layer, also by compilers that do not say so."""
COMPILE_PATIENCE = 10
"""How many times the limit a step may take then, and a kernel that Triton compiles whenever: seconds to minutes."""


@dataclass
class Watchdog:
    """The time since the engine last made progress while it had work. Pure: time comes in with each look.

    The limit is `COMPILE_PATIENCE` times as long within an engine's first `FIRST_STEPS` steps of serving, and later
    for as long as the board says that Triton compiles a kernel, for a shape that came no sooner. Another compiler's
    kernel has to be ready within the limit itself by then.

    Args:
        limit: seconds without progress that are too long; 0 never.
        steps_before: the board's counter of forward passes when the engine began to serve.
    """

    limit: float
    steps_before: int
    _progress: int = -1
    _moved_at: float = 0.0

    def late(self, now: float, progress: int, steps: int, busy: bool, compiling: bool) -> float:
        """The limit that the engine is over, in seconds; 0 while it is well.

        Args:
            now: monotonic seconds.
            progress: the board's counter of layers run and of compiles begun and ended.
            steps: the board's counter of forward passes.
            busy: the engine serves and has unfinished requests. A request that waits behind others is fine as
                long as those move.
            compiling: the board counts kernels under compilation.
        """
        if not busy or progress != self._progress:
            self._progress = progress
            self._moved_at = now
        patient = compiling or steps - self.steps_before < FIRST_STEPS
        limit = self.limit * (COMPILE_PATIENCE if patient else 1)
        return limit if 0 < limit <= now - self._moved_at else 0.0
