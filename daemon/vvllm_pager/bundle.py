"""What belongs to one expert: found by looking, not by knowing formats.

After vLLM has processed a chunk of experts, everything that its kernel can read is reachable from the layer's
parameters, the quant config and the kernel object. Two chunks of different sizes tell what is per expert: a tensor
whose first dimension followed the number of experts. Anything that is neither that nor the same for every chunk is
refused: an expert must move whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch

from vvllm_shared.errors import UnsupportedError

ROUTING_SPACE = frozenset({"e_score_correction_bias", "hash_indices_table"})
"""Parameters of the container that the router reads; as vLLM's own list in
`RoutedExperts.get_expert_weights` (routed_experts.py:1316)."""

_UNREAD = ("weight_shape", "weight_global_scale")
"""Ends of names of a container's parameters that its kernel does not read, where nothing else refers to them: shapes
are for compressed-tensors' own decoder, and of its global scales for NVFP4 vLLM keeps the inverse beside them
(compressed_tensors_moe_w4a4_nvfp4.py, `w13_scale_2`). With `poison` they are NaN: each test of parity shows it."""

_MAY_BE_THE_SAME = ("zero_point", "qzeros", "input_scale", "input_global_scale")
"""Ends of names of per-expert tensors that many checkpoints have without need: where weights are symmetric each zero
point is the middle of the range, and the static scales of inputs are one for all experts
(`loading.LayerLoader.share_input_scales`)."""

_ALIGN = 16  # a row starts where 16-byte loads may
_RECORD_ALIGN = 256  # and a record where a copy engine's bursts may


@dataclass(frozen=True)
class Part:
    """One tensor's row within a record."""

    name: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the record."""
    nbytes: int


@dataclass(frozen=True)
class BundleLayout:
    """How one expert's tensors lie in its record of the host store."""

    parts: tuple[Part, ...]
    record_bytes: int

    @property
    def names(self) -> frozenset[str]:
        """Of the tensors that are per expert."""
        return frozenset(part.name for part in self.parts)

    @property
    def bundle_bytes(self) -> int:
        """Bytes that a miss moves: the record without its padding."""
        return sum(part.nbytes for part in self.parts)

    def without_the_same(self, records: torch.Tensor) -> BundleLayout:
        """Leave out what is the same for all experts: each slot has it from the start, and a miss need not move it.

        Args:
            records: uint8 [E, record_bytes], filled.
        """

        def same(part: Part) -> bool:
            rows = records[:, part.offset : part.offset + part.nbytes]
            return part.name.endswith(_MAY_BE_THE_SAME) and bool((rows == rows[0]).all())

        return replace(self, parts=tuple(part for part in self.parts if not same(part)))

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> BundleLayout:
        """Lay out rows of these per-expert tensors [n, ...], one after the other."""
        parts, offset = [], 0
        for name, tensor in tensors.items():
            nbytes = tensor[0].numel() * tensor.element_size()
            parts.append(Part(name, tuple(tensor.shape[1:]), tensor.dtype, offset, nbytes))
            offset += -(-nbytes // _ALIGN) * _ALIGN
        return cls(tuple(parts), -(-offset // _RECORD_ALIGN) * _RECORD_ALIGN)


def rows_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[n, ...] of any dtype seen as uint8 [n, bytes of a row]; shares memory."""
    return tensor.detach().view(len(tensor), -1).view(torch.uint8)


def kernel_tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that the layer's kernel may read, by where it hangs; one name for each memory.

    Raises:
        UnsupportedError: an object that may hide tensors and whose type is unknown.
    """
    unread = unread_parameters(layer)
    parameters = {
        name: parameter
        for name, parameter in layer.named_parameters(recurse=False)
        if name not in ROUTING_SPACE and name not in unread
    }
    found: dict[str, torch.Tensor] = {}
    seen: set[_Memory] = set()
    visited = {id(layer), id(layer.quant_method)}
    for name, tensor in (*_walk("", parameters, visited, layer), *_held(layer, visited)):
        if tensor.numel() and _memory(tensor) not in seen:
            seen.add(_memory(tensor))
            found[name] = tensor
    return found


def unread_parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Per-expert parameters of the container that its kernel does not read, by name: no expert needs its own."""
    held = {_memory(tensor) for _, tensor in _held(layer, {id(layer), id(layer.quant_method)})}
    return {
        name: parameter.data
        for name, parameter in layer.named_parameters(recurse=False)
        if name.endswith(_UNREAD) and _memory(parameter.data) not in held
    }


_Memory = tuple[int, torch.Size, torch.dtype]


def _memory(tensor: torch.Tensor) -> _Memory:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _held(layer: torch.nn.Module, visited: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """What hangs on the kernel and on its quant config."""
    method: Any = layer.quant_method
    yield from _walk("quant_config", method.moe_quant_config, visited, layer)
    yield from _walk("kernel", method.moe_kernel, visited, layer)


_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, type),
    *(torch.dtype, torch.device, torch.Size),
)


def _walk(
    path: str, value: Any, visited: set[int], layer: torch.nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) and not hasattr(value, "weight_loader"):
            raise _unknown(layer, path, value)
        yield path, value.data
        return
    if isinstance(value, _PLAIN) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, FunctionType | MethodType):
        # Code may hold tensors; what else it refers to is not data of an expert.
        held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        held.append(getattr(value, "__self__", None))
        children = [(str(i), one) for i, one in enumerate(held) if isinstance(one, torch.Tensor)]
    elif isinstance(value, dict):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        children = [(str(i), child) for i, child in enumerate(value)]
    elif type(value).__module__.split(".")[0] == "vllm" and hasattr(value, "__dict__"):
        children = list(vars(value).items())
    else:
        raise _unknown(layer, path, value)
    for name, child in children:
        yield from _walk(f"{path}.{name}".strip("."), child, visited, layer)


def _unknown(layer: Any, path: str, value: object) -> UnsupportedError:
    return UnsupportedError(
        f"{layer.layer_name}: the kernel of {type(layer.quant_method).__name__} holds "
        f"{type(value).__module__}.{type(value).__qualname__} at {path}, which may carry expert data "
        "in a form that cannot be paged.",
        'Choose another kernel with moe_backend (for example "triton", or "marlin" for 4 bits).',
    )


def per_expert(
    layer: Any,
    tensors: dict[str, torch.Tensor],
    experts: int,
    probe: dict[str, torch.Tensor],
    probe_experts: int,
) -> dict[str, torch.Tensor]:
    """Those tensors whose first dimension is the expert, told by comparing two chunks of different sizes.

    Args:
        layer: for messages.
        tensors: `kernel_tensors` of a chunk of `experts` experts.
        probe: the same of a chunk of `probe_experts` experts.

    Raises:
        UnsupportedError: a tensor that depends on the chunk and is not per expert, or cannot be moved by rows.
    """
    if set(tensors) != set(probe):
        raise refuse(layer, sorted(set(tensors) ^ set(probe))[0], "is there for one number of experts only")
    chosen = {}
    for name, tensor in tensors.items():
        other = probe[name]
        if tensor.shape == other.shape and experts != probe_experts:
            if not torch.equal(tensor, other):
                raise refuse(layer, name, "depends on which experts are processed together")
        elif tensor.shape[:1] == (experts,) and other.shape == (probe_experts, *tensor.shape[1:]):
            if not tensor.is_contiguous():
                raise refuse(layer, name, f"is not contiguous (strides {tensor.stride()})")
            chosen[name] = tensor
        else:
            raise refuse(layer, name, f"has shape {tuple(tensor.shape)}, whose expert dimension is not first")
    return chosen


def check_chunk(
    layer: Any, chunk: range, tensors: dict[str, torch.Tensor], shared: dict[str, torch.Tensor]
) -> None:
    """Hold a processed chunk of a layer against its layout and against what the first chunk gave.

    Args:
        layer: its `layout` is known.
        chunk: the experts in it.
        tensors: `kernel_tensors` of the chunk.
        shared: what of the first chunk's is not per expert; the last chunk's stays in the kernel for all experts.

    Raises:
        UnsupportedError: a tensor is missing, has another form, or depends on the chunk.
    """
    for part in layer.layout.parts:
        rows = tensors.get(part.name)
        if rows is None or rows.dtype != part.dtype or rows.shape != (len(chunk), *part.row_shape):
            raise refuse(
                layer, part.name, f"came out differently for experts {chunk.start} … {chunk.stop - 1}"
            )
    for name in tensors.keys() | shared.keys():
        if name in layer.layout.names:
            continue
        mine, first = tensors.get(name), shared.get(name)
        if mine is None or first is None or not torch.equal(mine, first):
            raise refuse(layer, name, "depends on which experts are processed together")


def refuse(layer: Any, name: str, why: str) -> UnsupportedError:
    """The refusal of a layer for one tensor of its kernel."""
    return UnsupportedError(
        f"{layer.layer_name}: {name} of {type(layer.quant_method).__name__} {why}, so it cannot be paged by expert.",
        'Choose another kernel with moe_backend (for example "triton", or "marlin" for 4 bits).',
    )
