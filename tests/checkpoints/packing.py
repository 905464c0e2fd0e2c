"""One matrix [n, k] in a format's own packing, as the tool that writes such checkpoints packs it.

Each function takes a weight of any float dtype and returns the tensors that stand in its place, by the ends of their
names.
"""

from __future__ import annotations

import torch
from torch import Tensor

Packed = dict[str, Tensor]

E2M1_MAX = 6.0
E4M3_MAX = 448.0
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between 0, 0.5, 1, 1.5, 2, 3, 4 and 6
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # autoawq/modules/linear/gemm.py: which of eight columns a nibble holds
_E8M0_BIAS = 127


def compressed_int4(weight: Tensor, group: int, *, symmetric: bool) -> Packed:
    """compressed-tensors, `pack-quantized`: along k, the first of eight values in the lowest bits, with an offset of 8.

    Returns:
        weight_packed int32 [n, k / 8], weight_scale bfloat16 [n, k / group], weight_shape int64 [2]; without symmetry
        weight_zero_point int32 [n / 8, k / group], packed along n.
    """
    values, scale, zero = _integers(weight, group, symmetric)
    packed = {
        "weight_packed": _words(values.unflatten(1, (-1, 8))),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        packed["weight_zero_point"] = _words(zero.T.unflatten(1, (-1, 8))).T.contiguous()
    return packed


def compressed_int8(weight: Tensor) -> Packed:
    """compressed-tensors, `int-quantized`, a scale for each row: weight int8 [n, k], weight_scale bfloat16 [n, 1]."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight.float() / scale.float()).round().clamp(-127, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale}


def compressed_fp8(weight: Tensor) -> Packed:
    """compressed-tensors, `float-quantized`, a scale for each row: weight fp8 [n, k], weight_scale bfloat16 [n, 1]."""
    scale = (weight.float().abs().amax(1, keepdim=True) / E4M3_MAX).bfloat16()
    return {"weight": _fp8(weight.float() / scale.float()), "weight_scale": scale}


def gptq(weight: Tensor, group: int) -> Packed:
    """AutoGPTQ, symmetric, without act-order: packed along k, and a stored zero is one less than it is.

    Returns:
        qweight int32 [k / 8, n], scales float16 [k / group, n], qzeros int32 [k / group, n / 8], g_idx int32 [k].
    """
    values, scale, zero = _integers(weight, group, symmetric=True)
    k = weight.shape[1]
    return {
        "qweight": _words(values.unflatten(1, (-1, 8))).T.contiguous(),
        "scales": scale.T.half().contiguous(),
        "qzeros": _words((zero - 1).T.unflatten(1, (-1, 8))),
        "g_idx": (torch.arange(k) // group).int(),
    }


def awq(weight: Tensor, group: int) -> Packed:
    """AutoAWQ, `gemm`, with zero points: packed along n, in AWQ's order.

    Returns:
        qweight int32 [k, n / 8], scales float16 [k / group, n], qzeros int32 [k / group, n / 8].
    """
    values, scale, zero = _integers(weight, group, symmetric=False)
    order = torch.tensor(_AWQ_ORDER)
    return {
        "qweight": _words(values.T.unflatten(1, (-1, 8))[..., order]),
        "scales": scale.T.half().contiguous(),
        "qzeros": _words(zero.T.unflatten(1, (-1, 8))[..., order]),
    }


def fp8_block(weight: Tensor, block: int) -> Packed:
    """DeepSeek's and Qwen's FP8: weight fp8 [n, k], weight_scale_inv float32 [n / block, k / block]."""
    blocks = weight.float().unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scale = blocks.abs().amax((1, 3), keepdim=True) / E4M3_MAX
    return {
        "weight": _fp8((blocks / scale).flatten(0, 1).flatten(1, 2)),
        "weight_scale_inv": scale.flatten(1, 3),
    }


def fp8_tensor(weight: Tensor, largest_input: float | None) -> Packed:
    """FP8 with one scale for the matrix: weight fp8 [n, k], weight_scale float32 [], and, where activations have a
    static scale too, input_scale float32 []."""
    scale = weight.float().abs().max() / E4M3_MAX
    packed = {"weight": _fp8(weight.float() / scale), "weight_scale": scale}
    if largest_input is not None:
        packed["input_scale"] = torch.tensor(largest_input / E4M3_MAX)
    return packed


def compressed_nvfp4(weight: Tensor, largest: float, largest_input: float) -> Packed:
    """compressed-tensors, `nvfp4-pack-quantized`: the global scales are divisors.

    Args:
        largest: of the absolute values of all matrices that vLLM fuses with this one: they must share a global scale.

    Returns:
        weight_packed uint8 [n, k / 2], weight_scale fp8 [n, k / 16], weight_global_scale and input_global_scale
        float32 [1].
    """
    divisor = torch.tensor([E4M3_MAX * E2M1_MAX / largest])
    codes, scale = _e2m1(weight, divisor)
    return {
        "weight_packed": codes,
        "weight_scale": scale,
        "weight_global_scale": divisor,
        "input_global_scale": torch.tensor([E4M3_MAX * E2M1_MAX / largest_input]),
    }


def modelopt_nvfp4(weight: Tensor, largest: float, largest_input: float) -> Packed:
    """ModelOpt, `NVFP4`: the same numbers as compressed-tensors', the global scales as factors.

    Returns:
        weight uint8 [n, k / 2], weight_scale fp8 [n, k / 16], weight_scale_2 and input_scale float32 [].
    """
    factor = torch.tensor(largest / (E4M3_MAX * E2M1_MAX))
    codes, scale = _e2m1(weight, 1 / factor)
    return {
        "weight": codes,
        "weight_scale": scale,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(largest_input / (E4M3_MAX * E2M1_MAX)),
    }


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """OCP's MXFP4, as gpt-oss stores it: blocks of 32 with a power of two.

    Args:
        weight: [..., k], of any number of dimensions.

    Returns:
        blocks uint8 [..., k / 32, 16] and scales uint8 [..., k / 32].
    """
    groups = weight.float().contiguous().unflatten(-1, (-1, 32))
    # The largest of a block lies in the last binade of E2M1, 4 to 6 (OCP microscaling formats, 1.0, section 6.3).
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=2.0**-100))) - 2
    codes = _codes(groups / torch.exp2(exponent).unsqueeze(-1))
    return _pairs(codes), (exponent + _E8M0_BIAS).to(torch.uint8)


def _integers(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Values 0 to 15 [n, k], scales float16 [n, k / group], zero points [n, k / group]."""
    groups = weight.float().unflatten(1, (-1, group))
    if symmetric:  # the 16 values -8 to 7 span 15 steps
        scale = (groups.abs().amax(2) / 7.5).bfloat16().half()
        zero = torch.full_like(scale, 8, dtype=torch.int64)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / 15).bfloat16().half()
        zero = (-low / scale.float()).round().clamp(0, 15).to(torch.int64)
    steps = (groups / scale.float().unsqueeze(2)).round().to(torch.int64)
    return (steps + zero.unsqueeze(2)).clamp(0, 15).flatten(1), scale, zero


def _words(nibbles: Tensor) -> Tensor:
    """[..., 8] of 0 to 15 as int32 [...], the first in the lowest bits."""
    return (nibbles << (4 * torch.arange(8))).sum(-1).to(torch.int32)


def _fp8(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _e2m1(weight: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n, k / 2] and scales fp8 [n, k / 16]; a weight is value x scale / divisor."""
    groups = weight.float().unflatten(1, (-1, 16))
    scale = (groups.abs().amax(2) / E2M1_MAX * divisor).to(torch.float8_e4m3fn)
    codes = _codes(groups * divisor / scale.float().unsqueeze(2))
    return _pairs(codes).flatten(1), scale


def _codes(values: Tensor) -> Tensor:
    """E2M1's four bits of each value."""
    return torch.bucketize(values.abs(), torch.tensor(_E2M1_MIDPOINTS)) | values.signbit().long() << 3


def _pairs(codes: Tensor) -> Tensor:
    """Two codes in a byte, the first in the lower half."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8)
