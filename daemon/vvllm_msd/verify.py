"""`vvllm-msd verify`: is this model supported? Runs a reference and the paged engine and compares every position.

References: *stock* has every expert on the device; *offload* is stock with vLLM's own offload of the weights to host
memory; *self* is the paged engine with other numbers of slots, and with poison in the free ones. Prompts are run one
at a time, greedy; a batch is submitted whole. On a GPU all engines decode in CUDA graphs, as the daemon's do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from vvllm_msd import checkpoint, cut_model
from vvllm_msd.checkpoint.files import read_json
from vvllm_msd.checkpoint.model_config import find_number, needed_number, text_config
from vvllm_msd.scratch import scratch_directory
from vvllm_msd.verify_engine import Answer, Job, Refusal, Result
from vvllm_msd.verify_report import Comparison, Row, as_json, as_table
from vvllm_shared import errors
from vvllm_shared.errors import EngineDiedError, Exit, VvllmError
from vvllm_shared.residency import graph_sizes

MAX_TOKENS = 16
_TOKEN_WAVES_ONLY = {"pair_waves_above": 1 << 20}
"""For the CPU; on a GPU large batches run in rounds, which are exact."""
_MAX_NUM_SEQS = 4
_GRAPHS = {
    # Not compiled: what is compared is paging.
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    # As many tokens as any number of slots serves in a graph.
    "cudagraph_capture_sizes": graph_sizes(_MAX_NUM_SEQS),
}
_ANY = 1 << 40
"""Bound on numbers of the config that nothing here is sized by."""
Cache = Mapping[str, int | float | bool]
_NOTHING_MORE: Cache = {}


@dataclass(frozen=True)
class Question:
    """Prompts that are submitted together."""

    name: str
    prompts: list[list[int]]


def questions(vocabulary: int, long: int) -> list[Question]:
    """Prompts of token ids that any tokenizer of that size has, for decode, waves and a batch."""

    def ids(count: int, seed: int) -> list[int]:
        return [(seed * 7919 + i * 31 + i * i * 7) % (vocabulary - 16) + 8 for i in range(count)]

    return [
        Question("short prompt", [ids(5, 1)]),
        Question("64 tokens", [ids(64, 2)]),
        Question(f"{long} tokens", [ids(long, 3)]),
        Question("batch of 4", [ids(5 + 3 * i, 4 + i) for i in range(4)]),
    ]


def main(args: argparse.Namespace) -> int:
    """The command. `args`: model, slots, cache_gb, reference, layers, json.

    Raises:
        VvllmError: a checkpoint or a size that is refused, an engine that died.
    """
    model = checkpoint.validate(Path(args.model))
    size: Cache = {"slots": args.slots} if args.slots is not None else {"cache_gb": args.cache_gb}
    with _sigterm_unwinds(), scratch_directory("vvllm-verify-") as scratch:
        path = model.path
        if args.layers is not None:
            path = scratch / "model"
            path.mkdir()
            cut_model.cut(model, args.layers, path)
        found = compare(path, model.top_k, size, args.reference, scratch)
    print(json.dumps(as_json(args, found)) if args.json else as_table(args, found))
    return Exit.OK if found.equal else Exit.FAILED


def compare(model: Path, top_k: int, size: Cache, reference: str, scratch: Path) -> Comparison:
    """Run the engines and compare; the rows in the order of engines and prompts."""
    path = model / "config.json"
    text = text_config(read_json(path))
    limit = min(512, find_number(path, text, ("max_position_embeddings",), _ANY) or 512)
    vocabulary = needed_number(path, text, ("vocab_size",), _ANY)
    asked = questions(vocabulary, limit - MAX_TOKENS - 8)

    def ask(cache: Cache | None, on_cpu: Cache = _NOTHING_MORE, offload_gb: float = 0) -> Result:
        return run_engine(_job(model, asked, cache, on_cpu, limit, offload_gb), scratch)

    poisoned = {**size, "poison": True}
    engines: dict[str, tuple[Cache, Cache, bool]]
    if reference == "self":
        truth = ask(size, _TOKEN_WAVES_ONLY)
        engines = {
            f"paged, {top_k} slots": ({"slots": top_k}, _TOKEN_WAVES_ONLY, True),
            "paged, free slots poisoned": (poisoned, _TOKEN_WAVES_ONLY, True),
        }
    else:
        truth = ask(None, offload_gb=_gib(model) if reference == "offload" else 0)
        engines = {"paged": (poisoned, _NOTHING_MORE, True)}
        if truth.device == "cpu":
            engines = {
                "paged, token waves": (poisoned, _TOKEN_WAVES_ONLY, True),
                "paged, pair waves": (poisoned, _NOTHING_MORE, truth.dtype == "float32" or top_k == 1),
            }
    rows: list[Row] = []
    layers = truth.layers
    for name, (cache, on_cpu, required) in engines.items():
        result = ask(cache, on_cpu)
        layers = layers or result.layers
        rows += _rows(name, asked, truth.answers, result.answers, required)
    return Comparison(rows, layers, truth.device, truth.dtype)


def run_engine(job: Job, scratch: Path) -> Result:
    """Run a job in a process of its own, which ends with this one. All that it reads and writes are files.

    Args:
        scratch: where they may lie.

    Raises:
        VvllmError: what the engine's process refused, or that it died.
    """
    with (
        tempfile.TemporaryFile(dir=scratch) as question,
        tempfile.TemporaryFile(dir=scratch) as answer,
        tempfile.TemporaryFile(dir=scratch) as said,
    ):
        question.write(msgspec.msgpack.encode(job))
        question.seek(0)
        process = subprocess.run(
            [sys.executable, "-m", "vvllm_msd.verify_engine", str(answer.fileno()), str(os.getpid())],
            stdin=question,
            stdout=subprocess.DEVNULL,
            stderr=said,
            pass_fds=[answer.fileno()],
            check=False,
        )
        answer.seek(0)
        said.seek(0)
        try:
            outcome = msgspec.msgpack.decode(answer.read(), type=Result | Refusal)
        except msgspec.DecodeError:
            tail = "\n  ".join(said.read().decode(errors="replace").strip().splitlines()[-8:])
            raise EngineDiedError(
                f"The engine of the comparison ended with code {process.returncode} and no answer.",
                f"It said last:\n  {tail}",
            ) from None
    if isinstance(outcome, Refusal):
        error: VvllmError = getattr(errors, outcome.error)(outcome.sentence, outcome.hint)
        raise error
    return outcome


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends the command like an exception, so that its engine and its directory go with it."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # as a shell reports it

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _job(
    model: Path,
    asked: list[Question],
    cache: Cache | None,
    cache_on_cpu: Cache,
    limit: int,
    offload_gb: float,
) -> Job:
    arguments: dict[str, Any] = {
        "max_model_len": limit,
        "max_num_batched_tokens": limit,
        "max_num_seqs": _MAX_NUM_SEQS,
        "kv_cache_memory_bytes": 256 << 20,
        # Otherwise unused then, but vLLM wants this share of the device free (v1/worker/utils.py:716).
        "gpu_memory_utilization": 0.01,
        "enable_prefix_caching": False,
        "language_model_only": True,
        "cpu_offload_gb": offload_gb,
    }
    on_cpu: dict[str, Any] = {"enforce_eager": True}
    if cache is not None:
        arguments["additional_config"] = {"expert_cache": dict(cache)}
        on_cpu["additional_config"] = {"expert_cache": {**cache, **cache_on_cpu}}
    on_cuda = {"compilation_config": _GRAPHS}
    return Job(str(model), [q.prompts for q in asked], MAX_TOKENS, arguments, on_cpu, on_cuda)


def _rows(
    engine: str, asked: list[Question], truth: list[Answer], answers: list[Answer], required: bool
) -> list[Row]:
    names = [
        q.name if len(q.prompts) == 1 else f"{q.name}, {i + 1}" for q in asked for i in range(len(q.prompts))
    ]
    return [
        Row(engine, name, _positions(t), a == t, required, _difference(t, a))
        for name, t, a in zip(names, truth, answers, strict=True)
    ]


def _positions(answer: Answer) -> int:
    return len(answer.prompt_logprobs) + len(answer.logprobs)


def _difference(one: Answer, other: Answer) -> float:
    if one.tokens != other.tokens:
        return float("nan")
    pairs = zip(one.prompt_logprobs + one.logprobs, other.prompt_logprobs + other.logprobs, strict=True)
    differences = [abs(a[t] - b[t]) for a, b in pairs for t in a.keys() & b.keys()]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


def _gib(model: Path) -> float:
    return 1 + sum(f.stat().st_size for f in model.glob("*.safetensors")) / 2**30
