"""Decoding several requests together at the shape of Qwen3-30B-A3B: tokens a second, paged and stock (all in VRAM).

    PYTHONPATH=daemon:client:shared python3 benchmarks/batch_speed.py --format nvfp4 --slots 32 --batches 1 8 32

Batches up to 4 x slots / top_k run in captured CUDA graphs, larger ones are paged by the host. Weights are random and
vLLM's own router chooses, which spreads a batch over nearly all experts: the worst that a cache can meet. Each engine
has a process of its own; a speed is that of 32 to 96 new tokens of each request.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SHORT, LONG = 32, 96


def measure(args: argparse.Namespace) -> dict[int, float]:
    """Tokens a second by batch, of one engine in this process."""
    import decode_engine
    import decode_model

    from vvllm_shared.residency import graph_sizes, most_tokens

    decode_model.main(args.model, args.format, str(args.layers))
    slots = args.slots if args.engine == "paged" else None
    job = decode_engine.Job(args.model, "", (args.layers, 0, max(args.batches), 8), [], 0, 0, slots, False)
    graphs = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": graph_sizes(most_tokens(args.slots, 8)),
    }
    llm = decode_engine.start(job, compilation_config=graphs)
    speeds = {}
    for batch in args.batches:
        decode_engine.generate(llm, batch, SHORT)
        times = [decode_engine.generate(llm, batch, tokens) for tokens in (SHORT, LONG)]
        speeds[batch] = batch * (LONG - SHORT) / (times[1] - times[0])
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--format", choices=["bf16", "nvfp4"], default="nvfp4")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--engine", choices=["paged", "stock"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        from vvllm_msd.verify_engine import set_environment

        set_environment()
        Path(args.model, "speeds.json").write_text(json.dumps(measure(args)))
        return
    found = {}
    for engine in ("stock", "paged"):
        with tempfile.TemporaryDirectory() as scratch:
            extra = ["--engine", engine, "--model", scratch]
            subprocess.run([sys.executable, __file__, *sys.argv[1:], *extra], check=True)
            found[engine] = json.loads(Path(scratch, "speeds.json").read_text())
    for batch in map(str, args.batches):
        stock, paged = found["stock"][batch], found["paged"][batch]
        print(
            f"batch {batch:>3}: stock {stock:8.1f} tok/s, paged {paged:8.1f} tok/s, ratio {paged / stock:.3f}"
        )


if __name__ == "__main__":
    main()
