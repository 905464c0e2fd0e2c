"""What the pager refuses inside vLLM, in one sentence that says what to do, before experts are loaded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity import SHORT, ask, engine_args

from vvllm_shared.errors import CheckpointError, ConfigError, UnsupportedError, VvllmError

pytestmark = pytest.mark.engine

needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="without AMX vLLM itself has no kernel for it"
)


@pytest.mark.parametrize(
    ("cache", "sentence", "hint"),
    [
        ({"slots": 4, "cache_gb": 1.0}, "both slots and cache_gb", "one size"),
        ({}, "neither slots nor cache_gb", "one size"),
        ({"slot": 4}, 'unknown option "slot"', 'Did you mean "slots"?'),
        ({"slots": "4"}, "slots is '4'", "whole number"),
        ({"slots": True}, "slots is True", "whole number"),
        ({"slots": 8, "pair_waves_above": None}, "pair_waves_above is None", "whole number"),
        ({1: 2}, 'unknown option "1"', "Known: cache_gb"),
        (32, "expert_cache is 32", "dictionary"),
        ({"slots": 993}, "slots is 993", "1 … 992"),
        ({"cache_gb": -1.0}, "cache_gb is -1.0", "GiB"),
        ({"slots": 3}, "3 slots a layer, but one token needs 4", "at least slots = 4"),
        ({"slots": 17}, "17 slots a layer, but the model has 16 experts", "at most slots = 16"),
        ({"cache_gb": 1e-5}, "0 slots a layer, but one token needs 4", "GiB"),
    ],
)
def test_sizes(cache: dict[Any, Any], sentence: str, hint: str, zoo_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError) as refusal:
        ask(zoo_model("qwen3_moe"), [[SHORT]], cache)
    assert sentence in refusal.value.sentence
    assert hint in refusal.value.hint


def test_the_least_size_that_a_refusal_names_is_enough(zoo_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError) as refusal:
        ask(zoo_model("qwen3_moe"), [[SHORT]], {"cache_gb": 1e-5})
    least = re.search(r"at least ([\d.]+) GiB", refusal.value.hint)
    assert least is not None
    ask(zoo_model("qwen3_moe"), [[SHORT]], {"cache_gb": float(least[1])})


@pytest.mark.parametrize(
    ("options", "sentence", "hint"),
    [
        ({"enable_lora": True}, "LoRA is on", "--enable-lora"),
        ({"enable_expert_parallel": True}, "expert parallelism is on", "--enable-expert-parallel"),
    ],
)
def test_engine_options(
    options: dict[str, Any], sentence: str, hint: str, zoo_model: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        ask(zoo_model("qwen3_moe"), [[SHORT]], {"slots": 4}, **options)
    assert sentence in refusal.value.sentence
    assert hint in refusal.value.hint


@pytest.mark.parametrize(
    "quantization",
    [
        "fp8",
        "fp8_per_tensor",
        "fp8_per_channel",
        pytest.param("fp8_per_block", marks=needs_amx),
        pytest.param("experts_int8", marks=needs_amx),
    ],
)
def test_quantising_while_loading(
    quantization: str, zoo_model: Callable[[str], Path], record_parity: Callable[..., None]
) -> None:
    with pytest.raises(UnsupportedError, match="quantises the experts while they are loaded") as refusal:
        ask(zoo_model("qwen3_moe"), [[SHORT]], {"slots": 4}, quantization=quantization)
    assert "quantised already" in refusal.value.hint
    reason = refusal.value.sentence.partition(": ")[2]
    record_parity("qwen3_moe", "online", refused=f"{quantization}: {reason}")


def test_activations_of_eight_bits_for_marlin(
    zoo_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, record_parity: Callable[..., None]
) -> None:
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    with pytest.raises(UnsupportedError, match="VLLM_MARLIN_INPUT_DTYPE is int8") as refusal:
        ask(zoo_model("qwen3_moe"), [[SHORT]], {"slots": 4})
    assert "Unset" in refusal.value.hint
    record_parity("qwen3_moe", "marlin_int8_activations", refused=refusal.value.sentence.partition(": ")[2])


@pytest.mark.parametrize(
    ("method", "fused", "sentence"),
    [
        ({"moe_kernel": None, "experts_cls": None}, 0, "has no kernel on this device"),
        ({"is_monolithic": True}, 0, "routes inside its kernel"),
        ({}, 1, "the shared expert is one of the routed experts"),
    ],
)
def test_layers_that_this_machine_cannot_build(method: dict[str, Any], fused: int, sentence: str) -> None:
    """Asked with what the rule looks at: no CPU has such kernels."""
    from vvllm_pager.unverified import refuse_layer

    told = {"uses_meta_device": False, "moe_kernel": object(), "is_monolithic": False} | method
    layer: Any = SimpleNamespace(
        layer_name="layers.0",
        quant_method=SimpleNamespace(**told),
        expert_map_manager=SimpleNamespace(num_fused_shared_experts=fused),
    )
    with pytest.raises(UnsupportedError, match=sentence):
        refuse_layer(layer)


def test_what_a_layer_is_asked_for_is_there() -> None:
    """The names that `refuse_layer` looks at, in vLLM's own classes."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

    assert not FusedMoEMethodBase.uses_meta_device
    assert OnlineMoEMethodBase.uses_meta_device
    assert isinstance(FusedMoEMethodBase.is_monolithic, property)
    assert "num_fused_shared_experts" in ExpertMapManager.__init__.__annotations__


