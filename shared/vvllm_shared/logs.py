"""One way to log: structlog events with fields, JSON unless a person is watching."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def set_up(process: str, level: str = "info", json: bool | None = None) -> None:
    """Send structlog's events to stderr.

    Args:
        process: name put into every event as `process` ("vvllm-msd", "vvllm-policy", …).
        level: lowest level shown: debug, info, warning or error.
        json: one JSON object per line; None means: unless stderr is a terminal.
    """
    as_json = (not sys.stderr.isatty()) if json is None else json
    renderer: Any = (
        structlog.processors.JSONRenderer(sort_keys=True)
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=process)


def get(**fields: object) -> Any:
    """A logger with `fields` bound to each of its events."""
    return structlog.get_logger(**fields)
