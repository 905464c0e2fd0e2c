"""`vvllm-msd models` says what was recorded, and the README repeats it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import recording
from vvllm_msd import cli, models

README = Path(__file__).parents[3] / "README.md"
HERE = {"device": "cpu", "name": "a CPU", "vllm": "0.32.0", "date": "2026-12-01", "commit": "abc1234"}


def record(family: str, form: str, **more: Any) -> dict[str, Any]:
    return {"family": family, "format": form} | HERE | more


def state(records: list[dict[str, Any]], family: str, form: str) -> tuple[str, str]:
    (row,) = (row for row in models.rows(records) if (row.family, row.format) == (family, form))
    return row.state, row.detail


def test_a_state_is_what_was_recorded() -> None:
    equal = record("qwen3_moe", "awq", slots=[4, 8], experts=32)
    on_gpu = equal | {"device": "gpu", "name": "a GPU", "slots": [4]}
    refused = record("qwen3_moe", "gguf", refused="because")
    assert state([equal], "qwen3_moe", "awq") == (
        "verified on CPU",
        "4, 8 of 32 experts in slots; a CPU, 2026-12-01, abc1234",
    )
    assert state([equal, on_gpu], "qwen3_moe", "awq")[0] == "verified on GPU"
    assert state([refused], "qwen3_moe", "gguf") == ("refused", "because")
    assert state([equal, refused], "qwen3_moe", "gptq") == ("not verified", "")
    # Recorded and not on the list of what people want: told all the same.
    assert state([record("mixtral", "awq", slots=[2], experts=16)], "mixtral", "awq")[0] == "verified on CPU"


def test_what_is_recorded_has_a_name_here() -> None:
    records = models.read_records()
    assert records
    for one in records:
        assert one["family"] in models.FAMILIES
        assert one["format"] in models.FORMATS
        assert not one["commit"].endswith("-dirty"), "recorded with changes that no commit has"
        assert {"device", "name", "vllm", "date"} < one.keys()


def test_the_readme_shows_it() -> None:
    assert models.as_markdown(models.rows(models.read_records())) in README.read_text()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cli.main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(lines) == len(rows) >= len(set(models.WANTED))
    assert {row["state"] for row in rows} <= {"verified on GPU", "verified on CPU", "not verified", "refused"}


def test_a_record_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_here", lambda: dict(HERE))
    file = tmp_path / "parity.json"
    note = recording.recorder(file)
    note("qwen3_moe", "awq", slots=[4], experts=32)
    note("qwen3_moe", "awq", slots=[8], experts=32)
    note("olmoe", "awq", slots=[4], experts=32)
    found = json.loads(file.read_text())
    assert [(one["family"], one["slots"]) for one in found] == [("olmoe", [4]), ("qwen3_moe", [4, 8])]
    monkeypatch.setattr(recording, "_here", lambda: HERE | {"commit": "def5678"})
    note("qwen3_moe", "awq", slots=[12], experts=32)
    assert [one["slots"] for one in json.loads(file.read_text())] == [[4], [12]]


def test_without_a_file_nothing_is_noted() -> None:
    recording.recorder(None)("qwen3_moe", "awq", slots=[4], experts=32)
