"""Keeps one policy process running: starts it, starts it again when it ends, and gives up when that is no use."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vvllm_shared.messages import HEARTBEAT_SECONDS


@dataclass(frozen=True)
class Timing:
    """Intervals of the policy process's supervision, in seconds."""

    heartbeat: float = HEARTBEAT_SECONDS
    fallback_after: float = 3 * HEARTBEAT_SECONDS
    """Without a heartbeat for so long: the pager is on its own."""
    replace_after: float = 10.0
    """Without one for so long: killed, and another one started."""
    start_within: float = 20.0
    """As `replace_after`, until its first word: a busy machine takes a while to start Python."""
    first_delay: float = 0.2
    last_delay: float = 10.0
    """Before a respawn: doubled from the one to the other."""
    stable_after: float = 10.0
    """A process that was live for so long makes up for all deaths before."""
    deaths: int = 5
    """As many in a row without a stable life, and there is no further one."""
    stop_grace: float = 2.0
    """Between SIGTERM and SIGKILL."""
    apply_pause: float = 0.25
    """Before each call into the engine: advice is gathered, and a flood of it does not become a flood of calls."""


class _Process:
    """One running child; `ended` is set when it is one no more."""

    def __init__(self, command: Sequence[str]) -> None:
        # A process group of its own: Ctrl-C on the terminal is for the daemon, which then ends this one.
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0
        )
        self.pid = self._popen.pid
        self.ended = asyncio.Event()
        self._pidfd = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        self._popen.send_signal(number)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self._popen.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def _reap(self) -> None:
        self._popen.wait()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set()


class PolicyKeeper:
    """Runs a command for as long as `run` runs.

    Args:
        command: the policy process's argument list.
        timing: see `Timing`.
        on_start: called for each new process, before it can have said a word.
        on_end: called with the reason when a process has ended or could not start.
        log: a structlog logger.
    """

    def __init__(
        self,
        command: Sequence[str],
        timing: Timing,
        on_start: Callable[[], None],
        on_end: Callable[[str], None],
        log: Any,
    ) -> None:
        self.restarts = 0
        self.gave_up = ""
        """Why no further process is started; empty while one is."""
        self._command = command
        self._timing = timing
        self._on_start = on_start
        self._on_end = on_end
        self._log = log
        self._process: _Process | None = None
        self._live_since: float | None = None
        self._kill_reason = ""

    @property
    def pid(self) -> int | None:
        """The running process."""
        return self._process.pid if self._process else None

    def mark_live(self) -> None:
        """The running process has a session: its stable life begins, if it has not."""
        self._live_since = self._live_since or time.monotonic()

    def kill(self, reason: str) -> None:
        """SIGKILL the running process; `run` starts another one."""
        if self._process and not self._kill_reason:
            self._kill_reason = reason
            self._process.signal(signal.SIGKILL)

    async def run(self) -> None:
        """Keep a process running, with growing pauses; return when too many died in a row."""
        deaths, delay = 0, self._timing.first_delay
        while True:
            reason = await self._run_one()
            if self._live_since and time.monotonic() - self._live_since >= self._timing.stable_after:
                deaths, delay = 0, self._timing.first_delay
            deaths += 1
            self._log.warning("policy_ended", reason=reason, deaths=deaths, retry_in=delay)
            if deaths >= self._timing.deaths:
                self.gave_up = f"given up after {deaths} deaths in a row; the last: {reason}"
            self._on_end(reason)
            if self.gave_up:
                self._log.error("policy_given_up", reason=self.gave_up)
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._timing.last_delay)
            self.restarts += 1

    async def stop(self) -> None:
        """End the running process: SIGTERM, then SIGKILL. The caller has cancelled `run`."""
        process, self._process = self._process, None
        if process is None:
            return
        process.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.ended.wait(), self._timing.stop_grace)
        except TimeoutError:
            process.signal(signal.SIGKILL)
            await process.ended.wait()

    async def _run_one(self) -> str:
        """One process from start to end; how it ended."""
        self._live_since, self._kill_reason = None, ""
        try:
            process = _Process(self._command)
        except OSError as error:
            return f"cannot start {self._command[0]}: {error.strerror}"
        self._process = process
        self._on_start()
        self._log.info("policy_started", pid=process.pid)
        await process.ended.wait()
        self._process = None
        return self._kill_reason or process.ending
