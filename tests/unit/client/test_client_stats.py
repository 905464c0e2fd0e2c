"""Numbers about a generation."""

from __future__ import annotations

from scripted_daemon import STATUS

from vvllm_client.events import End, Token, Usage
from vvllm_client.quantities import duration, percent, size
from vvllm_client.stats import CacheUse, Meter, cache_use


def after(**cache: object) -> dict[str, object]:
    return {**STATUS, "cache": {**STATUS["cache"], **cache}}


def test_times_are_taken_from_the_events() -> None:
    now = iter([10.0, 11.5, 12.0, 13.5])
    meter = Meter(clock=lambda: next(now))
    for event in (Token("a", "reasoning"), Token("b"), Token("c"), Usage(7, 5), End("stop")):
        meter.note(event)
    report = meter.report(None)
    assert (report.first_token_s, report.tokens_per_s) == (1.5, 2.0)
    assert (report.usage, report.finish_reason) == (Usage(7, 5), "stop")


def test_tokens_that_come_at_once_have_no_rate() -> None:
    now = iter([10.0, 11.5, 11.501])
    meter = Meter(clock=lambda: next(now))
    for event in (Token("a"), Token("b"), Usage(7, 64)):
        meter.note(event)
    report = meter.report(None)
    assert (report.first_token_s, report.tokens_per_s) == (1.5, None)


def test_no_token_no_rate() -> None:
    report = Meter().report(None)
    assert (report.first_token_s, report.tokens_per_s, report.usage) == (None, None, None)


def test_the_caches_numbers_are_differences() -> None:
    use = cache_use(STATUS, after(hits=190, misses=20, bytes_paged=11 << 20))
    assert use == CacheUse(hits=90, misses=10, bytes_paged=1 << 20)
    assert use.hit_rate == 0.9
    assert CacheUse(0, 0, 0).hit_rate is None


def test_no_differences_across_a_restart_or_without_numbers() -> None:
    assert cache_use(STATUS, {**STATUS, "generation": 2}) is None
    assert cache_use(STATUS, {**STATUS, "boot_id": "b2"}) is None
    assert cache_use(STATUS, {**STATUS, "cache": {}}) is None
    assert cache_use(STATUS, after(hits=None)) is None
    assert cache_use(None, STATUS) is None


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert [duration(s) for s in (0, 59.9, 3725, 90_000)] == ["0 s", "59 s", "1 h 2 min", "1 d 1 h"]
    assert [percent(x) for x in (None, 0.0, 0.9994)] == ["-", "0.0%", "99.9%"]
