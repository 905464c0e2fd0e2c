"""What an engine on a GPU is given besides: the experts' kernel, and the batches that decode in a CUDA graph.

vLLM's own choices are for engines that hold every expert: it may prefer a kernel that the pager refuses, and it
captures graphs of more tokens than a paged engine can serve without the host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vvllm_msd.checkpoint.files import read_json
from vvllm_msd.checkpoint.model_config import text_config
from vvllm_shared.residency import graph_sizes, most_tokens

_SIZES = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
_FOUR_BITS = {"gptq", "auto_gptq", "gptq_marlin", "awq", "auto_awq", "awq_marlin", "mxfp4", "gpt_oss_mxfp4"}
"""Formats of weights alone. Some have 8 bits too, which Marlin also takes."""

_LEFT = ("ignore", "exclude_modules", "modules_to_not_convert")
"""Lists of names, or of patterns of names, of what is not quantised."""

_EXPERTS = re.compile(r"(?<!shared_)experts")
"""In the name, or in the pattern of names, of what is a routed expert."""


def graph_options(
    engine: Mapping[str, Any], slots: int, top_k: int, max_num_seqs: int
) -> dict[str, list[int] | bool]:
    """The engine's options that say which batches decode in a CUDA graph; none where the user has said.

    Args:
        engine: the user's options of vLLM.
        slots: experts per layer that are surely on the device.
        top_k: experts of a token.
        max_num_seqs: requests that decode together.
    """
    own, drafts = engine.get("compilation_config") or {}, _table(engine.get("speculative_config"))
    if engine.get("enforce_eager") or not isinstance(own, Mapping) or _SIZES & (engine.keys() | own.keys()):
        return {}
    # Each request brings its drafts, and a decode graph is for a number of requests (config/compilation.py:1530).
    tokens = drafts.get("num_speculative_tokens")
    each = 1 + tokens if isinstance(tokens, int) and tokens > 0 else 1
    requests = min(most_tokens(slots, top_k) // each, max_num_seqs)
    if requests == 0:
        return {"enforce_eager": True}
    return {"cudagraph_capture_sizes": [each * size for size in graph_sizes(requests)]}


def quantization(directory: Path) -> dict[str, Any] | None:
    """What the checkpoint in `directory` says of its quantization; None where it has none.

    Raises:
        CheckpointError: a file that says it cannot be read.
    """
    whole = read_json(directory / "config.json")
    for config in (whole, text_config(whole)):
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := config.get(key), dict):
                return found
    modelopt = directory / "hf_quant_config.json"
    if not modelopt.is_file():
        return None
    told = read_json(modelopt).get("quantization")
    return {"quant_method": "modelopt"} | (told if isinstance(told, dict) else {})


def moe_backend(quantization: Mapping[str, Any] | None, fp8_units: bool) -> str | None:
    """vLLM's name of the kernel for a checkpoint's experts; None where the choice is left to vLLM.

    Of those that the pager takes: Triton computes with what its operands are, Marlin with 16 bits, whatever the
    weights are. Where inputs have one scale for a whole batch, found while it runs, only Marlin, which needs none,
    computes a batch in rounds as in one piece.

    Args:
        quantization: as of `quantization`.
        fp8_units: the device multiplies FP8.
    """
    if quantization is None:
        return "triton"
    # vLLM takes one name for all layers, and for experts of 16 bits none but Triton's.
    left = _leaves_experts(quantization)
    return None if left else _of_method(quantization, "triton" if fp8_units else "marlin")


def _of_method(quantization: Mapping[str, Any], fp8: str) -> str | None:
    """`moe_backend` where all routed experts are quantised.

    Args:
        fp8: the kernel for FP8 whose inputs are scaled by rows, or once for all.
    """
    method = str(quantization.get("quant_method", "")).lower()
    if method in _FOUR_BITS:
        return "marlin"
    if method in ("fp8", "fbgemm_fp8"):
        by_rows = method == "fbgemm_fp8" or quantization.get("weight_block_size")
        return fp8 if by_rows or quantization.get("activation_scheme") == "static" else "marlin"
    if method.startswith("modelopt"):
        algorithm = _algorithm_of_experts(quantization)
        return "marlin" if "NVFP4" in algorithm else fp8 if algorithm.startswith("FP8") else None
    if method == "compressed-tensors":
        form, groups = quantization.get("format"), _table(quantization.get("config_groups"))
        tables = [_table(group) for group in groups.values()]
        named = [table for table in tables if _EXPERTS.search(str(table.get("targets")))]
        choices = {_of_group(table, str(form), fp8) for table in named or tables}
        return choices.pop() if len(choices) == 1 else None
    return None


def _leaves_experts(quantization: Mapping[str, Any]) -> bool:
    """Whether the experts of some layers stay as they were, layers of draft tokens aside."""
    lists = (quantization.get(key) for key in _LEFT)
    left = [str(name) for names in lists if isinstance(names, Sequence) for name in names]
    return any(_EXPERTS.search(name) and "mtp" not in name for name in left)


def _algorithm_of_experts(quantization: Mapping[str, Any]) -> str:
    """ModelOpt's name for how the routed experts are quantised; of several, none."""
    algorithm = str(quantization.get("quant_algo", "")).upper()
    if algorithm != "MIXED_PRECISION":
        return algorithm
    layers = _table(quantization.get("quantized_layers"))
    of_experts = {
        str(_table(how).get("quant_algo", "")).upper()
        for name, how in layers.items()
        if _EXPERTS.search(str(name))
    }
    return of_experts.pop() if len(of_experts) == 1 else ""


def _of_group(group: Mapping[str, Any], form: str, fp8: str) -> str | None:
    """`moe_backend` of one group of compressed-tensors."""
    weights, inputs = _table(group.get("weights")), group.get("input_activations")
    bits, floats = weights.get("num_bits"), weights.get("type") == "float"
    if "mxfp8" in str(group.get("format") or form):
        return None
    if bits == 4:
        # Integers with quantized inputs have kernels of their own.
        return "marlin" if floats or inputs is None else None
    if bits == 8 and floats:
        whole_batch = _table(inputs).get("dynamic") is True and _table(inputs).get("strategy") == "tensor"
        return "marlin" if inputs is None or whole_batch else fp8
    if bits == 8:
        return "marlin" if inputs is None else "triton"
    return None


def _table(value: object) -> Mapping[str, Any]:
    """`value` where it is a table; vLLM says what is wrong with others."""
    return value if isinstance(value, Mapping) else {}
