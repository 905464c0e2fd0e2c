"""What the pager uses of vLLM's expert kernels. A release that changes one of them fails here, by name."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_static_scales_of_inputs_are_the_largest() -> None:
    """What `vvllm_pager.loading` gives every expert before vLLM sees some of them."""
    import torch
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    some, others = torch.tensor([1.0, 4.0, 2.0]), torch.tensor([[8.0, 1.0], [2.0, 16.0]])
    shared = fp8_utils.process_fp8_input_tensor_strategy_moe(some, others, False)
    assert [float(scale) for scale in shared] == [4.0, 16.0]


def test_static_scales_of_nvfp4s_inputs_are_those_of_the_largest() -> None:
    """The same for NVFP4 by Triton, whose compressed-tensors scales are divisors: there the largest is the least."""
    import torch
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as compressed,
    )

    source = inspect.getsource(nvfp4.convert_to_nvfp4_moe_kernel_format)
    assert "a13_scale = 1.0 / a13_scale.max().to(torch.float32)" in source
    method = compressed.CompressedTensorsW4A4Nvfp4MoEMethod
    source = inspect.getsource(method.process_weights_after_loading)
    assert "a13_scale=(1.0 / layer.w13_input_global_scale)" in source
    # The divisor itself is read no more, see `bundle.unread_parameters`.
    assert "w13_scale_2=(1.0 / w13_weight_global_scale)" in source
    assert "global_scale" not in inspect.getsource(method.apply)
    divisors = torch.rand(1000) * 1000
    assert 1.0 / (1.0 / divisors).max() == 1.0 / (1.0 / divisors.min())


def test_no_kernel_reads_the_shapes_of_packed_weights() -> None:
    """Which `bundle.unread_parameters` leaves out."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as compressed,
    )

    method = compressed.CompressedTensorsWNA16MoEMethod
    assert "weight_shape" in inspect.getsource(method.create_weights)
    assert "weight_shape" not in inspect.getsource(method.apply)


def test_nvfp4_by_triton() -> None:
    """What `SlotNvfp4Triton` and `stock_launch` take of it: no naive alignment, no shape of blocks, the same sum."""
    from vllm.model_executor.layers.fused_moe.experts import nvfp4_emulation_moe

    experts = nvfp4_emulation_moe.Nvfp4QuantizationEmulationTritonExperts
    source = inspect.getsource(experts.apply)
    assert "moe_align_block_size(\n            topk_ids,\n            config" in source
    assert "_prepare_expert_assignment" not in source
    assert "num_tokens,\n            block_shape=None," in source
    assert source.count("A_scale=self.quant_config.a") == 2  # static scales, set when it was made
    assert "self.moe_sum(intermediate_cache3, output)" in source


def test_the_kernel_adapter() -> None:
    """What `vvllm_pager.kernel` asks of vLLM to compute on slots as stock does on experts."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel

    assert parameters(_custom_ops.moe_sum)[:2] == ["input", "output"]
    assert isinstance(FusedMoEKernel.fused_experts, property)
    assert parameters(FusedMoEQuantConfig.config_name) == ["self", "dtype"]
    assert isinstance(TritonExperts.block_shape, property)
    assert "try_get_optimal_moe_config(" in inspect.getsource(TritonExperts.apply)
    assert "self.moe_sum(intermediate_cache3, output" in inspect.getsource(TritonExperts.apply)


def test_triton_aligns_by_a_function_of_its_module() -> None:
    """Which `vvllm_pager.kernel` calls in its place, with stock's number of experts where stock aligns nothing."""
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    prepare = triton_moe._prepare_expert_assignment
    first = ["topk_ids", "config", "num_tokens", "top_k_num", "global_num_experts", "expert_map"]
    assert parameters(prepare)[:6] == first
    assert "num_tokens * top_k_num * 4 <= global_num_experts" in inspect.getsource(prepare)
    source = inspect.getsource(triton_moe.TritonExperts.apply)
    assert "_prepare_expert_assignment(\n                topk_ids,\n                config,\n" in source


