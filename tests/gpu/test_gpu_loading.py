"""What loading takes of a GPU, beyond what stays."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from parity import SHORT, ask

import zoo
from vvllm_pager import loading

pytestmark = pytest.mark.gpu

IDLE = 64 << 20


def test_what_chunks_leave_does_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's w2 has 18.75 MiB here: a size for which vLLM's allocator uses no block twice while it loads."""
    monkeypatch.setattr(loading, "_IDLE_BYTES", IDLE)
    shape = {"hidden_size": 2048, "moe_intermediate_size": 800, "num_experts": 64, "num_experts_per_tok": 4}
    path = zoo.make("qwen3_moe", tmp_path, **shape)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ask(path, [[SHORT]], {"slots": 6}, moe_backend="triton")
    idle = torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()
    assert idle < 3 * IDLE, f"{idle >> 20} MiB"
