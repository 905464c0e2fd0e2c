"""On a real GPU without graphs: small batches are paged by the device, large ones by the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from parity import LONG, MEDIUM, SHORT, ask, prompt
from tiny import OF_FAMILY

pytestmark = pytest.mark.gpu

BATCHES = [[SHORT], [MEDIUM], [LONG], [prompt(4 + 3 * i, 10 + i) for i in range(4)]]


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v2", "qwen3_next"],
)
def test_tokens_and_logprobs_equal_stock(family: str, zoo_model: Callable[[str], Path]) -> None:
    """Decode and prefill in rounds: on a GPU the partial results are rows that stock has too."""
    model = zoo_model(family)
    arguments = OF_FAMILY.get(family, {})
    reference = ask(model, BATCHES, None, **arguments)
    for slots in (4, 8):
        assert ask(model, BATCHES, {"slots": slots, "poison": True}, **arguments) == reference, slots
