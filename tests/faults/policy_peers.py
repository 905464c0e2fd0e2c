"""Processes that speak on the policy's sockets as they should not. Run as `policy_peers.py ROLE SOCKET …`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import msgpack
import msgspec
import zmq

from vvllm_shared.ipc import endpoint
from vvllm_shared.messages import ALL_LAYERS, PROTOCOL, Advise, Heartbeat, Hello, Ready, ToPolicy
from vvllm_shared.wire import decode, encode

MARKER = 7.0
"""`heat_weight` of the good advice that follows all that is bad."""


def _advise(hello: Hello, seq: int, **changes: Any) -> bytes:
    good = Advise(hello.boot_id, hello.epoch, seq, 0, 1.0, 1.0, 0.9)
    return msgpack.packb(msgspec.to_builtins(good, builtin_types=(bytes,)) | changes)


BAD: dict[str, Any] = {
    "garbage": lambda *_: [b"\xc1\xff garbage"],
    "empty": lambda *_: [b""],
    "bomb": lambda *_: [b"\xdd\xff\xff\xff\xff" * 1000],
    "not msgpack of ours": lambda *_: [msgpack.packb([1, 2, 3])],
    "other version": lambda *_: [msgpack.packb({"type": "ready", "protocol": 2, "pid": 1, "policy": "x"})],
    "wrong types": lambda hello, seq: [_advise(hello, seq, heat_weight="much")],
    "unknown field": lambda hello, seq: [_advise(hello, seq, prefetch=[1])],
    "unknown command": lambda hello, seq: [_advise(hello, seq, type="evict")],
    "NaN": lambda hello, seq: [_advise(hello, seq, heat_weight=float("nan"))],
    "infinite bias": lambda hello, seq: [_advise(hello, seq, bias=[float("inf")] * 8)],
    "layer out of range": lambda hello, seq: [_advise(hello, seq, layer=len(hello.layers))],
    "bias of another size": lambda hello, seq: [_advise(hello, seq, bias=[0.0] * 9)],
    "daemon's own message": lambda hello, _: [encode(hello)],
    "two parts": lambda hello, seq: [_advise(hello, seq)] * 2,
}
"""Each is counted as a bad message."""
STALE: dict[str, Any] = {
    "other boot id": lambda hello, seq: [_advise(hello, seq, boot_id="another")],
    "old epoch": lambda hello, seq: [_advise(hello, seq, epoch=hello.epoch - 1)],
    "future epoch": lambda hello, seq: [_advise(hello, seq, epoch=hello.epoch + 1)],
    "repeated number": lambda hello, _: [_advise(hello, 0)],
}
"""Each is ignored and counted as stale advice."""


def policy(path: str, kinds: list[str]) -> None:
    """A policy process that shakes hands, sends a message of each kind, then one good advice, and lives on."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint(path))
        socket.send(encode(Ready(PROTOCOL, os.getpid(), "bad")))
        hello = decode(socket.recv(), ToPolicy)
        assert isinstance(hello, Hello)
        socket.send(encode(Heartbeat(hello.boot_id, hello.epoch, 0)))
        for seq, kind in enumerate(kinds, 1):
            socket.send_multipart((BAD | STALE)[kind](hello, seq))
        last = len(kinds) + 1
        socket.send(encode(Advise(hello.boot_id, hello.epoch, last, ALL_LAYERS, MARKER, 1.0, 0.9)))
        for seq in range(last + 1, 10_000):
            socket.send(encode(Heartbeat(hello.boot_id, hello.epoch, seq)))
            time.sleep(0.2)


def flood(path: str) -> None:
    """A policy process that sends the largest good advice as fast as it can."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint(path))
        socket.send(encode(Ready(PROTOCOL, os.getpid(), "flood")))
        hello = decode(socket.recv(), ToPolicy)
        assert isinstance(hello, Hello)
        for seq in range(10_000_000):
            layer = seq % len(hello.layers)
            bias = [float(seq % 100)] * hello.layers[layer].experts
            socket.send(encode(Advise(hello.boot_id, hello.epoch, seq, layer, 1.0, 1.0, 0.9, bias)))


def send(path: str, uid: int, pattern: int, count: int, *frames: str) -> None:
    """Send each frame (hex) `count` times as user `uid`; "-" joins the parts of one message."""
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with zmq.Context() as context, context.socket(pattern) as socket:
        socket.linger = 300
        socket.connect(endpoint(path))
        for _ in range(count):
            for frame in frames:
                socket.send_multipart([bytes.fromhex(part) for part in frame.split("-")])
        time.sleep(0.5)


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    if role == "policy":
        policy(where, rest)
    elif role == "flood":
        flood(where)
    else:
        send(where, int(rest[0]), int(rest[1]), int(rest[2]), *rest[3:])
