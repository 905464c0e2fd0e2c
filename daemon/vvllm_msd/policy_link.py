"""The daemon's end of the line to its policy process.

The policy process advises, and nothing waits for it: while it is slow, stopped or dead the pager goes on with
what it was told last. This module starts it, replaces it, and lets through only what the living one says about
the running engine.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vvllm_msd.config import LogConfig
from vvllm_msd.policy_advice import AdviceQueue, Apply
from vvllm_msd.policy_process import PolicyKeeper, Timing
from vvllm_msd.policy_socket import Incoming, PolicySocket
from vvllm_msd.status import PolicyStatus
from vvllm_shared import limits
from vvllm_shared.errors import ProtocolError
from vvllm_shared.messages import (
    ALL_LAYERS,
    PROTOCOL,
    Advise,
    Heartbeat,
    Hello,
    LayerShape,
    Ready,
    Refused,
    ToDaemon,
)
from vvllm_shared.paths import RuntimePaths
from vvllm_shared.wire import VersionError

_READING_SHARE = 0.1
"""Of the event loop's time at most this goes into reading messages: a flood waits at its sender."""
_READING_PAUSE = 0.001
"""Seconds between two messages, at least."""


@dataclass
class _Session:
    """What the running process has come to since it said that it is ready."""

    address: bytes
    epoch: int = 0
    """Of the hello that it was sent; 0 before."""
    greeted_at: float = 0.0
    seq: int = -1
    live: bool = False
    """It has spoken in this epoch, and not been silent for long since."""


