"""Decode time per token, paged against stock with everything in VRAM, at known hit rates and under full CUDA graphs.

    python benchmarks/decode_speed.py --format bf16 nvfp4 --slots 32 --hit-rates 0.62 0.85 0.96 1.0 --out speed.jsonl
    python benchmarks/decode_speed.py --layers 4 --format nvfp4 --hit-rates 0.85 --profile

A model in the shape of Qwen3-30B-A3B with random weights, whose router is replaced by a synthetic trace; stock and
paged play the same one. For each format two engines start, one after the other, each in a process of its own, and
measure all hit rates. The times are of replays of the captured decode graph (the model without the head and the
sampler; three times `--replays`, the median), and beside it of whole steps of `LLM.generate`. What paging can reach
without overlap is

    limit = stock + missed bytes / link

with the link as the copy engine moves blocks of 256 MiB in the same run. Absolute times hold for one machine; the
ratios are what to compare. Random weights say nothing about quality.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import decode_trace
import engine_process
import numpy as np
from decode_engine import GENERATED, REPEATS, Job
from qwen3_30b_a3b import SHAPE

MIB = 2**20
FORMATS = ("bf16", "nvfp4")
EXPERTS, TOP_K, LAYERS = 128, 8, 48
_SLACK = 64
"""Steps of a trace for the profiler and what else is not counted."""


@dataclass(frozen=True)
class Rate:
    """A trace and what the pager's own plan makes of it."""

    wanted: float
    hits: int
    misses: int


def main() -> None:
    args = _parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="vvllm-decode-") as scratch:
        rows = []
        shape, rates, traces = _make_traces(args, Path(scratch))
        for form in args.format:
            model = _write_model(Path(scratch), form, shape.layers)
            stock = _run(args, Path(scratch), model, shape, traces, None)
            paged = _run(args, Path(scratch), model, shape, traces, args.slots)
            found = [_row(args, form, rate, i, stock, paged) for i, rate in enumerate(rates)]
            _print_table(form, stock, paged, found)
            if args.profile:
                _print_profiles(found, stock, paged)
            rows += found
            if args.out is not None:
                with args.out.open("a") as out:
                    out.writelines(json.dumps(row) + "\n" for row in found)
    for row in rows:
        print(json.dumps(row))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--slots", type=int, default=32, help="experts in VRAM, of 128 a layer (default 32)")
    parser.add_argument("--hit-rates", type=float, nargs="+", default=[0.62, 0.85, 0.96, 1.0])
    parser.add_argument("--batch", type=int, default=1, help="sequences decoded together (default 1)")
    parser.add_argument("--layers", type=int, default=LAYERS, help="cut the model to its first layers")
    parser.add_argument("--replays", type=int, default=200, help="graph replays in a timing (default 200)")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--out", type=Path, help="append a JSON line for each hit rate to this file")
    args = parser.parse_args(argv)
    if not TOP_K <= args.slots <= EXPERTS:
        parser.error(f"--slots must be {TOP_K} … {EXPERTS}")
    if not all(0 <= rate <= 1 for rate in args.hit_rates):
        parser.error("--hit-rates must be 0 … 1")
    if min(args.hit_rates) < 1 and args.slots == EXPERTS:
        parser.error("with a slot for every expert nothing can miss: --hit-rates 1")
    if not 1 <= args.layers <= LAYERS:
        parser.error(f"--layers must be 1 … {LAYERS}")
    if not 1 <= args.batch <= 64:
        parser.error("--batch must be 1 … 64")
    return args


def _make_traces(args: argparse.Namespace, scratch: Path) -> tuple[decode_trace.Shape, list[Rate], list[str]]:
    """The traces as files, and their hit rates over the timed replays under exact LRU."""
    bare = decode_trace.Shape(args.layers, EXPERTS, args.slots, TOP_K, args.batch, 0)
    timed = REPEATS * args.replays
    settle = decode_trace.settling_steps(bare)
    shape = decode_trace.Shape(**asdict(bare) | {"steps": settle + timed + GENERATED + _SLACK})
    rates, paths = [], []
    for number, wanted in enumerate(args.hit_rates):
        trace = decode_trace.synthetic(shape, wanted, number)
        hits, misses = decode_trace.replay(trace, shape, settle, settle + timed)
        print(f"trace for {wanted:.4f}: exact LRU with {args.slots} slots hits {hits / (hits + misses):.4f}")
        path = scratch / f"trace-{number}.npy"
        np.save(path, trace)
        rates.append(Rate(wanted, hits, misses))
        paths.append(str(path))
    return shape, rates, paths


def _write_model(scratch: Path, form: str, layers: int) -> Path:
    """The model's directory, written by a child: this process imports neither vLLM nor torch."""
    model = scratch / form
    model.mkdir()
    engine_process.run(_write_config, str(model), form, layers)
    return model


