"""What the pager takes from vLLM 0.32.0 about warm-up, phases, four bits and the CPU's builds, by name and source."""

from __future__ import annotations

import inspect
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.engine


def source(module: str) -> str:
    """The text of a module that may not be importable without a GPU."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def test_the_workspace_is_locked_when_the_graphs_are_captured_and_after_all_warm_up() -> None:
    """`forward.is_warm_up` tells warm-up steps that look like requests by it."""
    from vllm.v1.worker.workspace import WorkspaceManager, current_workspace_manager, lock_workspace

    assert callable(current_workspace_manager)
    assert "current_workspace_manager().lock()" in inspect.getsource(lock_workspace)
    assert "return self._locked" in inspect.getsource(WorkspaceManager.is_locked)
    for runner in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        text = source(runner)
        capture = text[text.index("    def capture_model(") :]
        capture = capture[: capture.index("\n    def ", 10)]
        assert "lock_workspace()" in capture, runner
        assert text.count("lock_workspace()") == 1, f"{runner} locks it somewhere else too"
    worker = source("vllm.v1.worker.gpu_worker")
    warm_up = worker[worker.index("    def compile_or_warm_up_model(") :]
    assert warm_up.index("warmup_kernels(") < warm_up.index("self.model_runner.capture_model()")


def test_a_graph_mode_that_vllm_lowers_is_written_to_the_configuration() -> None:
    """`Paging.graphs` reads it there."""
    from vllm.config import CompilationConfig

    text = inspect.getsource(CompilationConfig.resolve_cudagraph_mode_and_sizes)
    assert "self.cudagraph_mode = cudagraph_mode" in text


def test_attention_metadata_tell_prefill_from_decode() -> None:
    """By one of the two fields that `forward.phase` asks for."""
    assert "max_query_len: int" in source("vllm.v1.attention.backends.flash_attn")
    for back_end in ("flashinfer", "gdn_attn", "mamba_attn"):
        assert "num_prefills: int" in source(f"vllm.v1.attention.backends.{back_end}"), back_end


def test_what_depends_on_the_chunk_in_nvfp4_is_undone_by_each_experts_own_scale() -> None:
    """`kernel.scales_by_chunk` lets it through for that."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import _nvfp4_compute_scale_factor

    text = source("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")
    assert "combined_scale_factor = _nvfp4_compute_scale_factor(scales, param_dtype)" in text
    assert "g_scales = g_scales / combined_scale_factor" in text
    for seed in range(20):
        scales = torch.rand(8, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (seed - 10)
        mantissa, _ = math.frexp(_nvfp4_compute_scale_factor(scales, torch.bfloat16))
        assert mantissa == 0.5, "a power of two, which changes no digit of what it multiplies"


def test_the_cpus_build_is_chosen_by_avx_512() -> None:
    """`cpu_waves._add_on_cpu` adds as the chosen build does."""
    text = source("vllm.platforms.cpu")
    choice = text[text.index("def import_kernels") :]
    order = [
        "torch.cpu._is_avx512_supported()",
        "import vllm._C  #",
        "import vllm._C_AVX512",
        "import vllm._C_AVX2",
    ]
    places = [choice.index(name) for name in order]
    assert places == sorted(places)
