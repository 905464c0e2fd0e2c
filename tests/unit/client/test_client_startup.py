"""The client starts at once because it loads next to nothing; a fresh interpreter tells."""

from __future__ import annotations

import subprocess
import sys

import pytest

import vvllm_client

HEAVY = {"torch", "vllm", "msgspec", "structlog", "zmq", "numpy", "pydantic", "rich", "msgpack", "psutil"}
SLOW = {"asyncio", "http.client", "ssl", "email", "importlib.metadata", "logging"}
"""Of the standard library: each would be felt at every start."""


def loaded_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["cli", "control", "render", "sync_client"])
def test_what_a_command_does_not_load(module: str) -> None:
    loaded = loaded_after(f"import vvllm_client, vvllm_client.{module}")
    assert f"vvllm_client.{module}" in loaded
    assert not loaded & (HEAVY | SLOW)


def test_help_loads_no_client_either() -> None:
    loaded = loaded_after("import vvllm_client.cli, vvllm_client.control")
    assert not loaded & {"vvllm_client.sync_client", "socket", "dataclasses", "pathlib"}


def test_the_async_client_is_light_too() -> None:
    assert not loaded_after("import vvllm_client.async_client") & HEAVY


def test_every_exported_name_is_there() -> None:
    for name in vvllm_client.__all__:
        assert getattr(vvllm_client, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        _ = vvllm_client.Cleint
