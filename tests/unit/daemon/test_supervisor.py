"""The supervisor's decisions: which ends of an engine end the daemon, and which begin the next engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vvllm_msd import supervisor
from vvllm_msd.config import ServerConfig
from vvllm_msd.engine import DeathRecord, RunningEngine
from vvllm_msd.engine_arguments import EngineSpec
from vvllm_msd.supervisor import Supervisor
from vvllm_shared.board import Board
from vvllm_shared.errors import BusyError, EngineDiedError, UnsupportedError, VvllmError
from vvllm_shared.messages import LayerShape

SPEC = EngineSpec(Path("/models/tiny"), "tiny", {"slots": 8}, "fingerprint", (0,))


class Engine:
    """An engine of this test's: ready at once, and dead as soon as it serves or when it is told."""

    pid, unfinished = 7, 0
    layers = (LayerShape("model.layers.0.mlp.experts", 16, 8, 4, 100),)

    def __init__(self, dies: bool = True, refuses: VvllmError | None = None) -> None:
        self.death = DeathRecord()
        self.stopped = False
        self._refuses = refuses
        if dies:
            self.death.record("it was killed")

    async def rpc(self, _method: str, *_args: object) -> None:
        if self._refuses:
            raise self._refuses

    async def stop(self) -> None:
        self.stopped = True


class Around:
    """The rest of the daemon, which notes what it is told."""

    def __init__(self) -> None:
        self.ready: asyncio.Queue[object] = asyncio.Queue()
        self.told: list[VvllmError] = []

    def changed(self) -> None: ...

    def engine_ready(self, engine: object) -> None:
        self.ready.put_nowait(engine)

    def engine_gone(self) -> None: ...

    async def abort_requests(self, cause: VvllmError) -> None:
        self.told.append(cause)

    def clear_files(self) -> None: ...


class Starts:
    """Starts one engine after another, as the test planned them."""

    def __init__(self, *plan: Engine | VvllmError) -> None:
        self._plan = list(plan)

    async def __call__(self, _spec: EngineSpec, _board: Board) -> Any:
        first = self._plan.pop(0)
        if isinstance(first, VvllmError):
            raise first
        return first


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    monkeypatch.setattr(supervisor, "_BACKOFF_SECONDS", (0.0,))
    board, fd = Board.create()
    yield board
    os.close(fd)


def supervise(board: Board, around: Around, *plan: Engine | VvllmError, restarts: int = 5) -> Supervisor:
    return Supervisor(SPEC, ServerConfig(max_restarts=restarts), board, "boot", None, around, Starts(*plan))


BUSY = BusyError("The host store cannot be pinned now.", "Free some memory.")


@pytest.mark.parametrize("refusal", [BUSY, UnsupportedError("no"), EngineDiedError("it ended")])
async def test_the_first_engine_s_refusal_is_the_daemon_s(board: Board, refusal: VvllmError) -> None:
    with pytest.raises(type(refusal)) as ended:
        await supervise(board, Around(), refusal).run()
    assert ended.value is refusal


async def test_a_later_engine_that_is_refused_is_tried_again(board: Board) -> None:
    around, last = Around(), Engine(dies=False)
    running = supervise(board, around, Engine(), BUSY, EngineDiedError("it ended"), last)
    task = asyncio.create_task(running.run())
    async with asyncio.timeout(5):
        assert await around.ready.get() is not last
        assert await around.ready.get() is last
    assert running.last_error is not None
    assert (running.generation, running.last_error.sentence) == (4, "it ended")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert last.stopped


async def test_a_later_engine_that_cannot_be_told_to_serve_is_stopped_and_replaced(board: Board) -> None:
    mute = Engine(refuses=VvllmError("The engine's worker failed in pager_serve."))
    running = supervise(board, Around(), Engine(), mute, BUSY, restarts=2)
    with pytest.raises(EngineDiedError, match="3 times in a row"):
        await running.run()
    assert mute.stopped


async def test_refusals_count_as_deaths_and_the_last_one_is_named(board: Board) -> None:
    running = supervise(board, Around(), Engine(), BUSY, BUSY, restarts=2)
    with pytest.raises(EngineDiedError, match="3 times in a row") as ended:
        await running.run()
    assert "cannot be pinned now" in ended.value.hint
    assert running.generation == 3


async def test_clients_of_a_dead_engine_are_told(board: Board) -> None:
    around = Around()
    with pytest.raises(EngineDiedError):
        await supervise(board, around, Engine(), restarts=0).run()
    assert [error.sentence for error in around.told] == ["The engine died: it was killed."]


async def test_what_vllm_raises_when_a_dead_engine_is_shut_down_goes_no_further() -> None:
    class Broken:
        output_handler = None

        def shutdown(self, _timeout: float) -> None:
            raise RuntimeError("a socket is closed already")

    await RunningEngine(Broken(), ThreadPoolExecutor(1)).stop()
