"""How a command ends that an exception ends: a sentence and its exit code, or a traceback where the fault is ours."""

from __future__ import annotations

import sys
import traceback

from vvllm_shared.errors import ConfigError, Exit, VvllmError

_EXTRAS = frozenset(
    {"msgpack", "msgspec", "numpy", "safetensors", "structlog", "torch", "transformers", "uvicorn"}
    | {"vllm", "zmq"}
)
"""Modules that the extras `cuda` and `cpu` bring, and the distribution alone does not."""


def explain(error: BaseException) -> VvllmError | None:
    """What to tell a user of an exception; None of one that is a bug."""
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return ConfigError(
            f"The Python module {error.name} is not installed.",
            'Install what the daemon needs: pip install "vvllm-ms[cuda]", or "vvllm-ms[cpu]" without a GPU.',
        )
    return error if isinstance(error, VvllmError) else None


def report(error: Exception) -> int:
    """Say on stderr why a command of `vvllm-msd` ends; its exit code."""
    if told := explain(error):
        print(f"vvllm-msd: {told}", file=sys.stderr)
        return int(told.exit_code)
    traceback.print_exception(error)
    return int(Exit.INTERNAL)
