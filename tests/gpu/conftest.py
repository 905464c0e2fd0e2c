"""What the tests on a GPU share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from tiny import EXPERTS, OF

import zoo
from checkpoints import formats, layouts


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`model(family, scheme)` is a tiny model: bf16, fp16, or in one of `formats.FORMATS`, or mxfp4."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, scheme: str, folder: Path) -> Path:
        stored = scheme in ("bf16", "fp16")
        if family in layouts.LAYOUTS:
            plain = layouts.LAYOUTS[family](folder / "plain", fused=stored, extras=True)
        else:
            shape: dict[str, Any] = formats.SHAPE.get(family, {}) | {OF.get(family, "num_experts"): EXPERTS}
            dtype = "float16" if scheme == "fp16" else "bfloat16"
            plain = zoo.make(family, folder / "plain", dtype=dtype, **shape)
        return plain if stored else formats.quantize(plain, folder / scheme, scheme)

    def get(family: str, scheme: str) -> Path:
        if (family, scheme) not in made:
            made[family, scheme] = make(family, scheme, tmp_path_factory.mktemp("tiny"))
        return made[family, scheme]

    return get
