"""Pictures of what `speed.py --out` wrote.

    python benchmarks/plots.py nvfp4.json bf16.json --out plots

For each file a PNG of the decode speed of one request by hit rate, and one of the time to the first token of each
prompt, with the bounds that the link sets. Needs matplotlib (`pip install 'vvllm-ms[plot]'`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def draw(found: dict[str, Any], directory: Path, name: str) -> list[Path]:
    """Draw one run.

    Args:
        found: what `speed.py` wrote.
        directory: where to; made if missing.
        name: what the files' names begin with.

    Returns:
        The pictures.
    """
    directory.mkdir(parents=True, exist_ok=True)
    title = f"{found['model']} ({found['layers']} layers), {found['format']}, {found['slots']} slots"
    title += f", {found['engines']['paged']['gpu']}"
    paths = [_decode(found["decode"], title, directory / f"{name}-decode.png")]
    if "slow_decode" in found:
        speed = found["engines"]["slow"]["fill_gbps"]
        slow = f"{title}, link slowed to {speed:.1f} GB/s"
        paths.append(_decode(found["slow_decode"], slow, directory / f"{name}-slow-decode.png"))
    if found.get("prefill"):
        paths.append(_prefill(found["prefill"], title, directory / f"{name}-prefill.png"))
    return paths


def _decode(rows: list[dict[str, Any]], title: str, path: Path) -> Path:
    figure, axes = _figure(title)
    by_rate = sorted((row for row in rows if row["batch"] == 1), key=lambda row: row["hit_rate"])
    alone = [row for row in by_rate if row["predictability"] is None]
    rates = [row["hit_rate"] for row in alone]
    lines = {
        "stock, all experts in VRAM": ("stock_ms", "k-"),
        "bound: the larger of compute and link": ("overlapped_ms", "b:"),
        "bound: compute, then link": ("serial_ms", "b--"),
        "paged": ("paged_ms", "ro-"),
        "stock, cpu_offload_gb": ("offload_ms", "g-"),
    }
    for label, (key, style) in lines.items():
        times = [row[key] for row in alone]
        if all(times):
            axes.plot(rates, [1e3 / ms for ms in times], style, label=label)
    for share in sorted({row["predictability"] for row in by_rate} - {None}):
        ahead = [row for row in by_rate if row["predictability"] == share]
        label = f"paged, brought ahead by guesses of which {share:.0%} are right"
        axes.plot(
            [row["hit_rate"] for row in ahead], [1e3 / row["paged_ms"] for row in ahead], "^-", label=label
        )
    axes.set_xlabel("experts of a step that were in VRAM")
    axes.set_ylabel("decode steps a second")
    return _save(figure, axes, path)


def _prefill(rows: list[dict[str, Any]], title: str, path: Path) -> Path:
    figure, axes = _figure(title)
    places = range(len(rows))
    bars = {"stock": ("stock_ms", "0.6"), "paged": ("paged_ms", "tab:red"), "bound": ("bound_ms", "tab:blue")}
    for number, (label, (key, color)) in enumerate(bars.items()):
        at = [place + (number - 1) * 0.25 for place in places]
        axes.bar(at, [row[key] for row in rows], 0.25, color=color, label=label)
    axes.set_xticks(places, [f"{row['tokens']}\nin {row['chunk']}" for row in rows])
    axes.set_xlabel("tokens of the prompt, and of a chunk")
    axes.set_ylabel("ms to the first token")
    return _save(figure, axes, path)


def _figure(title: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=9)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> Path:
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return path


def main() -> None:
    """Draw the files of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("plots"))
    args = parser.parse_args()
    for file in args.files:
        for path in draw(json.loads(file.read_text()), args.out, file.stem):
            print(path)


if __name__ == "__main__":
    main()
