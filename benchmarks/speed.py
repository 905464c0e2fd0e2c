"""Decode and prefill at a real model's shape: paged, stock with everything in VRAM, and what the link allows.

    python benchmarks/speed.py --format nvfp4 --slots 32 --out nvfp4.json
    python benchmarks/speed.py --format bf16 --layers 24 --hit-rates 0.85 1.0 --prompts --offload --out bf16.json
    python benchmarks/speed.py --format nvfp4 --slow 12.5 --kv-gib 0.6 --out slow.json

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import engine_process
import numpy as np
import traces
from jobs import GIB, Decode, Job, Measured, Played, Prefill
from rows import MIB, Engines, decode_rows, decode_table, prefill_rows, prefill_table
from shapes import FORMATS, SHAPES, Shape

from vvllm_shared.residency import most_tokens

_OFFLOAD_REPLAYS, _OFFLOAD_SPANS = 6, (4, 10)
"""That engine takes twenty times as long a step, and has nothing to settle."""


def main() -> None:
    """Run the engines one after the other and print what they gave."""
    args = _parse(sys.argv[1:])
    shape = SHAPES[args.model].cut(args.layers or SHAPES[args.model].layers)
    with tempfile.TemporaryDirectory(prefix="vvllm-speed-") as scratch:
        shape.write(Path(scratch), args.format)
        job = _job(args, shape, Path(scratch))
        engines = _run_all(args, shape, job)
    found = _report(args, shape, job, engines)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=SHAPES, default="qwen3-30b-a3b", help="whose shape")
    add("--format", choices=FORMATS, default="nvfp4", help="of the experts")
    add("--layers", type=int, help="cut the model to its first layers")
    add("--slots", type=int, default=32, help="experts of each layer in VRAM (default 32)")
    add("--hit-rates", type=float, nargs="+", default=[0.65, 0.75, 0.85, 0.96, 1.0], help="for batch 1")
    add(
        "--predictability",
        type=float,
        nargs="*",
        default=[0.9],
        help="played again with bundles brought ahead by guesses of which so many are right (default 0.9)",
    )
    add("--batches", type=int, nargs="*", default=[2, 4, 8], help="played too, at --batch-hit-rate")
    add("--batch-hit-rate", type=float, default=0.85)
    add("--prompts", type=int, nargs="*", default=[512, 2048, 8192], help="tokens of prompts to prefill")
    add(
        "--chunk",
        type=int,
        default=2048,
        help="tokens of a prefill step where a prompt is cut (default 2048)",
    )
    add("--kv-gib", type=float, default=1.0, help="of KV cache (default 1)")
    add("--replays", type=int, default=60, help="graph replays in a timing (default 60)")
    add("--offload", action="store_true", help="run vLLM's own cpu_offload_gb too, at the VRAM of paged")
    add("--slow", type=float, metavar="GBPS", help="run paged also with host memory read at most so fast")
    add("--profile", action="store_true", help="list the kernels of a decode step")
    add("--out", type=Path, help="write all of it to this file as JSON")
    args = parser.parse_args(argv)
    experts, top_k = SHAPES[args.model].experts, SHAPES[args.model].top_k
    if not top_k <= args.slots <= experts:
        parser.error(f"--slots must be {top_k} … {experts}")
    if not all(0 <= rate <= 1 for rate in [*args.hit_rates, args.batch_hit_rate, *args.predictability]):
        parser.error("hit rates and predictability must be 0 … 1")
    if min(args.hit_rates) < 1 and args.slots == experts:
        parser.error("with a slot for every expert nothing can miss: --hit-rates 1")
    return args


def _job(args: argparse.Namespace, shape: Shape, scratch: Path) -> Job:
    """The stock engine's job, with the traces that all engines play."""
    plays = [(1, rate) for rate in args.hit_rates] + [(batch, args.batch_hit_rate) for batch in args.batches]
    job = Job(
        model=str(scratch),
        result=str(scratch / "measured.json"),
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        moe_backend="triton" if args.format == "bf16" else "marlin",
        additional_config=shape.additional_config,
        traces=[],
        replays=args.replays,
        spans=(32, 96),
        captured=sorted({batch for batch, _ in plays}),
        prompts=args.prompts,
        chunk=args.chunk,
        kv_bytes=int(args.kv_gib * GIB),
        profile=args.profile,
    )
    bare = traces.TraceShape(shape.layers, shape.experts, args.slots, shape.top_k, 1, 0)
    settle = traces.settling_steps(bare)
    played = [Played(str(scratch / f"{n}.npy"), batch, settle) for n, (batch, _) in enumerate(plays)]
    job = replace(job, traces=played)
    guessed = []
    for number, (batch, rate) in enumerate(plays):
        length = replace(bare, batch=batch, steps=job.steps)
        trace = traces.synthetic(length, rate, number)
        np.save(played[number].path, trace)
        for share in args.predictability if batch <= traces.MOST_GUESSED else ():
            path = str(scratch / f"{number}-{share}.npy")
            np.save(path, traces.guesses(trace, shape.experts, share, number))
            guessed.append(replace(played[number], predictability=share, guesses=path))
    return replace(job, traces=[*played, *guessed])


