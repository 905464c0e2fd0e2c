"""On a real GPU: prompts that need every expert, at sizes where Marlin's launches leave blocks out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import SHORT, ask, prompt
from vllm.model_executor.layers.fused_moe.experts import marlin_moe

import zoo
from checkpoints import formats
from vvllm_pager.block_rounds import aligned_in_order
from vvllm_pager.marlin_blocks import Cuts

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K, HIDDEN, WIDTH = 64, 8, 2048, 768
LONG = 4000
ROOM: dict[str, Any] = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "kv_cache_memory_bytes": 256 << 20,
}
CHUNKS = {"max_num_batched_tokens": 2048, "enable_chunked_prefill": True}


def _align(
    ids: torch.Tensor, size: int, experts: int, expert_map: None, *, ignore_invalid_experts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert expert_map is None
    assert ignore_invalid_experts
    blocks = aligned_in_order(size, ids, experts)
    return blocks.pairs, blocks.owners, blocks.filled


@pytest.mark.parametrize("chunks", [{}, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("scheme", ["bf16", "int4", "nvfp4"])
def test_long_prompts_equal_stock(
    scheme: str, chunks: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that take several rounds; stock's Marlin is given the order of rows that it gives by chance otherwise,
    and then repeats itself."""
    shape = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS}
    path = zoo.make("qwen3_moe", tmp_path / "bf16", num_experts_per_tok=TOP_K, **shape)
    if scheme != "bf16":
        path = formats.quantize(path, tmp_path / scheme, scheme)
        monkeypatch.setattr(marlin_moe, "moe_align_block_size", _align)
    batches = [[prompt(LONG, 1)], [SHORT], [prompt(700, 2), prompt(1200, 3)]]
    arguments = ROOM | chunks | {"moe_backend": "triton" if scheme == "bf16" else "marlin"}
    reference = ask(path, batches, None, **arguments)
    for slots in (TOP_K, EXPERTS // 4):
        assert ask(path, batches, {"slots": slots, "poison": True}, **arguments) == reference, slots


def test_such_a_prompt_has_blocks_to_leave_out() -> None:
    """Else the test above would launch all of them every time."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    blocks = LONG * TOP_K // 64
    cuts = Cuts.of(multiprocessors, 64, (2 * WIDTH, HIDDEN))
    assert blocks - cuts.tail > cuts.stride
