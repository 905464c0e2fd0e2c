"""The board is told while Triton compiles a kernel: that takes seconds to minutes, and nothing else moves meanwhile.

Triton calls `jit_cache_hook` when it lacks a kernel for a call's types and constants, before it compiles one or
reads it from its cache on disk, and `jit_post_compile_hook` after (triton/runtime/jit.py, `_do_compile`). Each is a
single function: whoever comes second calls the first, as vLLM's own monitor of compiles does (utils/jit_monitor.py).
A compilation that fails, as an autotuner's may, calls no second hook: the next host-driven layer clears the
count.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vvllm_shared.board import Board


def report_compiles(board: Board, runtime: Any, jit: Any) -> None:
    """Count the kernels under compilation in the board's `compiling`, from now on.

    A beginning and an end are progress too: each kernel has its own time, and the step goes on with a fresh limit.

    Args:
        board: the engine's.
        runtime: `triton.knobs.runtime`, which holds the hooks.
        jit: the module `triton.runtime.jit`, which calls them.
    """
    _forgive_constants(jit)
    before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def begins(**kernel: Any) -> Any:
        skipped = before(**kernel) if before is not None else None
        if not skipped:  # a true answer means: do not compile
            board.add("compiling")
            board.add("progress")
        return skipped

    def ended(**kernel: Any) -> Any:
        # Progress first: who sees the end of the patience must see what it waited for.
        board.add("progress")
        # Never below zero: PyTorch's Inductor can be told to call this hook without the first one.
        board.set("compiling", max(board.get("compiling") - 1, 0))
        return after(**kernel) if after is not None else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = begins, ended


def _forgive_constants(jit: Any) -> None:
    """Let Triton call hooks for kernels whose constants are not JSON: with any hook it writes them down as such.

    vLLM's monitor does the same for the same reason, but is not there under `enforce_eager`, which is ours.
    """
    serialize = jit.serialize_specialization_data

    @wraps(serialize)
    def forgiving(*args: Any, **kwargs: Any) -> Any:
        try:
            return serialize(*args, **kwargs)
        except (TypeError, ValueError):
            return None

    jit.serialize_specialization_data = forgiving
