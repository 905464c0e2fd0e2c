"""Every expert has all of its tensors, and they look like those of its siblings."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import NoReturn

from vvllm_msd.checkpoint.experts import MoeLayer, Part
from vvllm_msd.checkpoint.header import DOWNLOAD_AGAIN, Tensor
from vvllm_shared.errors import CheckpointError


def check(layers: dict[int, MoeLayer], experts: int) -> None:
    """Check each layer in itself, then the layers against each other.

    Args:
        experts: how many each layer must have.

    Raises:
        CheckpointError: naming the file, the layer, the expert and the tensor.
    """
    for layer in layers.values():
        if layer.single:
            _check_numbers(layer, experts)
            _check_parts(layer)
            _check_siblings(layer)
        else:
            _check_fused(layer, experts)
    _check_projections(layers)
    _check_layers_alike(layers)


def _refuse(sentence: str) -> NoReturn:
    raise CheckpointError(sentence, DOWNLOAD_AGAIN)


def _looks(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _check_numbers(layer: MoeLayer, experts: int) -> None:
    """The experts are 0 to `experts` - 1."""
    if (highest := max(layer.single)) >= experts:
        part, stored = next(iter(layer.single[highest].items()))
        _refuse(
            f"{stored.file} holds {layer.prefix}{highest}.{part}, but config.json says {experts} experts."
        )
    if len(layer.single) < experts:
        absent = [expert for expert in range(experts) if expert not in layer.single]
        _refuse(
            f"Layer {layer.number} expert {absent[0]}: all tensors {layer.prefix}{absent[0]}.* are missing"
            f"{_more(len(absent) - 1, 'expert')}."
        )


def _more(count: int, what: str) -> str:
    return f" (and {count} more {what}{'s' if count > 1 else ''})" if count else ""


def _check_parts(layer: MoeLayer) -> None:
    """Each expert has the tensors that most of its siblings have, and no others."""
    experts = len(layer.single)
    counts = Counter(part for tensors in layer.single.values() for part in tensors)
    if counts.most_common()[-1][1] == experts:
        return
    for part, count in counts.items():
        if 2 * count < experts:
            having = next(expert for expert, tensors in layer.single.items() if part in tensors)
            file = layer.single[having][part].file
            _refuse(
                f"Layer {layer.number} expert {having}: {file} holds {layer.prefix}{having}.{part}, but only {count} "
                f"of {experts} experts have such a tensor."
            )
    missing = [
        (expert, part)
        for expert in sorted(layer.single)
        for part in counts
        if part not in layer.single[expert]
    ]
    expert, part = missing[0]
    file = next(iter(layer.single[expert].values())).file
    _refuse(
        f"Layer {layer.number} expert {expert}: {part} is missing{_more(len(missing) - 1, 'tensor')}; "
        f"{layer.prefix}{expert}.{part} should be in {file}, beside the expert's others."
    )


def _check_siblings(layer: MoeLayer) -> None:
    """The same tensor has the same dtype and shape in all experts of a layer."""
    for part in next(iter(layer.single.values())):
        by_expert = {expert: tensors[part] for expert, tensors in layer.single.items()}
        looks = Counter((stored.tensor.dtype, stored.tensor.shape) for stored in by_expert.values())
        if len(looks) == 1:
            continue
        usual = looks.most_common(1)[0][0]
        odd = next(
            e for e, stored in by_expert.items() if (stored.tensor.dtype, stored.tensor.shape) != usual
        )
        _refuse(
            f"Layer {layer.number} expert {odd}: {layer.prefix}{odd}.{part} in {by_expert[odd].file} is "
            f"{_looks(by_expert[odd].tensor)}, while its siblings are {usual[0]} {list(usual[1])}."
        )


def _check_fused(layer: MoeLayer, experts: int) -> None:
    """A tensor for all experts has one row for each; a scale may be one number for all of them."""
    for part, stored in layer.fused.items():
        shape = stored.tensor.shape
        if shape[:1] != (experts,) and math.prod(shape) != 1:
            _refuse(
                f"Layer {layer.number}: {layer.prefix}{part} in {stored.file} is {_looks(stored.tensor)}, "
                f"but config.json says {experts} experts."
            )


def _check_projections(layers: dict[int, MoeLayer]) -> None:
    """Each layer has the projections that most have, and each of them its weight."""
    projections = {
        number: frozenset(part.projection for part in layer.one()) for number, layer in layers.items()
    }
    usual, _ = Counter(projections.values()).most_common(1)[0]
    for number, layer in layers.items():
        if odd := sorted(usual ^ projections[number]):
            has = "has" if odd[0] in projections[number] else "lacks"
            _refuse(
                f"Layer {number} {has} {layer.prefix}*.{odd[0]} for every expert, unlike the other layers."
            )
        weighted = {part.projection for part in layer.one() if part.is_weight}
        if bare := sorted(usual - weighted):
            _refuse(f"Layer {number}: the weight of {layer.prefix}*.{bare[0]} is missing for every expert.")


def _check_layers_alike(layers: dict[int, MoeLayer]) -> None:
    """Layers whose weights are stored alike have the same biases and scales; quantization may differ by layer."""
    alike: dict[frozenset[tuple[Part, str]], list[MoeLayer]] = defaultdict(list)
    for layer in layers.values():
        weights = ((part, stored.tensor.dtype) for part, stored in layer.one().items() if part.is_weight)
        alike[frozenset(weights)].append(layer)
    for group in alike.values():
        usual, _ = Counter(frozenset(layer.one()) for layer in group).most_common(1)[0]
        for layer in group:
            if odd := sorted(usual ^ layer.one().keys()):
                has = "has" if odd[0] in layer.one() else "lacks"
                _refuse(
                    f"Layer {layer.number} {has} {layer.prefix}*.{odd[0]} for every expert, unlike the others."
                )
