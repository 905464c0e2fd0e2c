"""What runs of the parity tests found, for `vvllm-msd models`: written by tests, after their assertions, never by hand.

make record                              # on this machine's CPU, into daemon/vvllm_msd/parity.json
pytest tests/gpu -m gpu --record FILE    # on a GPU
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = Callable[..., None]


def recorder(file: Path | None) -> Record:
    """What `record_parity` calls; without a file it notes nothing."""

    def record(family: str, scheme: str, **found: Any) -> None:
        """Note that `family` in the format `scheme` gave stock's output, or with `refused=TEXT` that it was refused.

        Args:
            found: more that a reader should know: slots, experts, `only` for what alone was equal.
        """
        if file is not None:
            _add(file, {"family": family, "format": scheme} | found | _here())

    return record


def _add(file: Path, entry: dict[str, Any]) -> None:
    """Replace the entry of the same family and format on the same kind of device; of one day and commit, join them."""
    entries = json.loads(file.read_text()) if file.exists() else []
    kept = []
    for old in entries:
        if any(old[key] != entry[key] for key in ("family", "format", "device")):
            kept.append(old)
        elif (
            "slots" in entry
            and "slots" in old
            and all(old.get(key) == entry[key] for key in ("commit", "date"))
        ):
            entry = entry | {"slots": sorted({*old["slots"], *entry["slots"]})}
    ordered = sorted([*kept, entry], key=lambda e: (e["format"], e["family"], e["device"]))
    scratch = file.with_suffix(".new")
    scratch.write_text(json.dumps(ordered, indent=1) + "\n")
    os.replace(scratch, file)


def _here() -> dict[str, str]:
    import torch
    import vllm

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=7"],  # noqa: S607
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    gpu = torch.cuda.is_available()
    return {
        "device": "gpu" if gpu else "cpu",
        "name": torch.cuda.get_device_name() if gpu else _cpu_name(),
        "vllm": vllm.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    flags = next((line for line in lines if line.startswith("flags")), "")
    return f"{name}, {'AMX' if 'amx_tile' in flags else 'AVX-512' if 'avx512f' in flags else 'AVX2'}"
