"""The tensors of the experts, found by their names, and which layers they belong to.

Two layouts are known: one tensor for each expert and projection (`...experts.17.up_proj.weight`), and one for all
experts of a layer (`...experts.gate_up_proj`, or Granite's `...block_sparse_moe.input_linear.weight`, whose first
dimension is the expert).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from vvllm_msd.checkpoint.files import Stored
from vvllm_msd.checkpoint.header import DOWNLOAD_AGAIN, Tensor
from vvllm_msd.checkpoint.model_config import ModelConfig
from vvllm_shared.errors import CheckpointError, UnsupportedError

_LAYER = r"(?P<stem>(?:.*?\.)?(?:layers|blocks|h)\.)(?P<layer>\d{1,6})\."
_IN_LAYER = re.compile(_LAYER)
_FUSED_IN_BLOCK = r"(?<=block_sparse_moe\.)(?=(?:in|out)put_linear\.)"
_NAME = re.compile(_LAYER + rf"(?P<block>(?:.*?\.)?)(?:experts\.|{_FUSED_IN_BLOCK})(?P<rest>.+)")
_HINTS = ("experts.", "put_linear.")
"""One of them is in each such name."""
_OF_ROUTER = "e_score_correction_bias"
"""Laguna's checkpoints have it beside the experts."""
_NUMBERED = re.compile(r"(?P<expert>\d{1,6})\.(?P<tail>.+)")
_ELSEWHERE = re.compile(r"(?:^|\.)(?:mtp|draft|visual|vision\w*|image\w*|audio\w*)\.")
"""Draft layers and towers for other modalities: not part of the language model."""

_PART = re.compile(
    r"(?P<projection>gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3|w13|(?:in|out)put_linear)(?:[._](?P<kind>.+))?"
)
_WEIGHT = re.compile(r"(?:weight_|q)?(?:weight|packed|blocks)")
_BESIDE_WEIGHT = re.compile(
    r"bias|scales?|qzeros|g_idx"
    r"|weight_(?:scales?|scale_inv|scale_2|global_scale|zero_point|shape|g_idx)"
    r"|(?:input|output)_(?:scale|global_scale|zero_point)"
)

_NARROWED = {"F32": 2, "F64": 4}
"""How many times as wide as 16 bits a float is stored."""


class Part(NamedTuple):
    """What one tensor of an expert is for; as text, the end of its name, such as `up_proj.weight`."""

    tail: str
    projection: str
    is_weight: bool
    """Whether it holds the numbers themselves, not a bias, a scale or the like."""

    def __str__(self) -> str:
        return self.tail


def layer_of(name: str) -> int | None:
    """The number of the language model's layer that the tensor `name` is in; None if it is in none."""
    match = _IN_LAYER.match(name)
    return None if match is None or _ELSEWHERE.search(match["stem"]) else int(match["layer"])


@lru_cache(maxsize=256)
def _read_part(tail: str) -> Part | None:
    """Read the end of a tensor's name; None if no expert has such a tensor."""
    match = _PART.fullmatch(tail)
    if match is None:
        return None
    kind = match["kind"]
    is_weight = kind is None or _WEIGHT.fullmatch(kind) is not None
    known = is_weight or _BESIDE_WEIGHT.fullmatch(kind)
    return Part(tail, match["projection"], is_weight) if known else None


