"""The names that the daemon gives to vLLM are names that this vLLM knows."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from vvllm_msd.config import Given, load
from vvllm_msd.engine_settings import FAMILIES, ModelFacts, engine_settings

pytestmark = pytest.mark.engine


def test_every_parser_of_the_table_is_one_of_vllms() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    reasoning, tools = ReasoningParserManager.list_registered(), ToolParserManager.list_registered()
    for family in FAMILIES.values():
        assert {name for _, name in family.reasoning} <= set(reasoning)
        assert {name for _, name in family.tools} <= set(tools)


def test_every_setting_is_an_option_of_vllms() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs

    given = [Given("model", "/m", "flag", "--model")]
    facts = ModelFacts("qwen3_moe", 128, 8, None, "<think> <tool_call>")
    known = {field.name for field in (*fields(AsyncEngineArgs), *fields(BaseFrontendArgs))}
    settings = engine_settings(load(given, env={}), facts)
    assert {*settings.options, *settings.on_gpu, "enforce_eager", "moe_backend"} <= known


def test_every_kernel_is_one_of_vllms() -> None:
    from vllm.config.kernel import MoEBackend

    assert {"triton", "marlin"} <= set(get_args(MoEBackend))
