"""What every test may use, and what no test may do: reach for the network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rare_families
import recording
import zoo
from zoo import ZooModel

# Before anything imports vLLM or transformers, and inherited by every process that a test starts.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests for a GPU skip themselves where there is none."""
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record",
        type=Path,
        metavar="FILE",
        help="note in FILE what was equal to stock, and what was refused",
    )


@pytest.fixture
def record_parity(request: pytest.FixtureRequest) -> recording.Record:
    """`record_parity(family, scheme, ...)` notes that a test's assertions held; see `recording.recorder`."""
    return recording.recorder(request.config.getoption("--record"))


@pytest.fixture(scope="session")
def rare_model(tmp_path_factory: pytest.TempPathFactory) -> ZooModel:
    """As `zoo_model`, for the families of `rare_families`."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = rare_families.make(family, tmp_path_factory.mktemp("rare") / family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def zoo_model(tmp_path_factory: pytest.TempPathFactory) -> ZooModel:
    """`zoo_model(family)` is that family's tiny model, made once a session: copy it before you change it."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = zoo.make(family, tmp_path_factory.mktemp("zoo") / family)
        return made[family]

    return get
