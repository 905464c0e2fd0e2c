"""The benchmarks' router plays its traces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_in_tritons_interpreter() -> None:
    """In a process of its own: Triton's library is interpreted only where the variable stands before its import."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parents[2] / "router_checks.py")],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