class PolicyLink:
    """Starts, supervises and listens to `vvllm-policy serve`.

    All methods are for the event loop's thread. That thread must live as long as the daemon: the policy process
    ends with it.

    Args:
        paths: the runtime directory; the caller holds its lock.
        policy: the policy's name, or "off" for no process at all.
        boot_id: names this run of the daemon.
        apply: hands advice to the pager; one call at a time.
        log: a structlog logger.
        timing: intervals of the supervision.
        command: what to start; None is `serve_command` with the usual log.
    """

    def __init__(
        self,
        paths: RuntimePaths,
        policy: str,
        boot_id: str,
        apply: Apply,
        log: Any,
        *,
        timing: Timing | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self._paths = paths
        self._policy = policy
        self._boot_id = boot_id
        self._log = log
        self._timing = timing or Timing()
        self._queue = AdviceQueue(apply, self._timing.apply_pause, log)
        self._keeper = PolicyKeeper(
            command or serve_command(paths, policy, LogConfig()),
            self._timing,
            self._on_start,
            self._on_end,
            log,
        )
        self._socket: PolicySocket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._layers: list[LayerShape] = []
        self._fingerprint = ""
        self._session: _Session | None = None
        self._silent_ticks = 0
        self._epoch = 0
        self._reason = "switched off" if policy == "off" else "not started yet"
        self._stale = 0
        self._bad = 0
        self._bad_of_process = 0
        self._complained_of: set[bool] = set()

    async def start(self) -> None:
        """Bind the socket and start the process; with the policy "off", do nothing.

        Raises:
            PermissionDeniedError, ConfigError: the private directory cannot be used.
        """
        if self._policy == "off":
            return
        self._socket = PolicySocket(self._paths.residency, self._log)
        for work in (self._read(self._socket), self._watch(), self._keeper.run(), self._queue.run()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._on_task_end)
            self._tasks.append(task)

    async def stop(self) -> None:
        """End the process and close the socket. No process is left afterwards."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._keeper.stop()
        self._session = None
        self._reason = "stopped"
        if self._socket:
            self._socket.close()
            self._socket = None

    def set_engine(self, hello_layers: Sequence[LayerShape], fingerprint: str) -> None:
        """An engine runs, with these layers: a new epoch begins."""
        self._layers, self._fingerprint = list(hello_layers), fingerprint
        self._queue.clear()
        self._silent_ticks = 0
        self._reason = "no heartbeat yet"
        self._greet()

    def engine_gone(self) -> None:
        """No engine runs: whatever the policy process says is stale until the next one."""
        self._layers = []
        self._reason = "no engine runs"
        self._queue.clear()
        if self._session:
            self._session = _Session(self._session.address)

    def status(self) -> PolicyStatus:
        """The policy process in a few words and numbers."""
        live = self._session is not None and self._session.live
        off = self._policy == "off" or bool(self._keeper.gave_up)
        return PolicyStatus(
            state="off" if off else "live" if live else "fallback",
            pid=self._keeper.pid,
            name=self._policy,
            reason="" if live else self._keeper.gave_up or self._reason,
            epoch=self._epoch,
            advice_applied=self._queue.applied,
            advice_stale=self._stale,
            bad_messages=self._bad,
            restarts=self._keeper.restarts,
        )

    # Supervision

    def _on_start(self) -> None:
        self._session, self._silent_ticks, self._bad_of_process = None, 0, 0
        self._complained_of.discard(True)
        self._reason = "starting"

    def _on_end(self, reason: str) -> None:
        self._session = None
        self._queue.clear()
        self._reason = reason

    async def _watch(self) -> None:
        """Count silence in turns of this loop, not on a clock.

        When the whole daemon was held up (or the machine slept), the messages that came meanwhile are read before
        the next turn.
        """
        while True:
            await asyncio.sleep(self._timing.heartbeat)
            self._silent_ticks += 1
            silent = self._silent_ticks * self._timing.heartbeat
            reason = f"no heartbeat for {silent:.1f} s"
            session = self._session
            if session and session.live and silent >= self._timing.fallback_after:
                session.live = False
                self._reason = reason
                self._log.warning("policy_fallback", reason=reason, pid=self._keeper.pid)
            if silent >= (self._timing.replace_after if session else self._timing.start_within):
                self._keeper.kill(reason)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A failure in here is a bug of ours; the daemon serves on without a policy, and says so."""
        if not task.cancelled() and (error := task.exception()):
            self._reason = f"the link failed: {error!r}"
            self._log.error("policy_link_failed", exc_info=error)

    # Messages

    async def _read(self, socket: PolicySocket) -> None:
        while True:
            incoming = await socket.receive()
            began = time.perf_counter()
            self._take(socket, incoming)
            spent = time.perf_counter() - began
            await asyncio.sleep(max(_READING_PAUSE, spent * (1 / _READING_SHARE - 1)))

    def _take(self, socket: PolicySocket, incoming: Incoming) -> None:
        peer = incoming.peer
        if peer is None or not peer.ours:
            self._count_bad(f"A message of another user: {peer}.", own=False)
            return
        own = peer.pid == self._keeper.pid
        try:
            message = incoming.decode()
            if own:
                self._listen(message, incoming.address)
            elif isinstance(message, Ready):
                raise _StrangerError(peer.pid, self._keeper.pid)
        except (VersionError, _StrangerError) as error:
            socket.send(incoming.address, Refused(error.sentence))
            self._count_bad(error.sentence, own)
        except ProtocolError as error:
            self._count_bad(error.sentence, own)

    def _listen(self, message: ToDaemon, address: bytes) -> None:
        """Take a message of the running process.

        Raises:
            ProtocolError: advice for what the engine does not have.
        """
        if isinstance(message, Ready):
            self._welcome(address)
        elif self._is_current(message, address):
            if isinstance(message, Advise):
                self._check(message)
                self._queue.put(message)
        elif isinstance(message, Advise):
            self._stale += 1
        if not self._layers:
            self._silent_ticks = (
                0  # without an engine there is no epoch to speak in: any word is a sign of life
            )

    def _welcome(self, address: bytes) -> None:
        session = self._session
        if session is None:
            self._silent_ticks = 0
        elif session.address == address and time.monotonic() - session.greeted_at < self._timing.heartbeat:
            return  # it was on its way when the hello was
        self._reason = "no heartbeat yet" if self._layers else "no engine runs"
        self._session = _Session(address)
        self._greet()

    def _is_current(self, message: Heartbeat | Advise, address: bytes) -> bool:
        """Whether it belongs to this epoch and comes after all before it; if so, the process lives."""
        session = self._session
        if (
            session is None
            or (address, message.boot_id, message.epoch) != (session.address, self._boot_id, session.epoch)
            or message.seq <= session.seq
        ):
            return False
        session.seq = message.seq
        self._silent_ticks = 0
        if not session.live:
            session.live = True
            self._keeper.mark_live()
            self._log.info("policy_live", pid=self._keeper.pid, policy=self._policy, epoch=session.epoch)
        return True

    def _check(self, advise: Advise) -> None:
        if advise.layer == ALL_LAYERS:
            return
        if advise.layer >= len(self._layers):
            raise ProtocolError(f"Advice for layer {advise.layer}; the model has {len(self._layers)} layers.")
        shape = self._layers[advise.layer]
        if advise.bias is not None and len(advise.bias) != shape.experts:
            raise ProtocolError(
                f"Advice with {len(advise.bias)} biases; layer {shape.name} has {shape.experts} experts."
            )

    def _greet(self) -> None:
        """Begin a new epoch with the process that is ready, if there is an engine to speak of."""
        if not (self._session and self._layers and self._socket):
            return
        self._epoch += 1
        self._session = _Session(self._session.address, self._epoch, time.monotonic())
        hello = Hello(PROTOCOL, self._boot_id, self._epoch, self._fingerprint, self._layers)
        self._socket.send(self._session.address, hello)

    def _count_bad(self, reason: str, own: bool) -> None:
        """Count a message that is not of the protocol; end the process that sends too many."""
        self._bad += 1
        if own:
            self._bad_of_process += 1
            if self._bad_of_process == limits.BAD_MESSAGES:
                self._keeper.kill(f"sent {limits.BAD_MESSAGES} bad messages; the last: {reason}")
        # One line for a process of ours and one for all others: a flood must not fill the log.
        if own not in self._complained_of:
            self._complained_of.add(own)
            self._log.warning("policy_message_refused", reason=reason, own_process=own)


class _StrangerError(ProtocolError):
    """A process that this daemon did not start wants to be its policy process."""

    def __init__(self, pid: int, expected: int | None) -> None:
        super().__init__(f"Process {pid} is not the policy process of this daemon, which is {expected}.")


def serve_command(paths: RuntimePaths, policy: str, log: LogConfig) -> list[str]:
    """The policy process's argument list; it logs as the daemon does."""
    json = {None: (), True: ("--json-log",), False: ("--no-json-log",)}[log.json]
    return [
        *(sys.executable, "-m", "vvllm_policy", "serve"),
        *("--runtime-dir", str(paths.root)),
        *("--policy", policy),
        *("--parent", str(os.getpid())),
        *("--log-level", log.level),
        *json,
    ]
