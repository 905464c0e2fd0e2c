"""Where the daemon touches vLLM's front end, all of it private API.

`RunningEngine` is one engine from its first process to its last: vLLM's `AsyncLLM`, whose EngineCore child owns the
device, and vLLM's OpenAI application on top of it. vllm is imported inside the functions, because it reads its
environment on import (see `vvllm_msd.engine_arguments`) and takes ten seconds. What is used here is named in
`tests/engine/test_vllm_contract_frontend.py`, which fails when a vLLM release changes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import multiprocessing
from argparse import Namespace
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from vvllm_msd.checkpoint.experts import layer_of
from vvllm_msd.engine_arguments import EngineSpec, app_args, platform_options, split_options
from vvllm_shared import PINNED_VLLM, logs
from vvllm_shared.board import Board
from vvllm_shared.errors import ConfigError, EngineDiedError, UnsupportedError, VvllmError
from vvllm_shared.messages import LayerShape

_STOP_SECONDS = 3.0
"""How long a killed engine may take to disappear: the kernel unmaps its memory first."""


def kill_engine_processes() -> None:
    """SIGKILL what multiprocessing started from here, which also frees a start that hangs.

    That is EngineCore; its own children asked the kernel to die with it (see `vvllm_msd.cli`).
    """
    for child in multiprocessing.active_children():
        child.kill()


class DeathRecord:
    """Latches that the engine died and why. Stands in for the uvicorn server that vLLM tells to exit then."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.cause = ""

    def record(self, cause: str) -> None:
        """Note the first cause."""
        self.cause = self.cause or cause
        self.event.set()

    @property
    def should_exit(self) -> bool:
        """uvicorn's name: vLLM's handlers set it when a request meets a dead engine."""
        return self.event.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self.record("a request met a dead engine")


