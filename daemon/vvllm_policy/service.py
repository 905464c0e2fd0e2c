"""The policy process's loop: traces in, advice out, a heartbeat in between. One thread; each turn is short."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from types import TracebackType

import zmq

from vvllm_policy.daemon_link import DaemonLink
from vvllm_policy.observations import Decode, Prefill
from vvllm_policy.policies import POLICIES, LayerAdvice, Policy
from vvllm_policy.traces import TraceInbox
from vvllm_shared import logs
from vvllm_shared.messages import HEARTBEAT_SECONDS, Hello
from vvllm_shared.paths import RuntimePaths

_log = logs.get()


class Service:
    """A policy process's sockets and state; a context manager that closes them.

    Args:
        paths: the daemon's runtime directory.
        policy: a name in `POLICIES`.

    Raises:
        BusyError: another policy process serves there.
        PermissionDeniedError: the private directory is not private.
    """

    def __init__(self, paths: RuntimePaths, policy: str) -> None:
        self._name = policy
        self._policy: Policy | None = None
        self._model: tuple[object, ...] = ()
        self._said: dict[int, LayerAdvice] = {}
        self._context = zmq.Context(io_threads=1)
        try:
            self._traces = TraceInbox(self._context, paths.traces)
        except BaseException:
            self._context.term()
            raise
        self._link = DaemonLink(self._context, paths.residency, policy)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _log.info("policy_stopped", bad_from_daemon=self._link.bad, **asdict(self._traces.counts))
        self._link.close()
        self._traces.close()
        self._context.term()

    def run(self) -> None:
        """Serve until an exception (a signal's SystemExit, or the daemon's refusal) ends it.

        Raises:
            ProtocolError: the daemon refused this process, or is of another version.
        """
        poller = zmq.Poller()
        for socket in (self._link.monitor, self._link.socket, self._traces.socket):
            poller.register(socket, zmq.POLLIN)
        beat_at = time.monotonic() + HEARTBEAT_SECONDS
        while True:
            ready = dict(poller.poll(max(0, math.ceil((beat_at - time.monotonic()) * 1000))))
            if self._link.monitor in ready and self._link.watch():
                beat_at = time.monotonic()
            if self._link.socket in ready and (hello := self._link.receive()):
                self._begin(hello)
            if self._traces.socket in ready:
                self._observe()
            if time.monotonic() >= beat_at:
                self._link.beat()
                self._advise()
                beat_at = time.monotonic() + HEARTBEAT_SECONDS

    def _begin(self, hello: Hello) -> None:
        """Start over for a new session; what was learnt of the same model stays."""
        model = (hello.fingerprint, *hello.layers)
        if self._policy is None or model != self._model:
            self._policy = POLICIES[self._name](hello.layers)
            self._model = model
        self._said.clear()
        self._traces.begin(hello.boot_id, hello.layers)
        _log.info("session", epoch=hello.epoch, layers=len(hello.layers), fingerprint=hello.fingerprint)
        self._link.beat()
        self._advise()

    def _observe(self) -> None:
        observation = self._traces.receive()
        if self._policy is None:
            return
        if isinstance(observation, Decode):
            self._policy.observe_decode(observation.ids)
        elif isinstance(observation, Prefill):
            self._policy.observe_prefill(observation.counts, observation.tokens)

    def _advise(self) -> None:
        """Say what has changed. What the daemon cannot take now is said in a later turn."""
        if self._policy is None or self._link.hello is None:
            return
        for advice in self._policy.advice():
            if self._said.get(advice.layer) == advice:
                continue
            if not self._link.advise(advice):
                return
            self._said[advice.layer] = advice
