"""What the pager uses of vLLM's insides. A release that changes one of them fails here, by name."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import engine_args

pytestmark = pytest.mark.engine


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_version_is_the_pinned_one() -> None:
    import vllm

    from vvllm_shared import PINNED_VLLM

    assert vllm.__version__ == PINNED_VLLM


def test_every_container_in_the_tree_is_replaced() -> None:
    """A subclass with a name of its own that we do not know would be built unpaged."""
    import ast
    from pathlib import Path

    import vllm

    from vvllm_pager.plugin import CONTAINERS

    root = Path(vllm.__file__).parent
    bases: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        text = file.read_text(errors="replace")
        if "RoutedExperts" in text and "amd" not in file.parts:  # AMD's platform is not supported
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    bases[node.name] = {ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases}
    found = {"RoutedExperts"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    assert found == {c.__name__ for c in CONTAINERS}


def test_replacement_is_by_class_name() -> None:
    from vllm.model_executor import custom_op
    from vllm.plugins import load_general_plugins

    from vvllm_pager.plugin import CONTAINERS
    from vvllm_pager.routed_experts import PagedExperts

    load_general_plugins()
    for container in CONTAINERS:
        assert issubclass(custom_op.op_registry_oot[container.__name__], (PagedExperts, container))


def test_whatever_writes_text_has_a_layer_that_can_be_replaced() -> None:
    """`vvllm_pager.dense_models` looks at the model when this layer is built."""
    from vllm.config import ModelConfig
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.plugins import load_general_plugins

    from vvllm_pager.dense_models import CheckedLogitsProcessor

    load_general_plugins()
    assert issubclass(LogitsProcessor, custom_op.PluggableLayer)
    assert custom_op.op_registry_oot["LogitsProcessor"] is CheckedLogitsProcessor
    assert "get_current_vllm_config()" in inspect.getsource(LogitsProcessor.__init__)
    assert isinstance(ModelConfig.is_moe, property)
    assert isinstance(ModelConfig.architecture, property)


def test_routed_experts() -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    assert parameters(RoutedExperts.forward_modular) == [
        *("self", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")
    ]
    assert parameters(RoutedExperts.weight_loader)[:6] == [
        *("self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id")
    ]
    assert RoutedExperts.weight_loader.supports_moe_loading
    source = inspect.getsource(RoutedExperts.__init__)
    for name in (
        "layer_name",
        "moe_config",
        "hidden_size",
        "global_num_experts",
        "local_num_experts",
        "top_k",
    ):
        assert f"self.{name} =" in source, name
    assert "quant_method.create_weights(layer=self" in source


def test_quant_methods() -> None:
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    assert parameters(FusedMoEMethodBase.create_weights) == [
        *("self", "layer", "num_experts", "hidden_size", "intermediate_size_per_partition"),
        *("params_dtype", "extra_weight_attrs"),
    ]
    source = inspect.getsource(FusedMoEMethodBase.__init__)
    assert "self.moe_quant_config" in source
    assert "self.moe_kernel" in source
    # A kernel that is there already would make the next processing an update, which skips the repacking.
    assert "is_weight_update = self.moe_kernel is not None" in inspect.getsource(
        UnquantizedFusedMoEMethod._setup_kernel
    )


def test_loading_calls_the_quant_method_once_per_module() -> None:
    from vllm.model_executor.model_loader import utils

    source = inspect.getsource(utils.process_weights_after_loading)
    assert "quant_method.process_weights_after_loading(module)" in source
    assert "quant_method.requires_device_loading" in source


def test_launch_configuration_can_be_overridden() -> None:
    from vllm.model_executor.layers.fused_moe import get_config, override_config
    from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

    assert parameters(try_get_optimal_moe_config) == [
        "w1_shape",
        "w2_shape",
        "top_k",
        "dtype",
        "M",
        "block_shape",
    ]
    with override_config({"BLOCK_SIZE_M": 16}):
        assert get_config() == {"BLOCK_SIZE_M": 16}
    assert get_config() is None


def test_forward_context_tells_warm_up_and_padding() -> None:
    from dataclasses import fields

    from vllm.forward_context import ForwardContext

    assert {"attn_metadata", "is_padding", "no_compile_layers"} <= {f.name for f in fields(ForwardContext)}


def test_what_a_batch_in_a_graph_is_known_by() -> None:
    from dataclasses import fields

    from vllm import envs
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.forward_context import ForwardContext

    assert {"is_padding", "cudagraph_runtime_mode"} <= {f.name for f in fields(ForwardContext)}
    assert CUDAGraphMode.FULL.name == "FULL"
    assert CUDAGraphMode.FULL_DECODE_ONLY.decode_mode() == CUDAGraphMode.FULL
    assert "VLLM_MOE_SKIP_PADDING" in envs.environment_variables
    names = {f.name for f in fields(CompilationConfig)}
    assert {"cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"} <= names


def test_the_configuration_that_is_refused() -> None:
    """Each option that `vvllm_pager.unverified` looks at is one of vLLM's."""
    from vllm.config import ModelConfig, VllmConfig

    config = VllmConfig()
    sizes = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
    )
    for name in (*sizes, "enable_expert_parallel", "enable_eplb", "enable_dbo"):
        assert hasattr(config.parallel_config, name), name
    assert config.offload_config.uva.cpu_offload_gb == 0
    assert config.offload_config.prefetch.offload_group_size == 0
    assert (config.lora_config, config.speculative_config) == (None, None)
    assert "enable_sleep_mode" in ModelConfig.__dataclass_fields__
    assert isinstance(config.compilation_config.static_forward_context, dict)
    assert config.scheduler_config.max_num_batched_tokens > 0


