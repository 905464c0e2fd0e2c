"""Events: one publisher, many readers, nobody held up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from vvllm_msd.events import Event, EventHub
from vvllm_msd.status import CacheStatus, PolicyStatus, Stage, Status


async def take(events: AsyncIterator[Event], count: int) -> list[Event]:
    return [await asyncio.wait_for(anext(events), 1) for _ in range(count)]


async def test_every_reader_gets_every_event_in_order() -> None:
    hub = EventHub()
    with hub.subscribe() as one, hub.subscribe() as two:
        for number in range(3):
            hub.publish({"type": "n", "number": number})
        for reader in (one, two):
            assert [event["number"] for event in await take(aiter(reader), 3)] == [0, 1, 2]


async def test_a_reader_gets_what_comes_while_it_waits() -> None:
    hub = EventHub()
    with hub.subscribe() as reader:
        waiting = asyncio.create_task(take(aiter(reader), 1))
        await asyncio.sleep(0)
        hub.publish({"type": "late"})
        assert await waiting == [{"type": "late"}]


async def test_the_oldest_events_are_lost_and_counted() -> None:
    hub = EventHub(limit=2)
    with hub.subscribe() as reader:
        events = aiter(reader)
        for number in range(5):
            hub.publish({"type": "n", "number": number})
        assert await take(events, 2) == [{"type": "lost", "count": 3}, {"type": "n", "number": 3}]
        for number in range(5, 8):
            hub.publish({"type": "n", "number": number})
        assert await take(events, 3) == [
            {"type": "lost", "count": 2}, {"type": "n", "number": 6}, {"type": "n", "number": 7}
        ]  # fmt: skip


async def test_close_ends_readers_after_what_is_queued() -> None:
    hub = EventHub()
    with hub.subscribe() as reader:
        hub.publish({"type": "last"})
        hub.close()
        assert [event async for event in reader] == [{"type": "last"}]
    with hub.subscribe() as late:
        assert [event async for event in late] == []


async def test_a_reader_that_left_is_forgotten() -> None:
    hub = EventHub()
    with hub.subscribe() as reader:
        pass
    hub.publish({"type": "n"})
    reader.close()
    assert [event async for event in reader] == []


def test_the_shape_of_a_status() -> None:
    status = Status(Stage.LOADING, "m", "b", 7, progress=0.5, policy=PolicyStatus("running", 8, "lfru"))
    assert status.as_json() == {
        "stage": "loading", "detail": "", "progress": 0.5, "model": "m", "boot_id": "b", "generation": 0,
        "pid": 7, "engine_pid": None, "uptime_s": 0.0, "requests": 0, "versions": {}, "error": None,
        "policy": {
            "state": "running", "pid": 8, "name": "lfru", "reason": "", "epoch": 0, "advice_applied": 0,
            "advice_stale": 0, "bad_messages": 0, "restarts": 0,
        },
        "cache": {
            "layers": 0, "experts": 0, "slots": 0, "bundle_bytes": 0, "hits": 0, "misses": 0,
            "bytes_paged": 0, "brought_ahead": 0, "used_ahead": 0, "token_waves": 0, "pair_waves": 0, "steps": 0,
            "traces_sent": 0, "traces_dropped": 0, "advice_applied": 0,
        },
    }  # fmt: skip


def test_the_counters_of_each_layer_are_shown_where_they_are_asked_for() -> None:
    of_each = {"decode": [[3, 1, 100, 0]], "prefill": [[0, 0, 0, 0]]}
    status = Status(Stage.READY, "m", "b", 7, cache=CacheStatus(1, 8, 4, by_layer=of_each))
    assert status.as_json()["cache"]["by_layer"] == of_each  # type: ignore[index]
    assert "by_layer" not in Status(Stage.READY, "m", "b", 7).as_json()["cache"]  # type: ignore[operator]
