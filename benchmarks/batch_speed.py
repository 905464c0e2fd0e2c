"""Decoding several requests together at the shape of Qwen3-30B-A3B: tokens a second, paged and stock (all in VRAM).

    PYTHONPATH=daemon:client:shared python3 benchmarks/batch_speed.py --format nvfp4 --slots 32 --batches 1 8 32

Batches up to 4 x slots / top_k run in captured CUDA graphs, larger ones are paged by the host. Weights are random and
vLLM's own router chooses, which spreads a batch over nearly all experts: the worst that a cache can meet. Each engine
has a process of its own; a speed is that of 16 to 48 new tokens of each request.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import engine_process
from qwen3_30b_a3b import SHAPE

SHORT, LONG = 16, 48


def measure(args: argparse.Namespace, slots: int | None, scratch: str) -> None:
    """Write the tokens a second by batch, of one engine in this process, to speeds.json in `scratch`."""
    import decode_engine
    import decode_model

    from vvllm_shared.residency import graph_sizes, most_tokens

    shape = SHAPE | {"num_hidden_layers": args.layers}
    decode_model.write_config(Path(scratch), args.format, shape)
    job = decode_engine.Job(scratch, "", (args.layers, 0, max(args.batches), 8), [], 0, 0, slots, False)
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
    Path(scratch, "speeds.json").write_text(json.dumps(speeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--format", choices=["bf16", "nvfp4"], default="nvfp4")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    found = []
    for slots in (None, args.slots):
        with tempfile.TemporaryDirectory() as scratch:
            engine_process.run(measure, args, slots, scratch)
            found.append(json.loads(Path(scratch, "speeds.json").read_text()))
    for batch in map(str, args.batches):
        stock, paged = (speeds[batch] for speeds in found)
        print(
            f"batch {batch:>3}: stock {stock:8.1f} tok/s, paged {paged:8.1f} tok/s, ratio {paged / stock:.3f}"
        )


if __name__ == "__main__":
    main()
