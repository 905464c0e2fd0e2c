"""What the daemon uses of vLLM's front end, by name: a vLLM that changes one of them fails here first."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vvllm_msd import engine, engine_arguments
from vvllm_shared import PINNED_VLLM
from vvllm_shared.errors import ConfigError

pytestmark = pytest.mark.engine


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def spec(**user_options: Any) -> engine_arguments.EngineSpec:
    return engine_arguments.EngineSpec(
        Path("/models/tiny"),
        "tiny",
        {"slots": 8},
        "f",
        (0, 1),
        {"max_num_seqs": 4},
        {"cudagraph_capture_sizes": [1, 2, 4]},
        user_options,
    )


def test_the_installed_vllm_is_the_pinned_one() -> None:
    import vllm

    assert vllm.__version__.partition("+")[0] == PINNED_VLLM


def test_async_llm() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    assert {"vllm_config", "disable_log_stats"} <= parameters(AsyncLLM.from_vllm_config)
    assert {"method", "args"} <= parameters(AsyncLLM.collective_rpc)
    assert "timeout" in parameters(AsyncLLM.shutdown)
    assert isinstance(AsyncLLM.errored, property)
    assert inspect.iscoroutinefunction(AsyncLLM.get_supported_tasks)
    assert not inspect.iscoroutinefunction(AsyncLLM.get_num_unfinished_requests)


def test_async_llm_can_be_made_without_a_running_loop() -> None:
    """Made in a thread, it must leave its tasks to the first call from the loop."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    assert "except RuntimeError" in inspect.getsource(AsyncLLM.__init__)
    assert "except RuntimeError" in inspect.getsource(AsyncMPClient.__init__)
    assert "_run_output_handler()" in inspect.getsource(AsyncLLM.add_request)
    # Which `RunningEngine.stop` cancels.
    assert "self.output_handler: asyncio.Task | None = None" in inspect.getsource(AsyncLLM.__init__)


def test_the_openai_application() -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    assert list(inspect.signature(build_app).parameters) == ["args", "supported_tasks", "model_config"]
    assert list(inspect.signature(init_app_state).parameters) == [
        "engine_client",
        "state",
        "args",
        "supported_tasks",
    ]
    assert inspect.iscoroutinefunction(init_app_state)


async def test_a_dead_engine_is_latched_by_what_stands_in_for_the_server() -> None:
    from vllm.entrypoints.launchers.launcher import terminate_if_errored

    death = engine.DeathRecord()
    terminate_if_errored(server=death, engine=SimpleNamespace(errored=False, is_running=True))  # type: ignore[arg-type]
    assert not death.event.is_set()
    terminate_if_errored(server=death, engine=SimpleNamespace(errored=True, is_running=False))  # type: ignore[arg-type]
    assert death.event.is_set()
    death.record("a later cause")
    assert death.cause == "a request met a dead engine"


def test_options_are_split_between_engine_and_front_end() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    engine_options, app_options = engine_arguments.split_options(spec(dtype="bfloat16", chat_template="x"))
    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(engine_options) <= names
    assert engine_options["dtype"] == "bfloat16"
    assert engine_options["worker_extension_cls"] == engine_arguments.WORKER_EXTENSION
    assert engine_options["additional_config"] == {"expert_cache": {"slots": 8}}
    assert app_options == {"chat_template": "x"}


def test_each_platform_gets_what_is_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm import platforms

    assert engine_arguments.platform_options(spec()) == {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 30,
    }
    assert engine_arguments.platform_options(spec(enforce_eager=False, gpu_memory_utilization=0.5)) == {}
    (tmp_path / "config.json").write_text("{}")
    on_gpu = dataclasses.replace(spec(), model=tmp_path)
    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, supports_fp8=lambda: False)
    monkeypatch.setattr(platforms, "_current_platform", gpu)
    sizes = {"cudagraph_capture_sizes": [1, 2, 4]}
    assert engine_arguments.platform_options(on_gpu) == sizes | {"moe_backend": "triton"}
    mine = dataclasses.replace(on_gpu, user_options={"moe_backend": "auto"})
    assert engine_arguments.platform_options(mine) == sizes
    by_table = dataclasses.replace(on_gpu, user_options={"kernel_config": {"moe_backend": "marlin"}})
    assert engine_arguments.platform_options(by_table) == sizes
    engine_options, _ = engine_arguments.split_options(mine)
    assert (engine_options["moe_backend"], engine_options["cudagraph_capture_sizes"]) == ("auto", [1, 2, 4])
    assert "enforce_eager" not in engine_options


def test_the_front_end_s_arguments_are_complete() -> None:
    config = SimpleNamespace(structured_outputs_config=SimpleNamespace(reasoning_parser="qwen3"))
    options = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    args = engine_arguments.app_args(options, config)
    assert args.tool_call_parser == "hermes"
    assert args.disable_fastapi_docs is True
    assert args.structured_outputs_config.reasoning_parser == "qwen3"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"no_such_option": 1}, "no_such_option"),
        ({"model": "other"}, "model"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"port": 8000}, "port"),
        ({"additional_config": {"expert_cache": {"slots": 3}}}, "cache.slots"),
    ],
)
def test_options_that_cannot_count_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as refusal:
        engine_arguments.split_options(spec(**options))
    assert refusal.value.hint


def test_the_environment_is_one_that_vllm_reads(tmp_path: Path) -> None:
    from vllm import envs

    environment: dict[str, str] = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    engine_arguments.set_environment(tmp_path, 7, environment)
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    of_vllm = {name for name in environment if name.startswith("VLLM_")}
    assert of_vllm <= set(envs.environment_variables)


def test_a_context_that_is_fitted() -> None:
    """-1 in `original_max_model_len` lets vLLM shorten the context to what the KV cache holds."""
    from vllm.v1.core import kv_cache_utils

    assert "original_max_model_len == -1" in inspect.getsource(kv_cache_utils.get_kv_cache_configs)
    assert "original_max = vllm_config.model_config.max_model_len" in inspect.getsource(
        kv_cache_utils._auto_fit_max_model_len
    )