def test_triton_and_marlin_add_up_by_their_own_method() -> None:
    """`vvllm_pager.kernel` replaces it, to add once all rounds are there."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    for experts, call in ((TritonExperts, "self.moe_sum("), (MarlinExperts, "moe_sum=self.moe_sum")):
        assert parameters(experts.moe_sum) == ["self", "input", "output", "topk_ids", "expert_map"]
        assert call in inspect.getsource(experts.apply)
        assert "ops.moe_sum(input, output)" in inspect.getsource(experts.moe_sum)


def test_marlin_between_its_alignment_and_its_sum() -> None:
    """What `SlotMarlin.apply` takes the place of, and what it calls instead."""
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe

    assert parameters(marlin_moe.MarlinExperts.apply) == [
        *("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
        *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
        *("expert_tokens_meta", "apply_router_weight_on_input"),
    ]
    assert parameters(marlin_moe._fused_marlin_moe) == [
        *("hidden_states", "w1", "w2", "bias1", "bias2", "w1_scale", "w2_scale", "topk_weights"),
        *("num_topk", "quant_type", "apply_router_weight_on_input", "expert_map", "block_size_m"),
        *("sorted_token_ids", "expert_ids", "num_tokens_post_padded", "activation", "activation_func"),
        *("topk_ids", "input_global_scale1", "input_global_scale2", "global_scale1", "global_scale2"),
        *("w1_zeros", "w2_zeros", "workspace", "intermediate_cache13", "intermediate_cache2", "output"),
        *("input_dtype", "activation_config"),
    ]
    # Into it all rounds of a batch write, beside the memory that the first GEMM overwrites.
    between = " ".join(inspect.getsource(marlin_moe._fused_marlin_moe).split())
    assert "if output is None: output = intermediate_cache3" in between
    assert "output = ops.moe_wna16_marlin_gemm( intermediate_cache2, output," in between
    assert isinstance(marlin_moe.MarlinExpertsBase.quant_type_id, property)
    source = inspect.getsource(marlin_moe.MarlinExperts.apply)
    assert "intermediate_cache13=workspace2" in source
    assert "intermediate_cache2=workspace13" in source
    for name in ("w1_bias", "w2_bias", "w1_scale", "w2_scale", "g1_alphas", "g2_alphas", "a1_gscale"):
        assert f"=self.{name}," in source, name
    for name in ("a2_gscale", "w1_zp", "w2_zp", "activation", "activation_config", "input_dtype"):
        assert f"=self.{name}," in source, name


def test_the_blocks_of_marlin() -> None:
    """Their size, as `SlotMarlin.block_size`, and their room, as `Blocks.empty`."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    source = inspect.getsource(fused_marlin_moe)
    assert "for block_size_m in [8, 16, 32, 48, 64]:\n        if M * topk / E / block_size_m < 0.9:" in source
    assert "input_dtype.itemsize == 1:\n        block_size_m = max(block_size_m, 16)" in source
    assert "ignore_invalid_experts=True" in source
    assert parameters(moe_align_block_size)[:4] == ["topk_ids", "block_size", "num_experts", "expert_map"]
    assert "ignore_invalid_experts" in parameters(moe_align_block_size)
    source = "".join(inspect.getsource(moe_align_block_size).split())
    assert "max_num_tokens_padded=topk_ids.numel()+num_experts*(block_size-1)" in source
    assert (
        "iftopk_ids.numel()<num_experts:"
        "max_num_tokens_padded=min(topk_ids.numel()*block_size,max_num_tokens_padded)" in source
    )
    assert "max_num_m_blocks=triton.cdiv(max_num_tokens_padded,block_size)" in source


def test_the_widths_of_marlins_gemms() -> None:
    """What `SlotMarlin.widths` reads, and the paddings that it allows for."""
    from dataclasses import fields

    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    names = {f.name for f in fields(FusedMoEConfig)}
    assert {"activation", "hidden_dim", "intermediate_size_per_partition"} <= names
    assert isinstance(MoEActivation.is_gated, property)
    source = inspect.getsource(marlin_moe._fused_marlin_moe)
    assert "w13_num_shards = 2 if activation.is_gated else 1" in source
    assert "size_n=w13_num_shards * N" in source
    assert "size_n=K" in source
    text = inspect.getsource(marlin_utils_fp4)
    assert set(re.findall(r"padded_N = round_up\(N, (\d+)\)", text)) == {"64", "128"}
