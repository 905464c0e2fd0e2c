"""Runs a benchmark's engines in processes of their own, forked from one that has imported vLLM already.

An engine frees its VRAM for certain only when its process ends, and importing vLLM takes longer than starting one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from vvllm_msd.verify_engine import set_environment
from vvllm_shared.processes import die_with_parent

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(
    ["vllm.entrypoints.llm", "vllm.v1.worker.gpu_worker", "vllm.model_executor.models.qwen3_moe"]
)


def run(task: Callable[..., None], *args: Any) -> None:
    """Call `task(*args)` in a new process and wait for its end; what it prints goes to standard error, as vLLM's does.

    Raises:
        SystemExit: it failed.
    """
    set_environment()  # before vLLM is imported
    process = _FORKED.Process(target=_run, args=(task, args))
    process.start()
    process.join()
    if process.exitcode != 0:
        sys.exit(f"{task.__module__}.{task.__name__} ended with code {process.exitcode}")


def _run(task: Callable[..., None], args: tuple[Any, ...]) -> None:
    die_with_parent()
    os.dup2(2, 1)
    task(*args)
