"""Each family's own names for tensors and sizes are understood, also where a model is cut to its first layers."""

from __future__ import annotations

from pathlib import Path

import pytest

import rare_families
from vvllm_msd.checkpoint import validate
from vvllm_msd.cut_model import cut
from zoo import ZooModel

EVERY_LAYER = {
    *("cohere2_moe", "flex_olmo", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe"),
    *("llama4", "longcat_flash", "mellum", "minimax_m2", "phimoe", "axk1", "solar_open"),
}
ONE_LAYER = {"jamba", "nemotron_h", "nemotron_h_latent"}
"""The others begin with one that is dense, or has no experts."""
LAST = {"jamba"}
"""Only its last layer has experts."""
BYTES = {"nemotron_h": 2 * 64 * 32 * 2, "nemotron_h_latent": 2 * 32 * 32 * 2}
"""Of an expert that has no gate; else there are three matrices of 64 x 32."""


@pytest.mark.parametrize("name", rare_families.FAMILIES)
def test_every_family_is_whole(name: str, rare_model: ZooModel) -> None:
    found = validate(rare_model(name))
    assert (found.experts, found.top_k) == (rare_families.EXPERTS, rare_families.FAMILIES[name].top_k)
    last = 2 if name in ONE_LAYER else found.layers
    assert found.moe_layers == tuple(range(0 if name in EVERY_LAYER else 1, last))
    assert found.expert_bytes == BYTES.get(name, 3 * 64 * 32 * 2)
    assert found.warnings == ()


@pytest.mark.parametrize("name", sorted(rare_families.FAMILIES.keys() - LAST))
def test_its_first_layers_are_a_model(name: str, rare_model: ZooModel, tmp_path: Path) -> None:
    whole = validate(rare_model(name))
    layers = whole.moe_layers[0] + 1
    part = validate(cut(whole, layers, tmp_path))
    assert (part.layers, part.moe_layers) == (layers, whole.moe_layers[:1])
    assert part.expert_bytes == whole.expert_bytes
