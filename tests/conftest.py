"""What every test may use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import zoo

ZooModel = Callable[[str], Path]


@pytest.fixture(scope="session")
def zoo_model(tmp_path_factory: pytest.TempPathFactory) -> ZooModel:
    """`zoo_model(family)` is that family's tiny model, made once a session: copy it before you change it."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = zoo.make(family, tmp_path_factory.mktemp("zoo") / family)
        return made[family]

    return get