def test_triton_experts_say_how_activations_are_scaled() -> None:
    """`kernel._scales_whole_batch` is the condition of `TritonExperts.apply`."""
    import inspect

    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    for name in ("quant_dtype", "a2_scale", "block_shape", "per_act_token_quant"):
        assert isinstance(getattr(TritonExperts, name), property), name
    assert "self.quantization_emulation = False" in inspect.getsource(TritonExperts.__init__)
    source = " ".join(inspect.getsource(TritonExperts.apply).split())
    condition = (
        "a2_scale_is_global = ( self.quant_dtype is not None and a2_scale is None and self.block_shape is None "
        "and (not self.per_act_token_quant or self.quantization_emulation) )"
    )
    assert condition in source


def test_triton_calls_the_hooks_around_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton's own `_do_compile`, with a constant that is not JSON; only the compiler itself is a stand-in."""
    import os

    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import jit
    from vllm.utils import jit_monitor

    from vvllm_pager.compiles import report_compiles
    from vvllm_shared.board import Board

    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, name, None)
    monkeypatch.setattr(jit, "serialize_specialization_data", jit.serialize_specialization_data)
    board, fd = Board.create()
    os.close(fd)
    report_compiles(board, knobs.runtime, jit)
    heard: list[str] = []
    monkeypatch.setattr(jit_monitor, "HAS_TRITON", True)
    monkeypatch.setattr(jit_monitor, "_log_triton_jit_compile", lambda name, _kernel: heard.append(name))
    jit_monitor._setup_triton_jit_hook()  # vLLM's, after ours

    during: list[int] = []
    kernel = jit.JITFunction(_kernel)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    kernel.device_caches[0] = ({}, {}, target, backend, None)
    kernel.ASTSource = triton.compiler.ASTSource
    kernel.compile = lambda *_args, **_kwargs: during.append(board.get("compiling"))
    signature, constants = {"x": "*fp32", "n": "constexpr"}, {(1,): object()}
    options = backend.parse_options({"enable_fp_fusion": True})
    kernel._do_compile(("key", ("*fp32", "constexpr")), signature, 0, constants, options, {}, False)
    assert during == [1]
    assert heard == ["_kernel"]
    assert (board.get("compiling"), board.get("progress")) == (0, 2)


def _kernel(x: Any, n: Any) -> None:
    pass


def test_a_process_of_vllm_may_use_amx_before_its_first_prompt() -> None:
    """vLLM uses it without asking Linux, and would be killed: the plugin asks."""
    code = (
        "import ctypes, vvllm_pager; vvllm_pager.register()\n"
        "allowed = ctypes.c_ulong()\n"
        "ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(allowed))\n"  # arch_prctl, ARCH_GET_XCOMP_PERM
        "print(allowed.value >> 18 & 1)"  # XFEATURE_XTILEDATA
    )
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == "1"


def test_a_runner_holds_the_gate_that_a_guess_asks() -> None:
    """`vvllm_pager.foresight`: a plain matrix [E, H], and what is added to its scores beside it."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.models import deepseek_v2, glm4_moe

    assert "self.gate = gate" in inspect.getsource(MoERunner.__init__)
    assert issubclass(GateLinear, ReplicatedLinear)
    for model in (deepseek_v2, glm4_moe):
        assert "self.gate.e_score_correction_bias = nn.Parameter(" in inspect.getsource(model)


def test_the_gate_of_a_paged_layer_is_found_by_its_runner(zoo_model: Callable[[str], Path]) -> None:
    """In a real engine; on the CPU its weight is packed for oneDNN, so that only its size can be seen here."""
    from vvllm_msd.verify_engine import set_environment

    set_environment()  # before vLLM is imported: an engine in this process
    from vllm import LLM
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    from vvllm_pager.paging import _runners

    llm = LLM(
        model=str(zoo_model("qwen3_moe")),
        **engine_args(additional_config={"expert_cache": {"slots": 8}}),
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    found = list(_runners(runner.vllm_config))
    assert len(found) == 2
    for one in found:
        assert isinstance(one.gate, GateLinear)
        layer = one.routed_experts
        assert (one.gate.output_size, one.gate.input_size) == (layer.experts, layer.hidden_size)
        assert getattr(one.gate, "e_score_correction_bias", None) is None
