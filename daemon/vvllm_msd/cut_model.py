"""The first K layers of a checkpoint as a checkpoint of its own, for comparing a model that does not fit whole."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from vvllm_shared.errors import UsageError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def cut(model: Path, layers: int, into: Path) -> Path:
    """Write the first `layers` layers of `model` into the directory `into`.

    Tokenizer and other small files are copied; tensors of later layers (MTP layers too) are left out.

    Raises:
        UsageError: fewer than one layer, or not fewer than the model has.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    total = text["num_hidden_layers"]
    if not 0 < layers < total:
        raise UsageError(f"--layers {layers}: the model has {total} layers.", f"Give 1 … {total - 1}.")
    _shorten(text, total, layers)
    (into / "config.json").write_text(json.dumps(config))
    for file in model.iterdir():
        if (
            file.is_file()
            and not file.name.endswith((".safetensors", ".index.json"))
            and file.name != "config.json"
        ):
            shutil.copyfile(file, into / file.name)
    weight_map: dict[str, str] = {}
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, "pt") as source:
            kept = {name: source.get_tensor(name) for name in source.keys() if _kept(name, layers)}  # noqa: SIM118
        if kept:
            save_file(kept, into / shard.name, {"format": "pt"})
            weight_map |= dict.fromkeys(kept, shard.name)
    if set(weight_map.values()) != {"model.safetensors"}:
        index = {"metadata": {}, "weight_map": weight_map}
        (into / "model.safetensors.index.json").write_text(json.dumps(index))
    return into


def _kept(name: str, layers: int) -> bool:
    match = _LAYER.search(name)
    return match is None or int(match[1]) < layers


def _shorten(text: dict[str, Any], total: int, layers: int) -> None:
    text["num_hidden_layers"] = layers
    for key, value in text.items():
        if isinstance(value, list) and len(value) == total:  # one entry per layer, for example layer_types
            text[key] = value[:layers]
    if "num_nextn_predict_layers" in text:
        text["num_nextn_predict_layers"] = 0
