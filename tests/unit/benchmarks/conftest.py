"""The benchmarks are scripts beside each other, not a package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
