"""The paged layers are those that the checkpoint has experts for, no fewer and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from vvllm_msd.engine import check_layers
from vvllm_msd.engine_arguments import EngineSpec
from vvllm_shared.errors import UnsupportedError


def spec(*moe_layers: int) -> EngineSpec:
    return EngineSpec(Path("/models/tiny"), "tiny", {"slots": 8}, "f", moe_layers)


def names(*numbers: int, stem: str = "model.layers") -> list[str]:
    return [f"{stem}.{number}.mlp.experts" for number in numbers]


@pytest.mark.parametrize("stem", ["model.layers", "language_model.model.layers", "transformer.h"])
def test_the_same_layers_in_any_order(stem: str) -> None:
    check_layers(spec(1, 2, 11), names(11, 1, 2, stem=stem), [])


@pytest.mark.parametrize(
    ("paged", "unpaged", "says"),
    [
        ([], [], "pager was not loaded"),
        (names(1), names(2, 3), "2 MoE layers of /models/tiny are not paged, the first is model.layers.2."),
        (names(1, 2), [], "built layers 3, 11 of"),
        (names(1, 2, 3, 11, 12), [], "experts for model.layers.12.mlp.experts"),
        ([*names(1, 2, 3, 11), "mtp.layers.0.mlp.experts"], [], "experts for mtp.layers.0"),
    ],
)
def test_other_layers_are_refused_by_name(paged: list[str], unpaged: list[str], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says) as refused:
        check_layers(spec(1, 2, 3, 11), paged, unpaged)
    assert refused.value.hint
