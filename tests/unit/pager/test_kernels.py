"""The Triton kernels of device-driven paging, as far as a machine without a GPU can run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from triton import compile as compile_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vvllm_pager import blocks_kernel
from vvllm_pager.fill_kernel import fill
from vvllm_pager.resolve_kernel import resolve

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("checks", ["kernel", "layer", "foresight", "launch", "cut"])
def test_in_tritons_interpreter(checks: str) -> None:
    """In a process of its own: Triton's library is interpreted only where the variable stands before its import."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(TESTS / f"{checks}_checks.py")],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert " passed" in run.stdout


WORDS, LONGS, FLOATS = "*i32", "*i64", "*fp64"
POINTERS = {
    "padding_p": "*u8",
    "last_used_p": LONGS,
    "counted_p": LONGS,
    "ring_head_p": LONGS,
} | dict.fromkeys(("heat_p", "bias_p", "weights_p", "clock_p"), FLOATS)
POINTERS |= {"x_p": "*bf16", "gate_p": "*bf16", "correction_p": "*fp32", "scores_p": "*fp32"}
NOTHING_AHEAD = dict.fromkeys(("x_p", "gate_p", "correction_p", "scores_p")) | {"H": 0}
NOTHING_ASKED = dict.fromkeys(("scores_p", "next_slot_of_p")) | {"NEXT_E": 0, "NEXT_EP": 0}
NO_LANES = NOTHING_ASKED | dict.fromkeys(("lanes_p", "arrived_p", "asked_p", "counters_p", "box_p"))
NUMBERS = dict.fromkeys(("N", "top_k", "round_", "live", "layer", "phase"), "i32")


@pytest.mark.parametrize("capability", [75, 89, 90, 120])
def test_the_kernels_compile_for_the_cards_that_people_have(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the assembler that comes with Triton. Loads of 16 bytes are what makes *fill* fast."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # which Triton 3.9 warns about where it is not set
    target = GPUTarget("cuda", capability, 32)
    sizes = {
        "E": 128,
        "S": 40,
        "EP": 128,
        "SP": 64,
        "NP": 32,
        "MASKED": True,
        "ENTRIES": 4096,
        "RING_IDS": 512,
        "EARLY": capability >= 90,
    }
    guess = {"H": 2048}
    for variant in (
        {"ROUNDS": 1, "BLOCK": 0} | NOTHING_AHEAD,
        {"ROUNDS": 4, "BLOCK": 8} | guess | {"correction_p": None},
        {"ROUNDS": 1, "BLOCK": 0} | guess,
    ):
        constants = sizes | variant
        kinds = {name: (POINTERS | NUMBERS).get(name, WORDS) for name in resolve.arg_names}
        _compile(resolve, kinds, constants, target)
    kinds = dict.fromkeys(fill.arg_names, WORDS)
    kinds |= dict.fromkeys(("store_p", "tiles_p", "lanes_p", "box_p"), LONGS)
    kinds |= dict.fromkeys(("record_words", "tiles", "lane_words", "layer", "top_k", "live"), "i32")
    kinds["scores_p"] = "*fp32"
    for lanes in (NO_LANES, NOTHING_ASKED, {"NEXT_E": 128, "NEXT_EP": 128}):
        assembly = _compile(fill, kinds, {"TILE": 4096, "EARLY": capability >= 90} | lanes, target)
        assert "ld.global.v2.b64" in assembly
        assert "st.global.v2.b64" in assembly
        assert ("griddepcontrol.wait" in assembly) == (capability >= 90)


@pytest.mark.parametrize("capability", [75, 89, 90, 120])
def test_the_kernels_that_lay_blocks_compile_too(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    target = GPUTarget("cuda", capability, 32)
    sizes = {
        "E": 128,
        "EP": 128,
        "CHUNK": 128,
        "CHUNKS": 512,
        "BLOCKS": 2048,
        "SIZE": 64,
    }
    numbers = ("pairs", "chunks", "count", "rounds", "size", "stride", "tail")
    for name in ("rank", "add_up", "lay", "choose", "share"):
        kernel = getattr(blocks_kernel, name)
        kinds = {arg: "i32" if arg in numbers else WORDS for arg in kernel.arg_names}
        constants = {arg: value for arg, value in sizes.items() if arg in kernel.arg_names}
        assert ".target sm_" in _compile(kernel, kinds, constants, target)


def _compile(kernel: Any, kinds: dict[str, str], constants: dict[str, Any], target: GPUTarget) -> str:
    signature = kinds | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    text: str = compile_for(ASTSource(fn=kernel, signature=signature, constexprs=places), target=target).asm[
        "ptx"
    ]
    return text