def test_another_version_of_vllm(zoo_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.31.4")
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.31\.4 is installed") as refusal:
        ask(zoo_model("qwen3_moe"), [[SHORT]], {"slots": 4})
    assert "vllm==0.32.0" in refusal.value.hint


def engine_config(**cache: int) -> Any:
    """vLLM's own configuration of no model in particular."""
    from vllm.config import VllmConfig

    config = VllmConfig(additional_config={"expert_cache": cache})
    config.model_config = SimpleNamespace(enable_sleep_mode=False)
    return config


@pytest.mark.parametrize(
    ("part", "option", "value", "sentence", "hint"),
    [
        (
            "parallel_config",
            "tensor_parallel_size",
            2,
            "tensor_parallel_size is 2",
            "--tensor-parallel-size 1",
        ),
        (
            "parallel_config",
            "pipeline_parallel_size",
            2,
            "pipeline_parallel_size is 2",
            "--pipeline-parallel-size 1",
        ),
        ("parallel_config", "data_parallel_size", 2, "data_parallel_size is 2", "--data-parallel-size 1"),
        ("offload_config", "offload_backend", "prefetch", "prefetch offloading is on", "--offload-backend"),
        ("parallel_config", "enable_eplb", True, "load balancing is on", "--enable-eplb"),
        (
            "",
            "speculative_config",
            SimpleNamespace(method="mtp"),
            "speculative decoding by mtp is on",
            "--speculative-config",
        ),
    ],
)
def test_engines_that_this_machine_cannot_hold(
    part: str, option: str, value: Any, sentence: str, hint: str
) -> None:
    """Asked as the layers ask: vLLM's real configuration, the option set after its own checks."""
    from vvllm_pager.paging import Paging

    config = engine_config(slots=4)
    setattr(getattr(config, part) if part else config, option, value)
    with pytest.raises(UnsupportedError) as refusal:
        Paging(config)
    assert sentence in refusal.value.sentence
    assert hint in refusal.value.hint


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 without experts."""
    from transformers import Qwen3Config

    from vvllm_msd import demo_model

    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
    }
    return demo_model.write(
        Qwen3Config(**demo_model.COMMON | shape), tmp_path_factory.mktemp("dense") / "qwen3"
    )


def test_a_model_without_experts(dense_model: Path) -> None:
    """None of its layers is ours, and the setting would do nothing."""
    with pytest.raises(UnsupportedError, match="Qwen3ForCausalLM has no experts") as refusal:
        ask(dense_model, [[SHORT]], {"slots": 4})
    assert "Drop expert_cache" in refusal.value.hint


def test_a_model_without_experts_and_without_the_setting(dense_model: Path) -> None:
    from vllm import LLM
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from vvllm_msd.verify_engine import set_environment

    set_environment()
    llm = LLM(model=str(dense_model), **engine_args())
    assert llm.apply_model(lambda model: type(model.logits_processor) is LogitsProcessor) == [True]
    assert llm.generate([{"prompt_token_ids": SHORT}], use_tqdm=False)[0].outputs[0].token_ids


def test_what_a_model_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration decides, whichever is built first; a layer that is paged already overrules it."""
    from types import SimpleNamespace

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.plugins import load_general_plugins

    from vvllm_pager.paging import Paging

    load_general_plugins()
    config = VllmConfig(additional_config={"expert_cache": {"slots": 4}})
    config.model_config = SimpleNamespace(is_moe=True, architecture="NewForCausalLM", head_dtype=None)
    with set_current_vllm_config(config):
        assert type(LogitsProcessor(8)) is LogitsProcessor
        config.model_config.is_moe = False
        with pytest.raises(UnsupportedError, match="NewForCausalLM has no experts"):
            LogitsProcessor(8)
        monkeypatch.setattr(Paging, "find", lambda _config: object())
        assert type(LogitsProcessor(8)) is LogitsProcessor


def test_an_option_without_effect_on_a_gpu() -> None:
    from vvllm_pager.paging import Paging

    config = engine_config(slots=4, pair_waves_above=64)
    config.device_config.device_type = "cuda"
    with pytest.raises(ConfigError, match="no effect on a GPU") as refusal:
        Paging(config)
    assert refusal.value.hint == "Remove pair_waves_above."


def test_checkpoint_without_one_experts_tensor(zoo_model: Callable[[str], Path], tmp_path: Path) -> None:
    """vLLM itself counts parameters, not experts, and would serve whatever lies in memory."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(zoo_model("qwen3_moe"), tmp_path / "damaged")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts.* for expert 7") as refusal:
        ask(model, [[SHORT]], {"slots": 4})
    assert "download it again" in refusal.value.hint


def test_checkpoint_without_a_projection_of_a_whole_layer(
    zoo_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nothing of it arrives at that layer, so only the other layers tell that it should have."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(zoo_model("qwen3_moe"), tmp_path / "damaged")
    tensors = load_file(model / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not (".layers.1." in n and n.endswith("up_proj.weight"))}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts.* for expert 0 and 15 others"):
        ask(model, [[SHORT]], {"slots": 4})


def test_a_refusal_reaches_the_daemon_through_the_board(zoo_model: Callable[[str], Path]) -> None:
    import os

    from vvllm_shared import board

    shared, fd = board.Board.create()
    os.environ[board.ENV] = f"/proc/{os.getpid()}/fd/{fd}"
    try:
        with pytest.raises(VvllmError) as refusal:
            ask(zoo_model("qwen3_moe"), [[SHORT]], {"slots": 3})
        told = shared.refusal()
        assert type(told) is ConfigError
        assert (told.sentence, told.hint) == (refusal.value.sentence, refusal.value.hint)
    finally:
        del os.environ[board.ENV]
        os.close(fd)


def test_cache_gb_becomes_slots(zoo_model: Callable[[str], Path]) -> None:
    """Two layers of bundles of 12 KiB: 0.0002 GiB are 8 slots a layer, and the answers are stock's."""
    model = zoo_model("qwen3_moe")
    config = json.loads((model / "config.json").read_text())
    per_slot = config["num_hidden_layers"] * 3 * config["hidden_size"] * config["moe_intermediate_size"] * 2
    budget = 8.5 * per_slot / 2**30
    assert ask(model, [[SHORT]], {"cache_gb": budget}) == ask(model, [[SHORT]], None)
