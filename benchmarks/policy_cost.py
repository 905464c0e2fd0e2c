"""What the policy process costs while the engine decodes: nothing that can be measured, or this says how much.

    python benchmarks/policy_cost.py --layers 16 --slots 8

Serves a random checkpoint in the shape of Qwen3-30B-A3B (its first layers) with `vvllm-msd serve` and decodes the same
prompt again and again, while the policy process is live and stopped (SIGSTOP) in turns, and then absent (killed until
the daemon gives it up). It prints the median speed and misses of each, and its speed by that of live with the standard
error of that: of each pair's ratio where live and stopped took turns, so that what drifts falls out. With few slots and
enough layers the GPU and the link set the pace, as in a whole model; where the engine's Python does (five layers, say),
runs differ by a tenth. Answers are long, since a GPU that was idle takes its time to come up to speed.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from load_memory import daemon, status, write_checkpoint

from vvllm_client import Client
from vvllm_client.events import Usage
from vvllm_client.requests import Sampling

STATES = ("live", "stopped", "absent")
GRAPHS = """enforce_eager = false
moe_backend = "triton"
compilation_config = { mode = 0, cudagraph_mode = "FULL_DECODE_ONLY", cudagraph_capture_sizes = [1, 2, 4] }
"""


@dataclass(frozen=True)
class Run:
    """One answer."""

    speed: float
    """Tokens a second, its short prompt included."""
    misses: float
    """A token: a policy may change these, and with them the speed."""


def decode(runtime: Path, tokens: int) -> Run:
    """Answer the prompt once (the text of random tokens is mostly empty)."""
    before = status(runtime)["cache"]["misses"]
    count, began = 0, time.perf_counter()
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    with Client(runtime / "http.sock").complete(
        "Calculate 347 * 892 step by step", sampling=sampling
    ) as stream:
        for event in stream:
            if isinstance(event, Usage):
                count = event.completion_tokens
    took = time.perf_counter() - began
    assert count == tokens, f"the answer ended after {count} tokens"
    time.sleep(0.5)  # the counters come a moment later
    run = Run(count / took, (status(runtime)["cache"]["misses"] - before) / count)
    print(f"{run.speed:.1f} tok/s, {run.misses:.1f} misses a token", file=sys.stderr, flush=True)
    return run


def policy_pid(runtime: Path) -> int:
    """The pid of the policy process, which may have to come first."""
    deadline = time.monotonic() + 60
    while (pid := status(runtime)["policy"]["pid"]) is None:
        assert time.monotonic() < deadline, "no policy process came"
        time.sleep(0.1)
    return int(pid)


def decode_in(state: str, runtime: Path, tokens: int) -> Run:
    """`decode` while the policy process is in one of `STATES`."""
    if state == "absent":
        return decode(runtime, tokens)
    pid = policy_pid(runtime)
    time.sleep(1.0)
    if state == "stopped":
        os.kill(pid, signal.SIGSTOP)
    try:
        return decode(runtime, tokens)
    finally:
        os.kill(pid, signal.SIGCONT)


def end_policy(runtime: Path) -> None:
    """Kill it until the daemon gives it up, as it does when one after the other dies soon."""
    while (policy := status(runtime)["policy"])["state"] != "off":
        if policy["pid"] is not None:
            with suppress(ProcessLookupError):
                os.kill(policy["pid"], signal.SIGKILL)
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--scratch", type=Path, default=Path.home())
    parser.add_argument("--log", type=Path, default=Path("policy_cost.log"))
    args = parser.parse_args()
    runs: dict[str, list[Run]] = {state: [] for state in STATES}
    with tempfile.TemporaryDirectory(prefix="vvllm-bench-", dir=args.scratch) as scratch:
        model, runtime = Path(scratch, "model"), Path(scratch, "run")
        write_checkpoint(model, args.layers)
        with daemon(model, runtime, args.slots, args.log, GRAPHS) as process:
            while status(runtime)["stage"] != "ready":
                assert process.poll() is None, args.log.read_text()[-4000:]
                time.sleep(0.5)
            decode(runtime, args.tokens)
            for number in range(args.rounds):
                turns = ("live", "stopped")
                for state in turns if number % 2 == 0 else reversed(turns):
                    runs[state].append(decode_in(state, runtime, args.tokens))
            end_policy(runtime)
            for _ in range(args.rounds):
                runs["absent"].append(decode_in("absent", runtime, args.tokens))
            traced = status(runtime)["cache"]["traces_sent"]
    live = [run.speed for run in runs["live"]]
    for state, found in runs.items():
        speeds = [run.speed for run in found]
        middle, misses = statistics.median(speeds), statistics.median(run.misses for run in found)
        spread = f"{min(speeds):.1f} … {max(speeds):.1f}"
        # Absent came after both, so its ratios are to the mean of live.
        beside = [statistics.mean(live)] * len(speeds) if state == "absent" else live
        ratios = [speed / other for speed, other in zip(speeds, beside, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        print(
            f"{state:8} {middle:7.1f} tok/s ({spread}), {statistics.mean(ratios):.4f} ± {error:.4f} of live; "
            f"{misses:.1f} misses a token"
        )
    print(f"{traced} traces were sent")


if __name__ == "__main__":
    main()
