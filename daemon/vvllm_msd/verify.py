"""`vvllm-msd verify`: is this model supported? Runs a reference and the paged engine and compares every position.

References: *stock* has every expert on the device; *offload* is stock with vLLM's own offload of the weights to host
memory; *self* is the paged engine with other numbers of slots, and with poison in the free ones. Prompts are run one
at a time, greedy; a batch is submitted whole.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vvllm_msd import checkpoint, cut_model
from vvllm_msd.verify_engine import Answer, Job
from vvllm_shared import errors
from vvllm_shared.errors import EngineDiedError, Exit, UnsupportedError, VvllmError

MAX_TOKENS = 16
_TOKEN_WAVES_ONLY = 1 << 20
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
    """Of the logprobs of tokens that both give; NaN where the tokens differ."""


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
    with tempfile.TemporaryDirectory(prefix="vvllm-verify-", dir=_scratch()) as scratch:
        model = Path(args.model)
        facts = checkpoint.validate(model)
        if args.layers is not None:
            model = cut_model.cut(model, args.layers, Path(scratch))
        size: Cache = {"slots": args.slots} if args.slots is not None else {"cache_gb": args.cache_gb}
        rows = compare(model, facts.top_k, size, args.reference)
    failed = [row for row in rows if row.required and not row.equal]
    if args.json:
        print(json.dumps(_report(args, rows, not failed)))
    else:
        print(_table(args, rows, not failed))
    return Exit.FAILED if failed else Exit.OK


def compare(model: Path, top_k: int, size: Cache, reference: str) -> list[Row]:
    """Run the engines and compare; the rows in the order of engines and prompts."""
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    limit = min(512, text.get("max_position_embeddings", 512))
    asked = questions(text["vocab_size"], limit - MAX_TOKENS - 8)
    on_gpu = Path("/dev/nvidiactl").exists()
    exact_pairs = on_gpu or text.get("dtype", text.get("torch_dtype")) == "float32"

    def ask(cache: Cache | None, **engine: Any) -> list[Answer]:
        return run_engine(_job(model, text, asked, cache, limit, engine))

    token_waves = {"pair_waves_above": _TOKEN_WAVES_ONLY}
    engines: dict[str, tuple[Cache, bool]]
    if reference == "self":
        truth = ask({**size, **token_waves})
        engines = {
            f"paged, {top_k} slots": ({"slots": top_k, **token_waves}, True),
            "paged, free slots poisoned": ({**size, **token_waves, "poison": True}, True),
        }
    else:
        if reference == "offload" and not on_gpu:
            raise UnsupportedError(
                "The reference offload needs a GPU: vLLM's own offload moves weights between GPU and host.",
                "Use --reference stock or self.",
            )
        truth = ask(None, **({"cpu_offload_gb": _gib(model)} if reference == "offload" else {}))
        engines = {
            "paged, token waves": ({**size, **token_waves, "poison": True}, True),
            "paged, pair waves": ({**size, "poison": True}, exact_pairs),
        }
    rows = []
    for name, (cache, required) in engines.items():
        rows += _rows(name, asked, truth, ask(cache), required)
    return rows


def run_engine(job: Job) -> list[Answer]:
    """Run a job in a process of its own.

    Raises:
        VvllmError: what the engine's process refused, or that it died.
    """
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "vvllm_msd.verify_engine", str(write)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[write],
    ) as process:
        os.close(write)
        assert process.stdin is not None  # noqa: S101
        assert process.stderr is not None  # noqa: S101
        process.stdin.write(msgspec.json.encode(job))
        process.stdin.close()
        said = process.stderr.read().decode(errors="replace")
        with os.fdopen(read, "rb") as pipe:
            result = pipe.read()
    if not result:
        tail = "\n  ".join(said.strip().splitlines()[-8:])
        raise EngineDiedError(
            f"The engine of the comparison ended with code {process.returncode} and no answer.",
            f"It said last:\n  {tail}",
        )
    decoded = msgspec.json.decode(result)
    if "error" in decoded:
        name, sentence, hint = decoded["error"]
        error: VvllmError = getattr(errors, name)(sentence, hint)
        raise error
    return msgspec.convert(decoded["answers"], list[Answer], strict=False)


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
    if "kv_lora_rank" in text and not Path("/dev/nvidiactl").exists():
        arguments["block_size"] = 16  # the one that vLLM's MLA kernel for the CPU computes
    if cache is not None:
        arguments["additional_config"] = {"expert_cache": dict(cache)}
    return Job(str(model), [q.prompts for q in asked], MAX_TOKENS, arguments)


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
    return max((abs(a[t] - b[t]) for a, b in pairs for t in a.keys() & b.keys()), default=0.0)


def _gib(model: Path) -> float:
    return 1 + sum(f.stat().st_size for f in model.glob("*.safetensors")) / 2**30


def _scratch() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vvllm-ms"
    base.mkdir(parents=True, exist_ok=True)
    return base


def _report(args: argparse.Namespace, rows: list[Row], equal: bool) -> dict[str, Any]:
    return {
        "model": args.model,
        "reference": args.reference,
        "layers": args.layers,
        "equal": equal,
        "rows": [
            {
                "engine": row.engine,
                "prompt": row.prompt,
                "positions": row.positions,
                "equal": row.equal,
                "required": row.required,
                "largest_difference": None
                if row.largest_difference != row.largest_difference
                else row.largest_difference,
            }
            for row in rows
        ],
    }


def _table(args: argparse.Namespace, rows: list[Row], equal: bool) -> str:
    cut = "" if args.layers is None else f", first {args.layers} layers"
    lines = [f"{args.model}{cut}; reference: {args.reference}", ""]
    lines.append(f"{'engine':28}{'prompt':16}{'positions':>10}  {'tokens and logprobs':24}")
    for row in rows:
        if row.equal:
            verdict = "equal"
        elif row.largest_difference != row.largest_difference:
            verdict = "tokens differ" + ("" if row.required else " (rounding; not required)")
        else:
            verdict = f"differ by up to {row.largest_difference:.2g}" + (
                "" if row.required else " (rounding; not required)"
            )
        lines.append(f"{row.engine:28}{row.prompt:16}{row.positions:>10}  {verdict}")
    lines += ["", "EQUAL" if equal else "NOT EQUAL: this model is not supported in this configuration."]
    return "\n".join(lines)
