"""The daemon's life: check everything, listen, keep an engine and a policy process, drain, leave nothing behind."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from vvllm_msd import demo_model
from vvllm_msd.checkpoint import validate
from vvllm_msd.config import DaemonConfig
from vvllm_msd.endings import explain, report
from vvllm_msd.engine import RunningEngine
from vvllm_msd.engine_arguments import EngineSpec, set_environment
from vvllm_msd.engine_settings import engine_settings, read_facts
from vvllm_msd.events import EventHub
from vvllm_msd.gateway import Gateway
from vvllm_msd.memory import check_host_memory, host_memory
from vvllm_msd.policy_link import PolicyLink, serve_command
from vvllm_msd.runtime_dir import RuntimeDir, remove_engine_files, runtime_dir
from vvllm_msd.status import CacheStatus, Stage, Status
from vvllm_msd.supervisor import Supervisor
from vvllm_shared import PINNED_VLLM, logs
from vvllm_shared.board import FIELDS as BOARD_FIELDS
from vvllm_shared.board import Board
from vvllm_shared.errors import Exit, VvllmError
from vvllm_shared.paths import runtime_paths, state_dir

_COUNTERS = tuple(field.name for field in fields(CacheStatus) if field.name in BOARD_FIELDS)
_LOOK_SECONDS = 2.0
"""How often to look whether clients still find the socket."""
_VERSIONS = {"vvllm-ms": version("vvllm-ms"), "vllm": PINNED_VLLM}


class StopSignals:
    """SIGTERM, SIGINT and SIGHUP (a terminal that closes): the first asks the daemon to drain, any further one to
    hurry. Needs a running loop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.hurry if self.asked.is_set() else self.asked).set()