class RunningEngine:
    """One live engine. Made by `start`; `stop` must be awaited, whatever became of it.

    Attributes:
        app: vLLM's OpenAI application (ASGI), its lifespan entered.
        death: set once when the engine is gone.
        layers: the paged layers.
    """

    def __init__(self, llm: Any, thread: ThreadPoolExecutor) -> None:
        self._llm = llm
        self._thread = thread
        self._lifespan = contextlib.AsyncExitStack()
        self._processes = multiprocessing.active_children()
        self.death = DeathRecord()
        self.app: Any = None
        self.layers: tuple[LayerShape, ...] = ()

    @classmethod
    async def start(cls, spec: EngineSpec, board: Board) -> RunningEngine:
        """Start the processes, load the model, check that it is paged and build the application.

        When cancelled, the engine's processes are killed and nothing remains.

        Raises:
            ConfigError: vLLM refuses an option.
            UnsupportedError: another vLLM, or a layer that is not paged.
            EngineDiedError: the engine ended before it was ready; the pager's own refusal is raised as it is.
        """
        # vLLM's constructor blocks until the model is loaded, so it runs beside the event loop; what it needs of
        # the loop (two tasks) it starts by itself with the first call from there. The thread is the engine's own
        # and lives as long as it: a child that asked for PR_SET_PDEATHSIG gets the signal when the *thread* that
        # forked it ends. vLLM installs signal handlers in its own processes only, none here.
        thread = ThreadPoolExecutor(1, "engine")
        try:
            loop = asyncio.get_running_loop()
            # In this context, which names the process in each line of the log.
            run = contextvars.copy_context().run
            llm, args = await loop.run_in_executor(thread, run, _construct, spec, board)
        except BaseException:
            kill_engine_processes()
            thread.shutdown(wait=False)
            raise
        engine = cls(llm, thread)
        try:
            engine._watch_processes()
            await engine._check_paged(spec)
            await engine._build_app(args)
        except BaseException:
            await engine.stop()
            raise
        return engine

    @property
    def pid(self) -> int | None:
        """Process id of vLLM's EngineCore."""
        return self._processes[0].pid if self._processes else None

    @property
    def alive(self) -> bool:
        """False as soon as anybody knows that it is dead; vLLM may know before `death` is set."""
        return not (self.death.event.is_set() or self._llm.errored)

    @property
    def unfinished(self) -> int:
        """Requests that the engine still computes or has queued; not those whose answer only waits to be read."""
        return int(self._llm.get_num_unfinished_requests())

    async def rpc(self, method: str, *args: object) -> Any:
        """Call `method` of the worker, between two steps of the model.

        Raises:
            EngineDiedError: instead of waiting for an engine that is gone.
            VvllmError: the call failed in the worker.
        """
        call = asyncio.ensure_future(self._llm.collective_rpc(method, args=args))
        dead = asyncio.ensure_future(self.death.event.wait())
        try:
            await asyncio.wait({call, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise EngineDiedError(f"The engine died during {method}: {self.death.cause}.")
            return call.result()[0]
        except VvllmError:
            raise
        except Exception as error:
            if not self.alive:
                raise EngineDiedError(f"The engine is dead; {method} was not done.") from error
            raise VvllmError(f"The engine's worker failed in {method}: {error}") from error
        finally:
            call.cancel()
            dead.cancel()

    def kill(self, cause: str) -> None:
        """SIGKILL the engine's processes; `death` is set with `cause`."""
        self.death.record(cause)
        kill_engine_processes()

    async def stop(self) -> None:
        """End the application and the engine's processes.

        They are killed at once: whoever waited for an answer has it by now, an engine has nothing to save, and on
        the CPU backend vLLM's own way waits many seconds for a worker that does not end.
        """
        loop = asyncio.get_running_loop()
        for process in self._processes:
            loop.remove_reader(process.sentinel)
        # A dead engine's application may fail to close; it is gone anyway.
        with contextlib.suppress(Exception):
            await self._lifespan.aclose()
        # It would report the engine's death as a failure; while somebody waits for an answer, it has to.
        if self._llm.output_handler is not None and not self.unfinished:
            self._llm.output_handler.cancel()
        kill_engine_processes()
        try:
            await loop.run_in_executor(self._thread, self._llm.shutdown, _STOP_SECONDS)
        except Exception as error:
            # Its processes are dead; what vLLM makes of that is not worth the daemon.
            logs.get().warning("engine_shutdown_failed", reason=f"{type(error).__name__}: {error}")
        self._thread.shutdown(wait=False)

    def _watch_processes(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self._processes:

            def ended(process: multiprocessing.process.BaseProcess = process) -> None:
                loop.remove_reader(process.sentinel)
                self.death.record(f"its process {process.name} (pid {process.pid}) ended")

            loop.add_reader(process.sentinel, ended)

    async def _check_paged(self, spec: EngineSpec) -> None:
        """vLLM only logs a plugin that fails to load and then serves unpaged layers: ask the worker itself."""
        report = await self.rpc("pager_report")
        self.layers = msgspec.convert(report["layers"], tuple[LayerShape, ...])
        check_layers(spec, [layer.name for layer in self.layers], report["unpaged"])

    async def _build_app(self, args: Namespace) -> None:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        tasks = await self._llm.get_supported_tasks()
        app = build_app(args, tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, args, tasks)
        app.state.server = self.death
        await self._lifespan.enter_async_context(app.router.lifespan_context(app))
        self.app = app


def check_layers(spec: EngineSpec, paged: Iterable[str], unpaged: Sequence[str]) -> None:
    """Compare the layers that were built with those that the checkpoint has.

    Args:
        spec: names the layers that must be there.
        paged: names of the modules that are paged.
        unpaged: names of those that have experts and are not.

    Raises:
        UnsupportedError: naming the layers that differ.
    """
    if unpaged:
        raise UnsupportedError(
            f"{len(unpaged)} MoE layers of {spec.model} are not paged, the first is {unpaged[0]}.",
            "This model's experts would fill the GPU; please report the model.",
        )
    found = {layer_of(f"{name}."): name for name in paged}
    if not found:
        raise UnsupportedError(
            f"No layer of {spec.model} is paged: the pager was not loaded.",
            "Unset VLLM_PLUGINS, or add vvllm_pager to it; vLLM's log above may name the reason.",
        )
    if absent := sorted(set(spec.moe_layers) - found.keys()):
        raise UnsupportedError(
            f"vLLM built layers {', '.join(map(str, absent))} of {spec.model} without paged experts, "
            "and the checkpoint has experts for them.",
            "An [engine] option that changes the model? Otherwise please report the model.",
        )
    if extra := [name for layer, name in found.items() if layer not in spec.moe_layers]:
        raise UnsupportedError(
            f"vLLM built experts for {', '.join(extra)}, and the checkpoint in {spec.model} has none there.",
            "An [engine] option that changes the model? Otherwise please report the model.",
        )


def _construct(spec: EngineSpec, board: Board) -> tuple[Any, Namespace]:
    """The engine and the front end's arguments. Blocks until the model is loaded."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if vllm.__version__.partition("+")[0] != PINNED_VLLM:
        raise UnsupportedError(
            f"vLLM {vllm.__version__} is installed, and the pager was verified with {PINNED_VLLM} only.",
            f"Install vllm=={PINNED_VLLM}.",
        )
    engine_options, app_options = split_options(spec)
    try:
        config = AsyncEngineArgs(**engine_options).create_engine_config()
        args = app_args(engine_options | app_options, config)
        if spec.fit_context:
            # As if the user had asked vLLM for -1, but never more than our own default (kv_cache_utils.py:2635).
            config.model_config.original_max_model_len = -1
        _print_platform(spec, config.compilation_config.max_cudagraph_capture_size or 0)
    except VvllmError:
        raise
    except (ValueError, TypeError, KeyError, AssertionError, OSError, RuntimeError) as error:
        # All that vLLM and transformers raise for an option, a tokenizer or a machine that does not suit them.
        raise ConfigError(f"vLLM refuses {spec.model}: {_reason(error)}") from error
    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats), args
    except Exception as error:
        raise board.refusal() or EngineDiedError(
            f"The engine ended while it started: {_reason(error)}", "The lines above say why."
        ) from error


def _print_platform(spec: EngineSpec, largest_graph: int) -> None:
    """The settings that could not be printed before the platform was known."""
    log = logs.get()
    for name, value in platform_options(spec).items():
        log.info("setting", name=name, value=value, source="default")
    log.info("cuda_graphs", largest_batch_tokens=largest_graph)


def _reason(error: Exception) -> str:
    """One line of an exception; pydantic's own text has many."""
    errors = getattr(error, "errors", None)
    text = "; ".join(str(e["msg"]) for e in errors()) if callable(errors) else str(error)
    return " ".join(text.split()) or type(error).__name__
