"""What `config.json` says of a model's experts, in the many words that families have for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vvllm_msd.checkpoint.files import read_json
from vvllm_shared import limits
from vvllm_shared.errors import CheckpointError, UnsupportedError

_TAKE_AGAIN = "Take config.json from the model's source again."
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "experts_per_token",
)
LAYER_KEYS = ("num_hidden_layers", "n_layers", "num_layers")
"""Where families have the number of the language model's layers."""
_KINDS = ("layers_block_type", "hybrid_override_pattern")
"""Nemotron-H's layers, one by one: as words, or as letters of one string. It goes by their number, where they are."""
_KINDS_WITH_EXPERTS = frozenset({"moe", "E"})
_ALL_LAYERS = frozenset({"mixtral", "olmoe", "gpt_oss"})
"""Families whose every layer has experts, and whose configs have no word for it."""


@dataclass(frozen=True)
class ModelConfig:
    """The part of a model's configuration that says which experts its files must hold."""

    architecture: str
    model_type: str
    layers: int
    """Layers of the language model, without those for multi-token prediction."""
    experts: int
    top_k: int
    moe_layers: frozenset[int] | None
    """Layers that have experts; None where this family's rule is not known here."""
    dtype: str | None
    quantization: str | None
    auto_map: bool
    """Whether the config asks for Python code of its own."""


def text_config(whole: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: `whole` itself where there are no other parts."""
    return next((whole[key] for key in _TEXT_CONFIGS if isinstance(whole.get(key), dict)), whole)


def read_model_config(directory: Path) -> ModelConfig:
    """Read `config.json` in `directory`.

    Raises:
        CheckpointError: it is missing, not JSON, or contradicts itself.
        UnsupportedError: it describes no Mixture-of-Experts model, or one that is quantised in a way that vLLM has no
            name for.
    """
    path = directory / "config.json"
    whole = read_json(path)
    text = text_config(whole)
    architectures = whole.get("architectures")
    architecture = _text(architectures[0] if isinstance(architectures, list) and architectures else None)
    experts = find_number(path, text, _EXPERTS, limits.EXPERTS)
    if experts is None:
        raise UnsupportedError(
            f"{directory} is not a Mixture-of-Experts model: its config.json ({architecture}) names no experts.",
            "Choose a Mixture-of-Experts model; vLLM alone serves the others.",
        )
    kinds = _kinds(text)
    layers = len(kinds) if kinds else needed_number(path, text, LAYER_KEYS, limits.LAYERS)
    if layers > limits.LAYERS:
        raise CheckpointError(f"{path} has {layers} layers (1 to {limits.LAYERS}).", _TAKE_AGAIN)
    top_k = needed_number(path, text, _TOP_K, limits.TOP_K)
    if top_k > experts:
        raise CheckpointError(
            f"{path} has {top_k} experts per token but only {experts} experts.", _TAKE_AGAIN
        )
    model_type = _text(text.get("model_type") or whole.get("model_type"))
    dtype = text.get("dtype") or text.get("torch_dtype") or whole.get("dtype") or whole.get("torch_dtype")
    return ModelConfig(
        architecture=architecture,
        model_type=model_type,
        layers=layers,
        experts=experts,
        top_k=top_k,
        moe_layers=_moe_layers(path, text, model_type, layers),
        dtype=_text(dtype).removeprefix("torch.") if dtype else None,
        quantization=_quantization(directory, whole, text),
        auto_map="auto_map" in whole or "auto_map" in text,
    )


def needed_number(path: Path, config: dict[str, Any], names: tuple[str, ...], most: int) -> int:
    """Like `find_number`, but one must be there.

    Raises:
        CheckpointError: none is, or it is impossible.
    """
    number = find_number(path, config, names, most)
    if number is None:
        raise CheckpointError(f"{path} has no {names[0]}.", _TAKE_AGAIN)
    return number


def _text(value: object) -> str:
    """A word of the config as it can be shown: no control characters, not endless."""
    word = str(value or "unknown")[:100]
    return word if word.isprintable() else repr(word)


def find_number(path: Path, config: dict[str, Any], names: tuple[str, ...], most: int) -> int | None:
    """The first of `names` that the config sets; null and 0 mean absent, as dense variants of a family say it.

    Args:
        path: the config's file, for the error.
        most: the largest number that is possible.

    Raises:
        CheckpointError: it is no number, or an impossible one.
    """
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value:
            value = value[0]  # Ernie has one number for each modality, all the same
        if value is None or value == 0:
            continue
        if type(value) is not int or not 0 < value <= most:
            raise CheckpointError(
                f"{path} has the impossible value {str(value)[:40]!r} for {name} (1 to {most}).",
                _TAKE_AGAIN,
            )
        return value
    return None


def _moe_layers(path: Path, config: dict[str, Any], model_type: str, layers: int) -> frozenset[int] | None:
    """The layers that must have experts, by the rules of the families that are known; else None."""
    try:
        chosen = _by_rule(config, model_type, range(layers))
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise CheckpointError(
            f"{path} has an impossible rule for which layers have experts.",
            _TAKE_AGAIN,
        ) from error
    return None if chosen is None else frozenset(chosen)


def _kinds(config: dict[str, Any]) -> list[str] | str | None:
    """Each layer's kind, where one of them is experts; None in configs that do not tell it so."""
    found = next((config[key] for key in _KINDS if isinstance(config.get(key), list | str)), None)
    if found is None or not all(isinstance(kind, str) for kind in found):
        return None
    return None if _KINDS_WITH_EXPERTS.isdisjoint(found) else found


def _by_rule(config: dict[str, Any], model_type: str, layers: range) -> Iterable[int] | None:
    if kinds := _kinds(config):
        return [layer for layer in layers if kinds[layer] in _KINDS_WITH_EXPERTS]
    if types := config.get("mlp_layer_types"):
        return [layer for layer in layers if types[layer] == "sparse"]
    frequency = config.get("moe_layer_freq") or 1
    if isinstance(frequency, list):
        return [layer for layer in layers if frequency[layer]]
    if (dense := config.get("first_k_dense_replace")) is not None:
        return [layer for layer in layers if layer >= dense and layer % frequency == 0]
    if (step := config.get("decoder_sparse_step")) is not None:
        dense_layers = config.get("mlp_only_layers") or []
        return [layer for layer in layers if layer not in dense_layers and (layer + 1) % step == 0]
    return layers if model_type in _ALL_LAYERS else None


_NOT_SERVED = frozenset(
    {"aqlm", "bitsandbytes", "eetq", "exl2", "exl3", "gguf", "higgs", "hqq", "quip", "vptq"}
)
"""Quantizations of checkpoints that people share and vLLM 0.32.0 has no name for (`QUANTIZATION_METHODS`)."""


def _quantization(directory: Path, *configs: dict[str, Any]) -> str | None:
    """The name of the quantization, as vLLM looks for it."""
    for config in configs:
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := config.get(key), dict):
                name = _text(found.get("quant_method") or found.get("quant_algo"))
                if name.lower() in _NOT_SERVED:
                    raise UnsupportedError(
                        f"{directory} is quantised with {name}, which vLLM 0.32.0 does not serve.",
                        "Take another variant of this model: `vvllm-msd models` lists the formats that work.",
                    )
                return name
    modelopt = directory / "hf_quant_config.json"
    return "modelopt" if modelopt.is_file() else None