@dataclass
class MoeLayer:
    """The experts' tensors of one layer, in the one or the other layout."""

    number: int
    prefix: str
    """What their names begin with, up to and with `experts.` where they have that."""
    single: dict[int, dict[Part, Stored]] = field(default_factory=dict)
    """Expert to its tensors."""
    fused: dict[Part, Stored] = field(default_factory=dict)
    """Tensors for all experts at once."""

    @property
    def nbytes(self) -> int:
        """Bytes of all experts, as stored."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def least_bytes(self) -> int:
        """Bytes of all experts with each float in 16 bits, as vLLM may load it."""
        return sum(tensor.nbytes // _NARROWED.get(tensor.dtype, 1) for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        single = (stored for tensors in self.single.values() for stored in tensors.values())
        return (stored.tensor for stored in (*single, *self.fused.values()))

    def one(self) -> dict[Part, Stored]:
        """The tensors of the first expert, or of all at once: what every expert of a checked layer has."""
        return self.fused or self.single[min(self.single)]


def find_layers(tensors: dict[str, Stored], config: ModelConfig, warnings: list[str]) -> dict[int, MoeLayer]:
    """The language model's layers with experts, by number: all that the config and the routers ask for.

    Args:
        warnings: gets a sentence when experts lie in layers that the model does not run.

    Raises:
        CheckpointError: a tensor is in the experts' name space but is none of an expert's, or a layer has no experts
            that must have some, or the other way round.
        UnsupportedError: no tensor is named as an expert's.
    """
    layers: dict[int, MoeLayer] = {}
    blocks: set[tuple[str, str]] = set()
    beyond: set[int] = set()
    for name, stored in tensors.items():
        match = _NAME.fullmatch(name) if any(hint in name for hint in _HINTS) else None
        if match is None or match["rest"] == _OF_ROUTER or _ELSEWHERE.search(match["stem"]):
            continue
        number = int(match["layer"])
        if number >= config.layers:
            beyond.add(number)
            continue
        blocks.add((match["stem"], match["block"]))
        layer = layers.setdefault(number, MoeLayer(number, name.removesuffix(match["rest"])))
        _add(layer, name, match["rest"], stored)
    if not layers:
        raise UnsupportedError(
            f"No tensor of this {config.architecture} is named as an expert's (`...layers.0...experts.0...`).",
            "Its layout is not known here. Is it the variant in Hugging Face's format?",
        )
    if beyond:
        warnings.append(
            f"Layers {_numbers(beyond)} are not run: the model has {config.layers} (draft layers?)."
        )
    _check_all_there(layers, config, _layers_with_routers(tensors, blocks, config.layers))
    return layers


def _add(layer: MoeLayer, name: str, rest: str, stored: Stored) -> None:
    if not name.startswith(layer.prefix):
        raise CheckpointError(
            f"Layer {layer.number} has two sets of experts: {layer.prefix}* and {name} in {stored.file}.",
            DOWNLOAD_AGAIN,
        )
    numbered = _NUMBERED.fullmatch(rest)
    part = _read_part(numbered["tail"] if numbered else rest)
    if part is None:
        raise CheckpointError(
            f"{stored.file} holds {name}, and no expert is known to have such a tensor.",
            "The file is damaged, or its format is not supported: the tensor would be ignored without a word.",
        )
    if numbered:
        layer.single.setdefault(int(numbered["expert"]), {})[part] = stored
    else:
        layer.fused[part] = stored
    if layer.single and layer.fused:
        raise CheckpointError(
            f"Layer {layer.number} has tensors of single experts and of all experts at once: see {name} "
            f"in {stored.file}.",
            DOWNLOAD_AGAIN,
        )


def _layers_with_routers(tensors: Iterable[str], blocks: set[tuple[str, str]], layers: int) -> set[int]:
    """Where a router stands there must be experts, whatever the config calls its rule."""
    places = "|".join(rf"{re.escape(stem)}\d+\.{re.escape(block)}" for stem, block in sorted(blocks))
    router = re.compile(rf"(?:{places})(?:gate|router)\.")
    stems = "|".join(sorted(re.escape(stem) for stem, _ in blocks))
    number = re.compile(rf"(?:{stems})(\d{{1,6}})")
    found = {int(match[1]) for name in tensors if router.match(name) and (match := number.match(name))}
    return {layer for layer in found if layer < layers}


def _check_all_there(layers: dict[int, MoeLayer], config: ModelConfig, routed: set[int]) -> None:
    wanted = routed | (config.moe_layers or frozenset())
    if absent := wanted - layers.keys():
        because = "it has a router" if min(absent) in routed else "config.json says it has experts"
        raise CheckpointError(
            f"Layer {_numbers(absent)} has no expert in any file, but {because}.",
            "A file is missing or belongs to another model: download the model again.",
        )
    if config.moe_layers is not None and (extra := layers.keys() - config.moe_layers):
        prefix = layers[min(extra)].prefix
        raise CheckpointError(
            f"Layer {_numbers(extra)} has experts ({prefix}*), but config.json makes it a dense layer.",
            "config.json and the weights are of different models: download the model again.",
        )


def _numbers(numbers: Iterable[int]) -> str:
    shown = sorted(numbers)
    return ", ".join(map(str, shown[:8])) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