def _run_all(args: argparse.Namespace, shape: Shape, job: Job) -> Engines:
    most = most_tokens(args.slots, shape.top_k)
    paging = replace(job, slots=args.slots, captured=[size for size in job.captured if size <= most])
    job = replace(job, traces=[played for played in job.traces if played.guesses is None])
    stock, paged = _run("stock", job), _run("paged", paging)
    # Hours of somebody's GPU must not be lost with an engine that only adds a column.
    offload = slow = None
    if args.offload:
        moved = shape.layers * (shape.experts - args.slots) * paged.bundle_bytes / GIB
        unsettled = [replace(played, settle=0) for played in job.traces]
        few = replace(job, traces=unsettled, replays=_OFFLOAD_REPLAYS, spans=_OFFLOAD_SPANS, profile=False)
        offload = _try("offload", replace(few, offload_gib=moved))
    if args.slow:
        # What is brought ahead comes by the copy engine, which is not slowed.
        alone = replace(paging, traces=job.traces, prompts=[], profile=False)
        slow = _try("slow", replace(alone, link_gbps=args.slow))
    return Engines(stock, paged, offload, slow)


def _try(name: str, job: Job) -> Measured | None:
    try:
        return _run(name, job)
    except SystemExit as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return None


def _run(name: str, job: Job) -> Measured:
    print(f"running {name}", file=sys.stderr, flush=True)
    engine_process.run(_measure, job)
    raw: dict[str, Any] = json.loads(Path(job.result).read_text())
    decode = [Decode(**one) for one in raw.pop("decode")]
    prefill = [Prefill(**one) for one in raw.pop("prefill")]
    return Measured(**raw, decode=decode, prefill=prefill)


def _measure(job: Job) -> None:
    import engine_run

    Path(job.result).write_text(json.dumps(asdict(engine_run.run(job))))


def _report(args: argparse.Namespace, shape: Shape, job: Job, engines: Engines) -> dict[str, Any]:
    """Print the tables; returns what goes to --out."""
    paged = engines.paged
    found: dict[str, Any] = {
        "model": args.model,
        "layers": shape.layers,
        "format": args.format,
        "slots": args.slots,
        "kv_gib": args.kv_gib,
        "engines": asdict(engines),
    }
    print(
        f"\n{args.model}, {shape.layers} layers, {args.format}, {args.slots} of {shape.experts} experts in slots,"
    )
    print(f"bundle {paged.bundle_bytes / MIB:.2f} MiB, on {paged.gpu} ({paged.runner})")
    for name in ("stock", "paged", "offload", "slow"):
        if measured := getattr(engines, name):
            print(
                f"{name:8}{measured.kernel}, VRAM {measured.vram_gib:.2f} GiB, at most {measured.vram_highest_gib:.2f} "
                f"while loading, ready after {measured.start_s:.0f} s"
            )
    link = ", ".join(f"{speed:.1f} at {mib} MiB" for mib, speed in paged.link_gbps.items())
    print(f"link: copy engine {link}; fill {paged.fill_gbps:.1f} GB/s\n\nDecode")
    rows = decode_rows(engines, job.traces)
    print(decode_table(rows))
    found["decode"] = [asdict(row) for row in rows]
    if engines.slow is not None:
        alone = [played for played in job.traces if played.guesses is None]
        rows = decode_rows(engines, alone, slow=True)
        print(f"\nDecode with the link slowed to {engines.slow.fill_gbps:.1f} GB/s\n{decode_table(rows)}")
        found["slow_decode"] = [asdict(row) for row in rows]
    if paged.prefill:
        prefill = prefill_rows(engines, shape.layers, shape.experts, args.slots)
        print(f"\nPrefill, to the first token\n{prefill_table(prefill)}")
        found["prefill"] = [asdict(row) for row in prefill]
    if args.profile:
        _print_profiles(engines)
    return found


def _print_profiles(engines: Engines) -> None:
    for name, measured in (("stock", engines.stock), ("paged", engines.paged)):
        for number, decode in enumerate(measured.decode):
            print(f"\nkernels of {name}, trace {number}: µs a step, launches a step")
            for kernel, micros, launches in decode.profile:
                print(f"{micros:10.1f}{launches:8.1f}  {kernel[:110]}")


if __name__ == "__main__":
    main()