def _run(
    args: argparse.Namespace,
    scratch: Path,
    model: Path,
    shape: decode_trace.Shape,
    traces: list[str],
    slots: int | None,
) -> dict[str, Any]:
    name = "stock" if slots is None else "paged"
    job = Job(
        model=str(model),
        result=str(scratch / f"{model.name}-{name}.result.json"),
        shape=(shape.layers, shape.steps, shape.batch, shape.top_k),
        traces=traces,
        settle=decode_trace.settling_steps(shape),
        replays=args.replays,
        slots=slots,
        profile=args.profile,
    )
    print(f"{model.name}: starting the {name} engine", flush=True)
    engine_process.run(_measure, job)
    measured: dict[str, Any] = json.loads(Path(job.result).read_text())
    return measured


def _write_config(directory: str, form: str, layers: int) -> None:
    import decode_model

    decode_model.write_config(Path(directory), form, SHAPE | {"num_hidden_layers": layers})


def _measure(job: Job) -> None:
    import decode_engine

    Path(job.result).write_text(json.dumps(asdict(decode_engine.run(job))))


def _row(
    args: argparse.Namespace, form: str, rate: Rate, number: int, stock: dict[str, Any], paged: dict[str, Any]
) -> dict[str, Any]:
    one, other = stock["timings"][number], paged["timings"][number]
    stock_ms, paged_ms = statistics.median(one["graph_ms"]), statistics.median(other["graph_ms"])
    steps = REPEATS * args.replays
    counted = other["misses"]
    misses = (rate.misses if counted is None else counted) / steps
    missed = misses * paged["bundle_bytes"]
    link = paged["link_gbps"]["256"]
    limit_ms = stock_ms + missed / link / 1e6
    return {
        "gpu": paged["gpu"],
        "format": form,
        "batch": args.batch,
        "layers": args.layers,
        "slots": args.slots,
        "hit_rate": rate.hits / (rate.hits + rate.misses),
        "hit_rate_counted": None if counted is None else other["hits"] / (other["hits"] + counted),
        "misses_a_step": rate.misses / steps,
        "misses_a_step_counted": None if counted is None else misses,
        "missed_mib_a_step": missed / MIB,
        "link_gbps": paged["link_gbps"],
        "stock_ms": stock_ms,
        "stock_spread_ms": max(one["graph_ms"]) - min(one["graph_ms"]),
        "paged_ms": paged_ms,
        "paged_spread_ms": max(other["graph_ms"]) - min(other["graph_ms"]),
        "limit_ms": limit_ms,
        "paged_by_limit": paged_ms / limit_ms,
        "paged_by_stock": paged_ms / stock_ms,
        "stock_generate_ms": one["generate_ms"],
        "paged_generate_ms": other["generate_ms"],
        "generate_by_stock": other["generate_ms"] / one["generate_ms"],
        "tokens_per_s": 1e3 * args.batch / other["generate_ms"],
        "stock_vram_gib": stock["vram_gib"],
        "paged_vram_gib": paged["vram_gib"],
        "kernels": [stock["kernel"], paged["kernel"]],
        "runner": paged["runner"],
    }


def _print_table(form: str, stock: dict[str, Any], paged: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    link = ", ".join(f"{mib} MiB {speed:.1f}" for mib, speed in paged["link_gbps"].items())
    print(f"\n{form} on {paged['gpu']}, {paged['runner']}; bundle {paged['bundle_bytes'] / MIB:.2f} MiB")
    for name, engine in (("stock", stock), ("paged", paged)):
        print(
            f"{name}: {engine['kernel']}, {engine['vram_gib']:.2f} GiB, started in {engine['start_s']:.0f} s"
        )
    print(f"link, GB/s: {link}\n")
    print(
        f"{'hits':>7}{'counted':>9}{'stock ms':>10}{'±':>6}{'paged ms':>10}{'±':>6}{'MiB/step':>10}{'limit ms':>10}"
        f"{'/limit':>8}{'/stock':>8}   generate:{'stock':>8}{'paged':>8}{'ratio':>7}{'tok/s':>8}"
    )
    for row in rows:
        counted = row["hit_rate_counted"]
        print(
            f"{row['hit_rate']:7.3f}{'-' if counted is None else f'{counted:.3f}':>9}"
            f"{row['stock_ms']:10.3f}{row['stock_spread_ms']:6.2f}{row['paged_ms']:10.3f}{row['paged_spread_ms']:6.2f}"
            f"{row['missed_mib_a_step']:10.1f}{row['limit_ms']:10.3f}{row['paged_by_limit']:8.3f}"
            f"{row['paged_by_stock']:8.3f}   {'':9}{row['stock_generate_ms']:8.3f}{row['paged_generate_ms']:8.3f}"
            f"{row['generate_by_stock']:7.3f}{row['tokens_per_s']:8.1f}"
        )


def _print_profiles(rows: list[dict[str, Any]], stock: dict[str, Any], paged: dict[str, Any]) -> None:
    for number, row in enumerate(rows):
        for name, engine in (("stock", stock), ("paged", paged)):
            print(f"\nkernels of {name} at {row['hit_rate']:.3f}: µs a step, launches a step")
            for kernel, micros, launches in engine["timings"][number]["profile"]:
                print(f"{micros:10.1f}{launches:8.1f}  {kernel[:110]}")


if __name__ == "__main__":
    main()
