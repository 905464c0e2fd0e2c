"""The one question to this package: is this directory a whole Mixture-of-Experts model?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from vvllm_msd.checkpoint import completeness
from vvllm_msd.checkpoint.experts import find_layers
from vvllm_msd.checkpoint.files import Stored, read_json, read_tensors
from vvllm_msd.checkpoint.model_config import ModelConfig, read_model_config
from vvllm_shared.errors import CheckpointError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")
_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Checkpoint:
    """A model directory that was found whole."""

    path: Path
    architecture: str
    model_type: str
    layers: int
    """All layers of the language model."""
    moe_layers: tuple[int, ...]
    """The layers that have experts, in order."""
    experts: int
    """Experts of each of these layers."""
    top_k: int
    """Experts that a token uses in each of these layers."""
    expert_bytes: int
    """One expert of one layer as stored; of the largest layer, should they differ."""
    experts_bytes: int
    """All experts of all layers, as stored."""
    least_experts_bytes: int
    """What they take once loaded, at least: vLLM computes 32-bit floats in 16 bits unless it is told otherwise."""
    total_bytes: int
    """All tensors of the directory, as stored."""
    dtype: str
    """What the config computes in (`bfloat16`, ...); where it does not say, how most tensors are stored."""
    quantization: str | None
    """vLLM's name for the quantization; None for plain weights."""
    has_tokenizer: bool
    has_chat_template: bool
    warnings: tuple[str, ...]
    """Sentences for the user about what is odd but does no harm."""


def validate(model_dir: Path) -> Checkpoint:
    """Check the model in `model_dir` from the headers of its files; no tensor's data is read.

    Raises:
        CheckpointError: the directory or a file is missing, damaged or incomplete; the sentence names the file and
            the tensor.
        UnsupportedError: it is no Mixture-of-Experts model, or in a format that is not read.
    """
    _check_directory(model_dir)
    config = read_model_config(model_dir)
    warnings: list[str] = []
    tensors = read_tensors(model_dir, warnings)
    layers = find_layers(tensors, config, warnings)
    completeness.check(layers, config.experts)
    return Checkpoint(
        path=model_dir,
        architecture=config.architecture,
        model_type=config.model_type,
        layers=config.layers,
        moe_layers=tuple(sorted(layers)),
        experts=config.experts,
        top_k=config.top_k,
        expert_bytes=max(layer.nbytes for layer in layers.values()) // config.experts,
        experts_bytes=sum(layer.nbytes for layer in layers.values()),
        least_experts_bytes=sum(layer.least_bytes for layer in layers.values()),
        total_bytes=sum(stored.tensor.nbytes for stored in tensors.values()),
        dtype=config.dtype or _usual_dtype(tensors),
        quantization=config.quantization,
        has_tokenizer=(has_tokenizer := any((model_dir / name).is_file() for name in _TOKENIZERS)),
        has_chat_template=(has_chat_template := _has_chat_template(model_dir)),
        warnings=(*warnings, *_warnings(model_dir, config, has_tokenizer, has_chat_template)),
    )


def _check_directory(model_dir: Path) -> None:
    try:
        if not model_dir.exists():
            raise CheckpointError(
                f"The model directory {model_dir} does not exist.",
                "Give --model the directory of a downloaded model.",
            )
        if not model_dir.is_dir():
            raise CheckpointError(
                f"{model_dir} is not a directory.",
                "Give --model the directory that holds config.json, not a file.",
            )
        next(model_dir.iterdir(), None)
    except OSError as error:
        raise CheckpointError(
            f"The model directory {model_dir} cannot be read: {error.strerror}.",
            f"See `ls -ld {model_dir}`: the user that runs this needs to read and enter it.",
        ) from error


def _usual_dtype(tensors: dict[str, Stored]) -> str:
    """The float type of most tensors."""
    counts = Counter(stored.tensor.dtype for stored in tensors.values() if stored.tensor.dtype in _FLOATS)
    return _FLOATS[counts.most_common(1)[0][0]] if counts else "unknown"


def _has_chat_template(model_dir: Path) -> bool:
    if any((model_dir / name).is_file() for name in _CHAT_TEMPLATES):
        return True
    tokenizer_config = model_dir / "tokenizer_config.json"
    return tokenizer_config.is_file() and bool(read_json(tokenizer_config).get("chat_template"))


def _warnings(
    model_dir: Path, config: ModelConfig, has_tokenizer: bool, has_chat_template: bool
) -> list[str]:
    found = []
    if not has_tokenizer:
        found.append(f"{model_dir} has no tokenizer ({', '.join(_TOKENIZERS)}).")
    if not has_chat_template:
        found.append(f"{model_dir} has no chat template: only raw completions will work.")
    if scripts := sorted(path.name for path in model_dir.iterdir() if path.suffix == ".py"):
        found.append(f"{', '.join(scripts)} will not be executed.")
    if config.auto_map:
        found.append("config.json asks for Python code of its own (auto_map): it will not be executed.")
    return found
