"""`vvllm-msd verify`: is this model supported? Runs a reference and the paged engine and compares every position.

References: *stock* has every expert on the device; *offload* is stock with vLLM's own offload of the weights to host
memory; *self* is the paged engine with other numbers of slots, and with poison in the free ones. Prompts are run one
at a time, greedy; a batch is submitted whole.
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from vvllm_msd import checkpoint, cut_model
from vvllm_msd.checkpoint.files import read_json
from vvllm_msd.checkpoint.model_config import find_number, needed_number, text_config
from vvllm_msd.scratch import scratch_directory
from vvllm_msd.verify_engine import Answer, Job, Refusal, Result
from vvllm_shared import errors
from vvllm_shared.errors import EngineDiedError, Exit, VvllmError
from vvllm_shared.messages import LayerShape

MAX_TOKENS = 16
_TOKEN_WAVES_ONLY = 1 << 20
_ANY = 1 << 40
"""Bound on numbers of the config that nothing here is sized by."""
Cache = Mapping[str, int | float | bool]


@dataclass(frozen=True)
class Question:
    """Prompts that are submitted together."""

    name: str
    prompts: list[list[int]]


@dataclass(frozen=True)
class Row:
    """One prompt under one engine against the reference."""

    engine: str
    prompt: str
    positions: int
    equal: bool
    required: bool
    """Whether a difference is a failure; pair waves on the CPU round partial results to the model's dtype."""
    largest_difference: float
    """Of the logprobs of tokens that both give; infinite where one is none, NaN where the tokens differ."""


@dataclass(frozen=True)
class Comparison:
    """What came out, and of what."""

    rows: list[Row]
    layers: list[LayerShape]
    """The paged layers, in the size that was asked for."""
    device: str
    dtype: str

    @property
    def equal(self) -> bool:
        """Whether all is equal that must be."""
        return all(row.equal for row in self.rows if row.required)


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
    print(json.dumps(_report(args, found)) if args.json else _table(args, found))
    return Exit.OK if found.equal else Exit.FAILED


def compare(model: Path, top_k: int, size: Cache, reference: str, scratch: Path) -> Comparison:
    """Run the engines and compare; the rows in the order of engines and prompts."""
    path = model / "config.json"
    text = text_config(read_json(path))
    limit = min(512, find_number(path, text, ("max_position_embeddings",), _ANY) or 512)
    vocabulary = needed_number(path, text, ("vocab_size",), _ANY)
    asked = questions(vocabulary, limit - MAX_TOKENS - 8)

    def ask(cache: Cache | None, **engine: Any) -> Result:
        return run_engine(_job(model, text, asked, cache, limit, engine), scratch)

    token_waves = {"pair_waves_above": _TOKEN_WAVES_ONLY}
    engines: dict[str, tuple[Cache, bool]]
    if reference == "self":
        truth = ask({**size, **token_waves})
        engines = {
            f"paged, {top_k} slots": ({"slots": top_k, **token_waves}, True),
            "paged, free slots poisoned": ({**size, **token_waves, "poison": True}, True),
        }
    else:
        truth = ask(None, **({"cpu_offload_gb": _gib(model)} if reference == "offload" else {}))
        exact_pairs = truth.device != "cpu" or truth.dtype == "float32"
        engines = {
            "paged, token waves": ({**size, **token_waves, "poison": True}, True),
            "paged, pair waves": ({**size, "poison": True}, exact_pairs),
        }
    rows: list[Row] = []
    layers = truth.layers
    for name, (cache, required) in engines.items():
        result = ask(cache)
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
    text: dict[str, Any],
    asked: list[Question],
    cache: Cache | None,
    limit: int,
    engine: dict[str, Any],
) -> Job:
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": limit,
        "max_num_batched_tokens": limit,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 256 << 20,
        # Otherwise unused then, but vLLM wants this share of the device free (v1/worker/utils.py:716).
        "gpu_memory_utilization": 0.01,
        "enable_prefix_caching": False,
        "language_model_only": True,
        **engine,
    }
    if cache is not None:
        arguments["additional_config"] = {"expert_cache": dict(cache)}
    # The one block size that vLLM's MLA kernel for the CPU computes.
    on_cpu = {"block_size": 16} if "kv_lora_rank" in text else {}
    return Job(str(model), [q.prompts for q in asked], MAX_TOKENS, arguments, on_cpu)


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


def _report(args: argparse.Namespace, found: Comparison) -> dict[str, Any]:
    return {
        "model": args.model,
        "reference": args.reference,
        "layers": args.layers,
        "device": found.device,
        "dtype": found.dtype,
        "paged": [
            {"name": layer.name, "slots": layer.slots, "experts": layer.experts} for layer in found.layers
        ],
        "equal": found.equal,
        "rows": [
            asdict(row)
            | {
                "largest_difference": row.largest_difference
                if math.isfinite(row.largest_difference)
                else None
            }
            for row in found.rows
        ],
    }


def _table(args: argparse.Namespace, found: Comparison) -> str:
    cut = "" if args.layers is None else f", first {args.layers} layers"
    lines = [
        f"{args.model}{cut}; reference: {args.reference}, {found.device}, {found.dtype}",
        f"{len(found.layers)} paged layers, {_range(layer.slots for layer in found.layers)} slots for "
        f"{_range(layer.experts for layer in found.layers)} experts each",
        "",
        f"{'engine':28}{'prompt':16}{'positions':>10}  tokens and logprobs",
    ]
    for row in found.rows:
        lines.append(f"{row.engine:28}{row.prompt:16}{row.positions:>10}  {_verdict(row)}")
    lines += ["", "EQUAL" if found.equal else "NOT EQUAL: this model is not supported in this configuration."]
    return "\n".join(lines)


def _range(numbers: Iterable[int]) -> str:
    return " … ".join(map(str, sorted({min(found := list(numbers)), max(found)})))


def _verdict(row: Row) -> str:
    if row.equal:
        return "equal"
    verdict = (
        "tokens differ"
        if math.isnan(row.largest_difference)
        else f"differ by up to {row.largest_difference:.2g}"
    )
    return verdict if row.required else f"{verdict} (rounding; not required)"
