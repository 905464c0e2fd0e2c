"""One engine after another: start, watch, tell the clients when it dies, start the next within the limits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol

import msgspec

from vvllm_msd.config import ServerConfig
from vvllm_msd.engine import RunningEngine
from vvllm_msd.engine_arguments import EngineSpec
from vvllm_msd.progress import LoadDisplay, Progress, read_progress
from vvllm_msd.status import Stage
from vvllm_msd.watchdog import Watchdog
from vvllm_shared import logs
from vvllm_shared.board import Board, Phase
from vvllm_shared.errors import EngineDiedError, VvllmError
from vvllm_shared.messages import Advise

STABLE_SECONDS = 60.0
"""An engine that lived so long after it was ready has not failed in a row with the next."""
_BACKOFF_SECONDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_LOOK_SECONDS = 0.25

StartEngine = Callable[[EngineSpec, Board], Awaitable[RunningEngine]]


class Surroundings(Protocol):
    """What the supervisor does to the rest of the daemon."""

    def changed(self) -> None:
        """Something that `status` shows is different now."""

    def engine_ready(self, engine: RunningEngine) -> None:
        """An engine serves."""

    def engine_gone(self) -> None:
        """It serves no longer."""

    async def abort_requests(self, cause: EngineDiedError) -> None:
        """End what clients wait for, and tell them why."""

    def clear_files(self) -> None:
        """Remove what an engine leaves in the file system; none runs now."""


class Supervisor:
    """Keeps an engine alive.

    Args:
        spec: what to start.
        server: the limits: restarts, watchdog, concurrent requests.
        board: the counters that every engine's pager writes.
        boot_id: names this run of the daemon in the engine's traces.
        traces: ZeroMQ endpoint for them, None for none.
        surroundings: is told what happens.
        start_engine: makes an engine.

    Attributes:
        engine: the one that serves now.
        progress: of the load, while there is no engine; its stage otherwise.
        generation: engines started so far.
        last_error: why the last engine ended or could not start.
    """

    def __init__(
        self,
        spec: EngineSpec,
        server: ServerConfig,
        board: Board,
        boot_id: str,
        traces: str | None,
        surroundings: Surroundings,
        start_engine: StartEngine = RunningEngine.start,
    ) -> None:
        self._spec = spec
        self._server = server
        self._board = board
        self._boot_id = boot_id
        self._traces = traces
        self._around = surroundings
        self._start_engine = start_engine
        self._log = logs.get()
        self.engine: RunningEngine | None = None
        self.progress = Progress(Stage.STARTING)
        self.generation = 0
        self.last_error: VvllmError | None = None

    async def run(self) -> NoReturn:
        """Supervise until cancelled; then the engine is stopped.

        Raises:
            VvllmError: the first engine could not start, or too many in a row died or could not start.
        """
        deaths = 0
        while True:
            try:
                ready_at = await self._one_engine()
                if time.monotonic() - ready_at >= STABLE_SECONDS:
                    deaths = 0
            except VvllmError as error:
                # The first engine's refusal is an answer to the user. Later the same configuration has served
                # before, so that whatever is refused (memory that the dead engine still holds) may pass.
                if self.generation == 1:
                    raise
                self.last_error = error
                self._log.error("engine_not_started", reason=error.sentence, generation=self.generation)
            finally:
                self._around.clear_files()
            deaths += 1
            await self._before_restart(deaths)

    async def apply(self, advice: list[Advise]) -> None:
        """Hand the policy's advice to the pager, once no request waits for its turn; lost without an engine.

        Raises:
            VvllmError: the engine died or refused it.
        """
        # Polled: vLLM tells nobody when its queue is empty.
        while (engine := self.engine) and engine.unfinished > self._server.max_num_seqs:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
        if engine is not None:
            await engine.rpc("pager_apply", [msgspec.structs.asdict(one) for one in advice])

    async def _one_engine(self) -> float:
        """The life of one engine. Returns when it was ready, after its death."""
        engine = await self._start()
        ready_at = time.monotonic()
        try:
            await self._watch(engine)
        finally:
            self.engine = None
            self._around.engine_gone()
            try:
                if engine.death.event.is_set():
                    await self._tell_clients(engine)
            finally:
                await engine.stop()
        return ready_at

    async def _start(self) -> RunningEngine:
        self.generation += 1
        self._board.clear()
        reporter = asyncio.create_task(self._report_load())
        began = time.monotonic()
        try:
            engine = await self._start_engine(self._spec, self._board)
            try:
                await engine.rpc("pager_serve", self._traces, self._boot_id)
            except BaseException:
                await engine.stop()
                raise
        finally:
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)
        self.engine = engine
        self.progress = Progress(Stage.READY)
        self._around.engine_ready(engine)
        self._log.info(
            "engine_ready",
            generation=self.generation,
            pid=engine.pid,
            seconds=round(time.monotonic() - began, 1),
            layers=len(engine.layers),
            slots=engine.layers[0].slots,
            experts=engine.layers[0].experts,
        )
        self._around.changed()
        return engine

    async def _report_load(self) -> None:
        display = LoadDisplay(self._log)
        try:
            while True:
                progress = read_progress(self._board.read())
                if self.generation > 1:
                    progress = dataclasses.replace(progress, stage=Stage.RESTARTING)
                display.show(progress)
                if progress != self.progress:
                    self.progress = progress
                    self._around.changed()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            display.clear()

    async def _watch(self, engine: RunningEngine) -> None:
        """Return when `engine` is dead; kill it when it hangs."""
        limit = self._server.watchdog_seconds
        watchdog = Watchdog(limit, self._board.get("steps"))
        while not engine.death.event.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(engine.death.event.wait(), min(1.0, limit / 4) if limit else None)
            busy = engine.unfinished > 0 and self._board.get("phase") == Phase.SERVING
            # Progress is read last, as the pager writes it first: who sees patience end sees why.
            compiling, steps = self._board.get("compiling") > 0, self._board.get("steps")
            if late := watchdog.late(time.monotonic(), self._board.get("progress"), steps, busy, compiling):
                engine.kill(f"it made no progress for {late:g} s while requests were waiting, and was killed")

    async def _tell_clients(self, engine: RunningEngine) -> None:
        self.last_error = EngineDiedError(
            f"The engine died: {engine.death.cause}.", "The daemon restarts it; try again in a moment."
        )
        self.progress = Progress(Stage.RESTARTING)
        self._log.error("engine_died", cause=engine.death.cause, generation=self.generation, pid=engine.pid)
        self._around.changed()
        await self._around.abort_requests(self.last_error)

    async def _before_restart(self, deaths: int) -> None:
        if deaths > self._server.max_restarts:
            raise EngineDiedError(
                f"The engine died or could not start {deaths} times in a row; the daemon gives up.",
                f"The last time: {self.last_error.sentence}" if self.last_error else "",
            )
        delay = _BACKOFF_SECONDS[min(deaths, len(_BACKOFF_SECONDS)) - 1]
        self._log.warning("restarting", death=deaths, limit=self._server.max_restarts, delay_s=delay)
        await asyncio.sleep(delay)
