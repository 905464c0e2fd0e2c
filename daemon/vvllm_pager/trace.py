"""Router traces to the policy process: dropped when it lags, never queued without bound, never waited for."""

from __future__ import annotations

import queue
import threading

import numpy as np
import zmq
from vllm.logger import init_logger

from vvllm_shared import limits
from vvllm_shared.board import Board
from vvllm_shared.messages import DecodeTrace, PrefillTrace
from vvllm_shared.residency.page_table import Ints
from vvllm_shared.wire import encode

log = init_logger("vllm.vvllm_pager")

DECODE_TOKENS = 32
"""Batches of at most this many tokens are traced id by id, larger ones as counts per expert."""


class TraceSender:
    """Sends the steps' ids from a thread of its own, which makes no CUDA call.

    Args:
        endpoint: the policy process's PULL socket.
        boot_id: the daemon's.
        experts: experts of the largest layer.
        board: for the counts of what was sent and dropped.
    """

    def __init__(self, endpoint: str, boot_id: str, experts: int, board: Board) -> None:
        self._endpoint = endpoint
        self._boot_id = boot_id
        self._experts = experts
        self._board = board
        self._offering = threading.Lock()
        self._seq = 0
        self._overflowed = 0  # written under the lock, `_unsent` by the sender
        self._unsent = 0
        self._queue: queue.Queue[tuple[int, int, list[Ints]]] = queue.Queue(limits.TRACE_QUEUE)
        threading.Thread(target=self._run, name="vvllm-traces", daemon=True).start()

    def offer(self, step: int, layers: list[Ints]) -> None:
        """Send what the routers of all layers chose in a step, each [tokens, k], -1 for nobody; or drop it."""
        with self._offering:
            self._seq += 1  # a dropped step leaves a gap that the policy process sees
            try:
                self._queue.put_nowait((self._seq, step, layers))
            except queue.Full:
                self._overflowed += 1

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, limits.TRACE_QUEUE)
        socket.connect(self._endpoint)
        while True:
            step = self._queue.get()
            try:
                socket.send(self._encode(*step), zmq.NOBLOCK)
                self._board.add("traces_sent")
            except zmq.Again:  # the policy process lags
                self._unsent += 1
            except Exception:
                if not self._unsent:
                    log.exception("A router trace could not be sent; there may be more")
                self._unsent += 1
            self._board.set("traces_dropped", self._overflowed + self._unsent)

    def _encode(self, seq: int, step: int, layers: list[Ints]) -> bytes:
        tokens = len(layers[0])
        if tokens <= DECODE_TOKENS:
            top_k = max(ids.shape[1] for ids in layers)
            table = np.full((1, len(layers), tokens, top_k), -1, "<i2")
            for i, ids in enumerate(layers):
                table[0, i, :, : ids.shape[1]] = ids
            return encode(
                DecodeTrace(
                    boot_id=self._boot_id,
                    seq=seq,
                    step=step,
                    steps=1,
                    layers=len(layers),
                    tokens=tokens,
                    top_k=top_k,
                    ids=table.tobytes(),
                )
            )
        counts = np.stack([np.bincount(ids[ids >= 0], minlength=self._experts) for ids in layers])
        return encode(
            PrefillTrace(
                boot_id=self._boot_id,
                seq=seq,
                step=step,
                tokens=tokens,
                layers=len(layers),
                experts=self._experts,
                counts=counts.astype("<i4").tobytes(),
            )
        )


class StepTrace:
    """Puts the layers of a step together, for one of the threads that see them.

    Args:
        sender: takes whole steps.
        layers: paged layers of a step.
    """

    def __init__(self, sender: TraceSender, layers: int) -> None:
        self._sender = sender
        self._layers = layers
        self._ids: list[Ints] = []
        self._step = -1

    def observe(self, step: int, layer: int, ids: Ints) -> None:
        """Note what one layer's router chose, [tokens, k]; the last layer completes the step.

        Where layers of a step were lost, or are told of out of order, nothing of it is sent.
        """
        if layer == 0:
            self._ids, self._step = [], step
        if layer != len(self._ids) or step != self._step:
            return
        self._ids.append(ids)
        if len(self._ids) == self._layers:
            self._sender.offer(step, self._ids)
            self._ids, self._step = [], -1
