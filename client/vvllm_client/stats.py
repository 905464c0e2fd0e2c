"""How a generation went: times, tokens, and what the expert cache did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vvllm_client.events import End, Event, Token, Usage

_COUNTERS = ("hits", "misses", "bytes_paged")
_ENGINE = ("boot_id", "generation")
_FASTEST = 5000.0
"""Tokens a second that no model gives to one request: text that was held back and came at once is no measure."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the expert cache did between two looks, for every request that ran then."""

    hits: int
    misses: int
    bytes_paged: int

    @property
    def hit_rate(self) -> float | None:
        """Hits per look-up; None without one."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None


@dataclass(frozen=True, slots=True)
class Report:
    """One generation in numbers; None where one is not known.

    Attributes:
        first_token_s: from the request to the first token, reasoning too.
        tokens_per_s: of those after the first; None where they came at once.
        cache: None if the server counts none, or its engine was restarted meanwhile.
    """

    usage: Usage | None
    finish_reason: str | None
    first_token_s: float | None
    tokens_per_s: float | None
    cache: CacheUse | None


class Meter:
    """Takes the time of a generation's events; made just before its request.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._first: float | None = None
        self._last = self._begin
        self._usage: Usage | None = None
        self._finish_reason: str | None = None

    def note(self, event: Event) -> None:
        """Count one event, as it comes."""
        match event:
            case Token():
                self._last = self._clock()
                if self._first is None:
                    self._first = self._last
            case Usage():
                self._usage = event
            case End(finish_reason):
                self._finish_reason = finish_reason

    def report(self, cache: CacheUse | None) -> Report:
        """The numbers, once the generation has ended."""
        first_token_s = tokens_per_s = None
        if self._first is not None:
            first_token_s = self._first - self._begin
            later = self._usage.completion_tokens - 1 if self._usage else 0
            if later > 0 and self._last - self._first > later / _FASTEST:
                tokens_per_s = later / (self._last - self._first)
        return Report(self._usage, self._finish_reason, first_token_s, tokens_per_s, cache)


def cache_use(before: Mapping[str, object] | None, after: Mapping[str, object] | None) -> CacheUse | None:
    """What the cache did between two answers of `/vvllm/status`; None if they do not tell."""
    if before is None or after is None or any(before.get(name) != after.get(name) for name in _ENGINE):
        return None
    old, new = _counters(before), _counters(after)
    if old is None or new is None:
        return None
    return CacheUse(*(b - a for a, b in zip(old, new, strict=True)))


def _counters(status: Mapping[str, object]) -> list[int] | None:
    cache = status.get("cache")
    values = [cache.get(name) for name in _COUNTERS] if isinstance(cache, dict) else []
    whole = [value for value in values if isinstance(value, int)]
    return whole if len(whole) == len(_COUNTERS) else None
