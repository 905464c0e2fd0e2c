"""What the policy process costs while the engine decodes: nothing that can be measured, or this says how much.

    python benchmarks/policy_cost.py --layers 8 --slots 32

Serves a random checkpoint in the shape of Qwen3-30B-A3B (its first layers) with `vvllm-msd serve` and decodes the same
prompt again and again, while the policy process is live, stopped (SIGSTOP) or absent (killed whenever it comes back),
in turns. It prints the median speed of each and their ratio to live.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def decode_speed(runtime: Path, tokens: int) -> float:
    """Tokens a second of one answer, its short prompt included (the text of random tokens is mostly empty)."""
    count, began = 0, time.perf_counter()
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    with Client(runtime / "http.sock").complete(
        "Calculate 347 * 892 step by step", sampling=sampling
    ) as stream:
        for event in stream:
            if isinstance(event, Usage):
                count = event.completion_tokens
    assert count == tokens, f"the answer ended after {count} tokens"
    return count / (time.perf_counter() - began)


def policy_pid(runtime: Path) -> int | None:
    pid: int | None = status(runtime)["policy"]["pid"]
    return pid


@contextmanager
def in_state(runtime: Path, state: str) -> Iterator[None]:
    """The policy process in one of `STATES`."""
    deadline = time.monotonic() + 60
    while (pid := policy_pid(runtime)) is None:
        assert time.monotonic() < deadline, "no policy process came"
        time.sleep(0.1)
    time.sleep(1.0)
    if state == "stopped":
        os.kill(pid, signal.SIGSTOP)
    over = threading.Event()
    killer = threading.Thread(target=_keep_away, args=(runtime, over))
    if state == "absent":
        killer.start()
        time.sleep(0.5)
    try:
        yield
    finally:
        over.set()
        if state == "absent":
            killer.join()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _keep_away(runtime: Path, over: threading.Event) -> None:
    while not over.is_set():
        with suppress(ProcessLookupError):
            if pid := policy_pid(runtime):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--scratch", type=Path, default=Path.home())
    parser.add_argument("--log", type=Path, default=Path("policy_cost.log"))
    args = parser.parse_args()
    speeds: dict[str, list[float]] = {state: [] for state in STATES}
    with tempfile.TemporaryDirectory(prefix="vvllm-bench-", dir=args.scratch) as scratch:
        model, runtime = Path(scratch, "model"), Path(scratch, "run")
        write_checkpoint(model, args.layers)
        with daemon(model, runtime, args.slots, args.log, GRAPHS) as process:
            while status(runtime)["stage"] != "ready":
                assert process.poll() is None, args.log.read_text()[-4000:]
                time.sleep(0.5)
            decode_speed(runtime, args.tokens)
            for _ in range(args.rounds):
                for state in STATES:
                    with in_state(runtime, state):
                        speeds[state].append(decode_speed(runtime, args.tokens))
            traced = status(runtime)["cache"]["traces_sent"]
    live = statistics.median(speeds["live"])
    for state, found in speeds.items():
        middle = statistics.median(found)
        spread = f"{min(found):.1f} … {max(found):.1f}"
        print(f"{state:8} {middle:7.1f} tok/s ({spread}), {middle / live:.4f} of live")
    print(f"{traced} traces were sent")


if __name__ == "__main__":
    main()
