"""The hooks by which Triton's compiles reach the board. Triton itself: `test_vllm_contract_pager.py`."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from vvllm_pager.compiles import report_compiles
from vvllm_shared.board import Board

KERNEL: dict[str, Any] = {"key": "k", "repr": "k()", "fn": None, "compile": {}, "already_compiled": False}


def triton(before: Any = None, after: Any = None) -> tuple[Any, Any]:
    """Stand-ins for `triton.knobs.runtime` and `triton.runtime.jit`."""

    def serialize(constant: object) -> str:
        if not isinstance(constant, str):
            raise TypeError(constant)
        return constant

    return (
        SimpleNamespace(jit_cache_hook=before, jit_post_compile_hook=after),
        SimpleNamespace(serialize_specialization_data=serialize),
    )


@pytest.fixture
def board() -> Board:
    board, fd = Board.create()
    os.close(fd)
    return board


def test_the_board_counts_what_compiles_and_moves_at_both_ends(board: Board) -> None:
    runtime, jit = triton()
    report_compiles(board, runtime, jit)
    seen = []
    for hook in ("jit_cache_hook", "jit_cache_hook", "jit_post_compile_hook", "jit_post_compile_hook"):
        assert not getattr(runtime, hook)(**KERNEL)
        seen.append((board.get("compiling"), board.get("progress")))
    assert seen == [(1, 1), (2, 2), (1, 3), (0, 4)]


def test_the_end_is_progress_before_patience_ends(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a look in between finds a step that stood still for longer than the limit, and no reason for it."""
    runtime, jit = triton()
    report_compiles(board, runtime, jit)
    runtime.jit_cache_hook(**KERNEL)
    begun = board.get("progress")
    monkeypatch.setattr(board, "set", lambda _field, _value: looks.append(board.get("progress") - begun))
    looks: list[int] = []
    runtime.jit_post_compile_hook(**KERNEL)
    assert looks == [1]


def test_an_end_without_a_beginning_counts_nothing(board: Board) -> None:
    runtime, jit = triton()
    report_compiles(board, runtime, jit)
    runtime.jit_post_compile_hook(**KERNEL)
    assert board.get("compiling") == 0


@pytest.mark.parametrize("skips", [False, True])
def test_hooks_that_were_there_are_called_and_have_their_say(board: Board, skips: bool) -> None:
    called: list[tuple[str, Any]] = []

    def before(**kernel: Any) -> bool:
        called.append(("before", kernel))
        return skips

    def after(**kernel: Any) -> str:
        called.append(("after", kernel))
        return "said"

    runtime, jit = triton(before, after)
    report_compiles(board, runtime, jit)
    assert runtime.jit_cache_hook(**KERNEL) is skips
    assert board.get("compiling") == (0 if skips else 1)
    assert runtime.jit_post_compile_hook(**KERNEL) == "said"
    assert called == [("before", KERNEL), ("after", KERNEL)]


def test_a_hook_that_raises_leaves_nothing_behind(board: Board) -> None:
    """vLLM's monitor may be told to fail on a compile."""

    def after(**_kernel: Any) -> None:
        raise RuntimeError("compiled during inference")

    runtime, jit = triton(after=after)
    report_compiles(board, runtime, jit)
    runtime.jit_cache_hook(**KERNEL)
    with pytest.raises(RuntimeError, match="during inference"):
        runtime.jit_post_compile_hook(**KERNEL)
    assert board.get("compiling") == 0


def test_constants_that_are_not_json_stop_no_kernel(board: Board) -> None:
    runtime, jit = triton()
    report_compiles(board, runtime, jit)
    assert jit.serialize_specialization_data("plain") == "plain"
    assert jit.serialize_specialization_data(object()) is None
