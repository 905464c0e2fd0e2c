"""The size of a prefill step: fewer sweeps, as long as they are not paid with too many slots."""

from __future__ import annotations

import pytest

from vvllm_msd.prefill_chunk import Widths, chunk_tokens

QWEN3_30B = Widths(experts=128, top_k=8, hidden_size=2048, expert_width=768)
MIB = 2**20
NVFP4, BF16 = 48 * int(2.53 * MIB), 48 * 9 * MIB


def test_what_a_token_takes() -> None:
    """8 experts x (2048 + 768 + 2048) and 16 x 2048 values of two bytes."""
    assert QWEN3_30B.activation_bytes == 2 * (8 * 4864 + 16 * 2048)


@pytest.mark.parametrize(
    ("slots", "slot_bytes", "longest", "chunk"),
    [
        (32, NVFP4, 32_768, 4096),  # a slot in each layer is 1,100 tokens: the second doubling costs too much
        (32, BF16, 32_768, 8192),  # and here 4,000
        (32, BF16, 2048, 2048),  # nothing is longer than one step
        (128, BF16, 32_768, 2048),  # nothing is loaded
        (9, NVFP4, 32_768, 2048),  # no slot can be spared
        (8, 48 * 4096, 32_768, 2048),
    ],
)
def test_chunks(slots: int, slot_bytes: int, longest: int, chunk: int) -> None:
    assert chunk_tokens(QWEN3_30B, slots, slot_bytes, longest) == chunk