class Daemon:
    """One run of the daemon in a prepared runtime directory. The gateway's backend.

    Args:
        config: what the user said.
        spec: the engine to keep alive.
        runtime: the locked directory with its listening socket.
    """

    def __init__(self, config: DaemonConfig, spec: EngineSpec, runtime: RuntimeDir) -> None:
        self._config = config
        self._spec = spec
        self._runtime = runtime
        self._log = logs.get()
        self._began = time.monotonic()
        self._boot_id = uuid.uuid4().hex
        self._board, board_fd = Board.create()
        set_environment(runtime.paths.rpc, board_fd)
        self._events = EventHub()
        self._gateway = Gateway(self, self._events, runtime.group)
        traced = config.policy.name != "off"
        self._supervisor = Supervisor(
            spec,
            config.server,
            self._board,
            self._boot_id,
            f"ipc://{runtime.paths.traces}" if traced else None,
            self,
        )
        self._policy = PolicyLink(
            runtime.paths,
            config.policy.name,
            self._boot_id,
            self._supervisor.apply,
            self._log,
            command=serve_command(runtime.paths, config.policy.name, config.log),
        )
        self._draining = False
        self._failure: VvllmError | None = None

    async def run(self) -> None:
        """Serve until a signal says stop.

        Raises:
            VvllmError: the engine cannot be kept alive.
        """
        signals = StopSignals()
        self._log.info("starting", model=str(self._spec.model), socket=str(self._runtime.paths.http))
        async with self._gateway.listening(self._runtime.listener):
            await self._policy.start()
            supervising = asyncio.create_task(self._supervisor.run())
            asked = asyncio.create_task(signals.asked.wait())
            lost = asyncio.create_task(self._socket_lost())
            try:
                await asyncio.wait({supervising, asked, lost}, return_when=asyncio.FIRST_COMPLETED)
                if supervising.done():
                    self._show_failure(supervising)
                else:
                    await self._drain(signals)
            finally:
                asked.cancel()
                lost.cancel()
                await self._stop_children(supervising)
        if lost.done() and not lost.cancelled():
            raise VvllmError(
                f"The socket {self._runtime.paths.http} was removed, and nobody could reach this daemon any more.",
                "Start it again, and keep what cleans up away from the runtime directory.",
            )
        self._log.info("stopped", uptime_s=round(time.monotonic() - self._began, 1))

    async def _socket_lost(self) -> None:
        """Return when clients no longer find the socket where it was made; it cannot be put back."""
        while self._runtime.reachable():  # noqa: ASYNC110 - nothing tells; inotify would be a dependency
            await asyncio.sleep(_LOOK_SECONDS)

    def _show_failure(self, supervising: asyncio.Task[NoReturn]) -> None:
        """Tell the readers of `/vvllm/events` why the daemon ends; it ends with the same error."""
        if error := supervising.exception():
            self._failure = explain(error) or VvllmError(f"The daemon failed: {error!r}.")
            self.changed()

    async def _drain(self, signals: StopSignals) -> None:
        """Let running requests end, for so long as configured or until a second signal."""
        self._draining = True
        self._log.info(
            "draining", requests=self._gateway.in_flight, seconds=self._config.server.drain_seconds
        )
        self.changed()
        draining = asyncio.create_task(self._gateway.drain(self._config.server.drain_seconds))
        hurry = asyncio.create_task(signals.hurry.wait())
        try:
            await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                draining.cancel()
                await self._gateway.drain(0)
        finally:
            hurry.cancel()

    async def _stop_children(self, supervising: asyncio.Task[NoReturn]) -> None:
        """End engine and policy process, side by side.

        Raises:
            VvllmError: what the supervisor ended with.
        """
        supervising.cancel()
        _, ended = await asyncio.gather(self._policy.stop(), supervising, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended

    # The gateway's backend

    @property
    def app(self) -> object | None:
        """vLLM's application, while an engine serves."""
        engine = self._supervisor.engine
        return engine.app if engine and engine.alive else None

    def status(self, by_layer: bool = False) -> Mapping[str, object]:
        """The state of this moment; `by_layer` adds the counters of each layer, which many events need not carry."""
        supervisor = self._supervisor
        engine, progress = supervisor.engine, supervisor.progress
        error = self._failure or supervisor.last_error
        stage = Stage.DRAINING if self._draining else progress.stage
        return Status(
            stage=Stage.FAILED if self._failure else stage,
            model=self._spec.name,
            boot_id=self._boot_id,
            pid=os.getpid(),
            detail=progress.detail,
            progress=progress.fraction,
            generation=supervisor.generation,
            engine_pid=engine.pid if engine else None,
            uptime_s=round(time.monotonic() - self._began, 1),
            requests=self._gateway.in_flight,
            cache=self._cache_status(engine, by_layer),
            policy=self._policy.status(),
            versions=_VERSIONS,
            error=error.as_json()["error"] if error else None,
        ).as_json()

    def _cache_status(self, engine: RunningEngine | None, by_layer: bool) -> CacheStatus:
        counters = self._board.read()
        counted: dict[str, Any] = {name: counters[name] for name in _COUNTERS}
        if engine is None:
            return CacheStatus(**counted)
        layers, first = len(engine.layers), engine.layers[0]
        shape = (layers, first.experts, first.slots, first.bundle_bytes)
        of_each = self._board.layers(layers) if by_layer else None
        return CacheStatus(*shape, **counted, by_layer=of_each)

    # The supervisor's surroundings

    def changed(self) -> None:
        """Show the status to the readers of `/vvllm/events`."""
        self._events.publish({"type": "status", **self.status()})

    def engine_ready(self, engine: RunningEngine) -> None:
        """The policy may advise."""
        self._policy.set_engine(list(engine.layers), self._spec.fingerprint)

    def engine_gone(self) -> None:
        """The policy has nobody to advise."""
        self._policy.engine_gone()

    async def abort_requests(self, cause: VvllmError) -> None:
        """Tell every client that waits for the engine."""
        await self._gateway.abort(cause)

    def clear_files(self) -> None:
        """Remove what the last engine left."""
        remove_engine_files(self._runtime.paths)


def serve(config: DaemonConfig) -> NoReturn:
    """Run the daemon until a signal stops it. Whatever can be refused is refused before it costs anything.

    It ends the process itself, with an exit code of `vvllm_shared.errors.Exit`.

    Raises:
        VvllmError: the checkpoint, the configuration or the runtime directory is refused, or memory is short.
    """
    logs.set_up("vvllm-msd", config.log.level, config.log.json)
    spec = _engine_spec(config)
    with runtime_dir(runtime_paths()) as runtime:
        code = _run(config, spec, runtime)
    # Not sys.exit: that waits for a thread that may be importing vLLM for another ten seconds, and the libraries
    # then print what they think they leaked. Everything of ours is closed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _engine_spec(config: DaemonConfig) -> EngineSpec:
    """What to start, after checkpoint, configuration and machine have been checked against each other."""
    demo = config.model == "demo"
    model = demo_model.ensure(state_dir() / "demo") if demo else Path(config.model).absolute()
    checkpoint = validate(model)
    # Weights that vLLM quantizes while it loads them become smaller than anything that is known here.
    quantizes = "quantization" in config.engine and not checkpoint.quantization
    least_bytes = 0 if quantizes else checkpoint.least_experts_bytes
    facts = read_facts(model, checkpoint.experts, checkpoint.top_k, least_bytes // checkpoint.experts)
    settings = engine_settings(config, facts)
    log = logs.get()
    for warning in (*checkpoint.warnings, *settings.warnings):
        log.warning("warning", sentence=warning)
    for setting in settings.settings:
        log.info("setting", name=setting.name, value=setting.value, source=setting.source)
    memory = host_memory()
    log.info("memory", experts_bytes=least_bytes, available_bytes=memory.available, available_in=memory.bound)
    check_host_memory(least_bytes, memory)
    return EngineSpec(
        model=model,
        name="demo" if demo else model.name,
        expert_cache=settings.expert_cache,
        fingerprint=_fingerprint(model),
        moe_layers=checkpoint.moe_layers,
        options=settings.options,
        on_gpu=settings.on_gpu,
        user_options=config.engine,
        fit_context=config.server.max_model_len is None,
    )


def _fingerprint(model: Path) -> str:
    """Names a checkpoint by its config and the sizes of its weight files."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for file in sorted(model.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()[:32]


def _run(config: DaemonConfig, spec: EngineSpec, runtime: RuntimeDir) -> int:
    try:
        asyncio.run(_async_run(config, spec, runtime))
    except Exception as error:
        return report(error)
    return int(Exit.OK)


async def _async_run(config: DaemonConfig, spec: EngineSpec, runtime: RuntimeDir) -> None:
    await Daemon(config, spec, runtime).run()
