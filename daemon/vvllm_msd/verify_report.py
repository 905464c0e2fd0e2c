"""What `vvllm-msd verify` found, for people and as JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from vvllm_shared.messages import LayerShape


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


def as_json(args: argparse.Namespace, found: Comparison) -> dict[str, Any]:
    """For `--json`; no number in it is infinite or NaN."""
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


def as_table(args: argparse.Namespace, found: Comparison) -> str:
    """One line per prompt and engine, and the verdict."""
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
