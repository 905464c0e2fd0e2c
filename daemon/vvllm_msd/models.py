"""`vvllm-msd models`: which formats of which families are served, by what runs of the parity tests have found.

Nothing here says that something works. `FORMATS` and `WANTED` name what people download; the states come from
`parity.json`, which the tests write after their assertions (`make record`, or pytest's `--record` on a GPU).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

FORMATS: dict[str, str] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "nvfp4_modelopt_mixed": "NVFP4 experts, FP8 attention (ModelOpt, MIXED_PRECISION)",
    "nvfp4_groups": "NVFP4 experts, FP8 dense (compressed-tensors, several groups)",
    "int4_groups": "INT4 experts, FP8 dense (compressed-tensors, several groups)",
    "nvfp4": "NVFP4 (compressed-tensors)",
    "nvfp4_modelopt": "NVFP4 (ModelOpt)",
    "nvfp4_emulation": "NVFP4 (compressed-tensors), by Triton (moe_backend emulation)",
    "nvfp4_modelopt_emulation": "NVFP4 (ModelOpt), by Triton (moe_backend emulation)",
    "int4": "INT4, symmetric (compressed-tensors)",
    "int4_asymmetric": "INT4, with zero points (compressed-tensors)",
    "gptq": "INT4 (GPTQ)",
    "awq": "INT4, with zero points (AWQ)",
    "mxfp4": "MXFP4, with biases",
    "fp8_block": "FP8, scales by block",
    "fp8": "FP8, one scale a matrix, dynamic inputs",
    "fp8_static": "FP8, one scale a matrix, static inputs",
    "int8": "INT8, inputs too (compressed-tensors)",
    "online": "quantised while loading (--quantization)",
    "marlin_int8_activations": "4 bits with INT8 inputs (VLLM_MARLIN_INPUT_DTYPE)",
    "bitsandbytes": "bitsandbytes",
    "gguf": "GGUF",
    "hqq": "HQQ",
}
"""By the name in a record: how a person would call it."""

FAMILIES: dict[str, str] = {
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_5_moe": "Qwen3.5 and 3.6-MoE",
    "gemma4": "Gemma 4 MoE",
    "deepseek_v2": "DeepSeek-V2",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_next": "Qwen3-Next",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "glm4_moe": "GLM-4-MoE",
}
"""By the name in a record."""

WANTED: tuple[tuple[str, str], ...] = (
    *(("qwen3_5_moe", form) for form in ("nvfp4_modelopt_mixed", "nvfp4_groups", "int4_groups")),
    ("gemma4", "nvfp4"),
    ("deepseek_v2", "awq"),
    ("gpt_oss", "mxfp4"),
    *(("qwen3_moe", form) for form in FORMATS if not form.endswith(("_mixed", "_groups", "mxfp4"))),
    *((family, "bf16") for family in FAMILIES),
)
"""(family, format) that people download, recorded or not."""


@dataclass(frozen=True)
class Row:
    """What is known of one format of one family."""

    family: str
    format: str
    state: str
    """verified on GPU, verified on CPU, not verified, or refused."""
    detail: str
    """The reason of a refusal; what was equal, on what, and when; empty where nothing is recorded."""
    records: tuple[Mapping[str, Any], ...]


def read_records() -> list[dict[str, Any]]:
    """What the tests wrote: `family`, `format`, `device` (cpu or gpu), its `name`, `vllm`, `date`, `commit`, and either
    `slots` and `experts`, or `refused` with the reason."""
    found: list[dict[str, Any]] = json.loads(files("vvllm_msd").joinpath("parity.json").read_text())
    return found


def rows(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One for each pair of `WANTED`, and for each other pair that was recorded."""
    recorded = [(str(record["family"]), str(record["format"])) for record in records]
    pairs = dict.fromkeys((*WANTED, *recorded))
    return [
        _row(pair, [record for record, of in zip(records, recorded, strict=True) if of == pair])
        for pair in pairs
    ]


def _row(pair: tuple[str, str], records: list[Mapping[str, Any]]) -> Row:
    refused = [record for record in records if "refused" in record]
    by_device = {str(record["device"]): record for record in records if "refused" not in record}
    best = by_device.get("gpu") or by_device.get("cpu")
    if refused:
        state, detail = "refused", str(refused[0]["refused"])
    elif best is not None:
        state, detail = f"verified on {str(best['device']).upper()}", _told(best)
    else:
        state, detail = "not verified", ""
    return Row(*pair, state, detail, tuple(records))


def _told(record: Mapping[str, Any]) -> str:
    slots = ", ".join(map(str, record["slots"]))
    only = f", {record['only']}" if "only" in record else ""
    where = f"{record['name']}, {record['date']}, {record['commit']}"
    return f"{slots} of {record['experts']} experts in slots{only}; {where}"


def table(found: Iterable[Row]) -> str:
    """For a terminal: family, format, state and detail."""
    lines = [_cells(row) for row in found]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    padded = (
        (*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3]) for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in padded)


def as_markdown(found: Iterable[Row]) -> str:
    """The README's table."""
    lines = [("family", "format", "state", "slots; where, when and at which commit, or why"), ("---",) * 4]
    return "\n".join(f"| {' | '.join(line)} |" for line in (*lines, *map(_cells, found)))


def _cells(row: Row) -> tuple[str, str, str, str]:
    return FAMILIES.get(row.family, row.family), FORMATS.get(row.format, row.format), row.state, row.detail


def as_json(found: Iterable[Row]) -> str:
    """All of it, records included."""
    return json.dumps([asdict(row) for row in found], indent=2)
