"""The first K layers of a checkpoint as a checkpoint of its own, for comparing a model that does not fit whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from vvllm_msd.checkpoint import Checkpoint
from vvllm_msd.checkpoint.experts import layer_of
from vvllm_msd.checkpoint.files import read_json, read_tensors
from vvllm_msd.checkpoint.model_config import LAYER_KEYS, text_config
from vvllm_shared.errors import UsageError


def cut(model: Checkpoint, layers: int, into: Path) -> Path:
    """Write the first `layers` layers of `model` into the directory `into`, and return it.

    Tokenizer and other small files are copied; tensors of later layers (MTP layers too) are left out.

    Raises:
        UsageError: fewer than one layer, not fewer than the model has, or none of them has experts.
    """
    total = model.layers
    if not 0 < layers < total:
        raise UsageError(f"--layers {layers}: the model has {total} layers.", f"Give 1 … {total - 1}.")
    first = model.moe_layers[0]
    if layers <= first:
        raise UsageError(
            f"--layers {layers}: the model's first layer with experts is number {first + 1}; there would be "
            "nothing to page.",
            f"Give {first + 1} … {total - 1}."
            if first + 1 < total
            else "Leave --layers out: it is the last layer.",
        )
    config = read_json(model.path / "config.json")
    _shorten(text_config(config), total, layers)
    (into / "config.json").write_text(json.dumps(config))
    for file in model.path.iterdir():
        if (
            file.is_file()
            and not file.name.endswith((".safetensors", ".index.json"))
            and file.name != "config.json"
        ):
            shutil.copyfile(file, into / file.name)
    _copy_tensors(model.path, layers, into)
    return into


def _copy_tensors(model: Path, layers: int, into: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    weight_map = {
        name: stored.file
        for name, stored in read_tensors(model, []).items()
        if (layer := layer_of(name)) is None or layer < layers
    }
    files = sorted(set(weight_map.values()))
    for file in files:
        with safe_open(model / file, "pt") as source:
            kept = {name: source.get_tensor(name) for name in weight_map if weight_map[name] == file}
        save_file(kept, into / file, {"format": "pt"})
    stem = "consolidated" if files[0].startswith("consolidated") else "model"
    if files != [f"{stem}.safetensors"]:
        index = {"metadata": {}, "weight_map": weight_map}
        (into / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def _shorten(text: dict[str, Any], total: int, layers: int) -> None:
    for key, value in text.items():
        if key in LAYER_KEYS and value == total:
            text[key] = layers
        # One entry or letter for each layer, for example layer_types.
        by_layer = isinstance(value, list) or (isinstance(value, str) and key.endswith("_pattern"))
        if by_layer and len(value) == total:
            text[key] = value[:layers]
    if "num_nextn_predict_layers" in text:
        text["num_nextn_predict_layers"] = 0
