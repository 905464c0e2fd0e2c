"""What the policy process costs while the engine decodes: nothing that can be measured, or this says how much.

    python benchmarks/policy_cost.py --layers 16 --slots 8

Serves a random checkpoint in the shape of Qwen3-30B-A3B (its first layers) with `vvllm-msd serve` and lets it answer
the same prompt again and again. In the first answers the policy process is live and stopped (SIGSTOP) in turns of half
a second or so, in the last it is absent (killed until the daemon gives it up). Each turn is compared with the same turn
of other answers, which has the same text: some texts miss more than others. What drifts from answer to answer falls out
for stopped, and not for absent. With few slots and enough layers the GPU and the link set the pace, as in a whole
model; where the engine's Python does (five layers, say), runs differ by a tenth.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from load_memory import daemon, status, write_checkpoint

Turns = list[tuple[str, float]]
"""Of an answer, in order: the state of the policy process, and tokens a second."""

TURN = 100
"""Tokens."""
SETTLES = 20
"""Tokens of a turn that are not counted."""
GRAPHS = """enforce_eager = false
moe_backend = "triton"
compilation_config = { mode = 0, cudagraph_mode = "FULL_DECODE_ONLY", cudagraph_capture_sizes = [1, 2, 4] }
"""


class Connection(http.client.HTTPConnection):
    """To the daemon's socket."""

    def __init__(self, runtime: Path) -> None:
        super().__init__("localhost")
        self._path = str(runtime / "http.sock")

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def arrivals(runtime: Path, tokens: int) -> Iterator[tuple[int, float]]:
    """Of one answer: how many tokens there are, and when that many came."""
    connection = Connection(runtime)
    connection.request("GET", "/v1/models")
    (model,) = json.loads(connection.getresponse().read())["data"]
    body = {
        "model": model["id"],
        "prompt": "Calculate 347 * 892 step by step",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    with connection.getresponse() as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                yield json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"], now


def turns(runtime: Path, tokens: int, between: list[str], pid: int | None) -> Turns:
    """One answer.

    Args:
        between: the states, in the order in which they take turns.
        pid: of the policy process, which is stopped and goes on with them.
    """
    found: Turns = []
    began = (0, 0.0)
    enter(between[0], pid)
    for count, now in arrivals(runtime, tokens):
        place = count - len(found) * TURN
        if place >= TURN:
            assert began[0], "so many tokens came at once that a turn has no beginning"
            found.append((between[len(found) % len(between)], (count - began[0]) / (now - began[1])))
            began = (0, 0.0)
            enter(between[len(found) % len(between)], pid)
        elif place >= SETTLES and not began[0]:
            began = count, now
    enter("live", pid)
    return found


def enter(state: str, pid: int | None) -> None:
    if pid is not None:
        os.kill(pid, signal.SIGSTOP if state == "stopped" else signal.SIGCONT)


def policy_pid(runtime: Path) -> int:
    """The pid of the policy process, which may have to come first."""
    deadline = time.monotonic() + 60
    while (pid := status(runtime)["policy"]["pid"]) is None:
        assert time.monotonic() < deadline, "no policy process came"
        time.sleep(0.1)
    return int(pid)


def end_policy(runtime: Path) -> None:
    """Kill it until the daemon gives it up, as it does when one after the other dies soon."""
    while (policy := status(runtime)["policy"])["state"] != "off":
        if policy["pid"] is not None:
            with suppress(ProcessLookupError):
                os.kill(policy["pid"], signal.SIGKILL)
        time.sleep(0.2)


def answer(runtime: Path, tokens: int, between: list[str], pid: int | None) -> Turns:
    """`turns` once; says what was missed, and what advice came meanwhile."""
    before = status(runtime)
    found = turns(runtime, tokens, between, pid)
    time.sleep(0.1)  # the counters come a moment later
    after = status(runtime)
    misses = (after["cache"]["misses"] - before["cache"]["misses"]) / tokens
    advice = after["policy"]["advice_applied"] - before["policy"]["advice_applied"]
    medians = {state: statistics.median(speed for of, speed in found if of == state) for state in between}
    told = ", ".join(f"{state} {speed:.1f} tok/s" for state, speed in medians.items())
    print(f"{told}; {misses:.2f} misses a token; {advice} pieces of advice", file=sys.stderr, flush=True)
    return found


def report(answers: list[Turns]) -> None:
    """Speeds by that of live, turn by turn: the same turn of each answer has the same text."""
    ratios: dict[str, list[float]] = {}
    for turn in zip(*answers, strict=True):
        speeds: dict[str, list[float]] = {}
        for state, speed in turn:
            speeds.setdefault(state, []).append(speed)
        for state, mine in speeds.items():
            ratios.setdefault(state, []).append(statistics.median(mine) / statistics.median(speeds["live"]))
    for state in ("stopped", "absent"):
        found = ratios[state]
        middle, mean = statistics.median(found), statistics.mean(found)
        error = statistics.stdev(found) / len(found) ** 0.5
        print(f"{state}: {middle:.4f} of live (mean {mean:.4f} ± {error:.4f}), over {len(found)} turns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=3, help="of answers")
    parser.add_argument("--scratch", type=Path, default=Path.home())
    parser.add_argument("--log", type=Path, default=Path("policy_cost.log"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vvllm-bench-", dir=args.scratch) as scratch:
        model, runtime = Path(scratch, "model"), Path(scratch, "run")
        write_checkpoint(model, args.layers)
        with daemon(model, runtime, args.slots, args.log, GRAPHS) as process:
            while status(runtime)["stage"] != "ready":
                assert process.poll() is None, args.log.read_text()[-4000:]
                time.sleep(0.5)
            pid = policy_pid(runtime)
            answer(runtime, args.tokens, ["warm-up"], None)
            # Each turn is once the one's and once the other's.
            orders = [["live", "stopped"], ["stopped", "live"]] * args.pairs
            answers = [answer(runtime, args.tokens, order, pid) for order in orders]
            traced = status(runtime)["cache"]["traces_sent"]
            end_policy(runtime)
            answer(runtime, args.tokens, ["warm-up"], None)
            answers += [answer(runtime, args.tokens, ["absent"], None) for _ in orders]
    print(f"{traced} traces were sent")
    report(answers)


if __name__ == "__main__":
    main()
