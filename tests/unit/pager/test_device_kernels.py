"""The Triton kernels of device-driven paging, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).parents[2] / "kernel_checks.py"


def test_the_kernels_do_what_the_planner_plans() -> None:
    """In a process of its own: Triton's library is interpreted only where the variable stands before its import."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(CHECKS)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout
