"""Qwen3.5's, 3.6's and Gemma 4's checkpoints as they are published, served as text: prefixes, stacks of experts, a
vision tower and a draft layer that are there or not, and experts in another format than the rest."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zoo
from checkpoints import formats, layouts
from vvllm_msd.checkpoint import validate

pytestmark = pytest.mark.engine

TESTS = Path(zoo.__file__).parent
SLOTS = (layouts.TOP_K, layouts.EXPERTS // 4, 3 * layouts.TOP_K)
needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU kernels for quantised experts need AMX"
)

COMPARE = """
import json, sys
from pathlib import Path
from parity import MEDIUM, SHORT, ask, prompt
model, slots = Path(sys.argv[1]), json.loads(sys.argv[2])
batches = [[SHORT], [MEDIUM], [prompt(4 + 3 * i, 10 + i) for i in range(4)]]
text = {"language_model_only": True}
stock = ask(model, batches, None, **text)
equal = [ask(model, batches, {"slots": n, "poison": True}, **text) == stock for n in slots]
print("EQUAL", json.dumps(equal))
"""


def compare(model: Path) -> list[bool]:
    """Whether each number of slots gave stock's answers, in a process of its own: it may need a stand-in."""
    places = [TESTS / "engine", TESTS]
    if importlib.util.find_spec("torchvision") is None:
        places.append(TESTS / "stubs")
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(model), json.dumps(SLOTS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("EQUAL"))
    return list(json.loads(line.removeprefix("EQUAL")))


def checkpoint(family: str, scheme: str, extras: bool, folder: Path) -> Path:
    plain = layouts.LAYOUTS[family](folder / "plain", fused=scheme == "bf16", extras=extras)
    return plain if scheme == "bf16" else formats.quantize(plain, folder / scheme, scheme)


@pytest.mark.parametrize(
    ("family", "scheme", "extras"),
    [
        pytest.param("qwen3_5_moe", "int4_groups", True, marks=needs_amx),
        pytest.param("qwen3_5_moe", "bf16", True, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "bf16", False, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "gptq", True, marks=[pytest.mark.slow, needs_amx]),
        pytest.param("gemma4", "bf16", True, marks=pytest.mark.slow),
        pytest.param("gemma4", "bf16", False, marks=pytest.mark.slow),
    ],
)
def test_tokens_and_logprobs_equal_stock(
    family: str, scheme: str, extras: bool, tmp_path: Path, record_parity: Callable[..., None]
) -> None:
    assert compare(checkpoint(family, scheme, extras, tmp_path)) == [True] * len(SLOTS)
    record_parity(family, scheme, slots=SLOTS, experts=layouts.EXPERTS)


@pytest.mark.parametrize(
    ("family", "scheme", "extras"),
    [
        *(
            ("qwen3_5_moe", scheme, True)
            for scheme in ("nvfp4_modelopt_mixed", "nvfp4_groups", "int4_groups")
        ),
        ("gemma4", "nvfp4", True),
        pytest.param("qwen3_5_moe", "nvfp4_groups", False, marks=pytest.mark.slow),
        pytest.param("gemma4", "nvfp4", False, marks=pytest.mark.slow),
    ],
)
def test_such_a_checkpoint_is_found_whole(family: str, scheme: str, extras: bool, tmp_path: Path) -> None:
    found = validate(checkpoint(family, scheme, extras, tmp_path))
    assert (found.experts, found.top_k, found.moe_layers) == (layouts.EXPERTS, layouts.TOP_K, (0, 1, 2))
