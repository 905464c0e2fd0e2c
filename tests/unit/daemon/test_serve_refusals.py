"""`vvllm-msd serve` refuses a model or a size before an engine is started: one message, one exit code, no traceback."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zoo

ZooModel = Callable[[str], Path]
EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"


def without_a_shard(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()


def truncated(model: Path) -> None:
    shard = model / "model-00001-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)


def flipped_header(model: Path) -> None:
    with (model / "model-00001-of-00002.safetensors").open("r+b") as shard:
        shard.seek(9)
        byte = shard.read(1)[0]
        shard.seek(9)
        shard.write(bytes([byte ^ 0x80]))


def without_one_expert_tensor(model: Path) -> None:
    """From its shard and from the index, as a bad conversion leaves it."""
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = model / content["weight_map"].pop(EXPERT)
    index.write_text(json.dumps(content))
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    del header[EXPERT]
    packed, moved = b"", {}
    for name, entry in header.items():
        if name != "__metadata__":
            piece = data[slice(*entry["data_offsets"])]
            moved[name] = entry | {"data_offsets": [len(packed), len(packed) + len(piece)]}
            packed += piece
    text = json.dumps(moved).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + packed)


def not_an_moe(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    kept = {key: value for key, value in config.items() if "expert" not in key}
    (model / "config.json").write_text(
        json.dumps(kept | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.make("qwen3_moe", tmp_path_factory.mktemp("zoo") / "sharded", shards=2)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vv-") as directory:
        yield Path(directory)


def serve(runtime: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VVLLM_")}
    return subprocess.run(
        [sys.executable, "-m", "vvllm_msd", "serve", "--config", os.devnull, *map(str, arguments)],
        env=kept | {"VVLLM_RUNTIME_DIR": str(runtime / "run")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        (shutil.rmtree, 65, ["does not exist"]),
        (not_an_moe, 78, ["is not a Mixture-of-Experts model"]),
        (without_a_shard, 65, ["model-00002-of-00002.safetensors"]),
        (truncated, 65, ["model-00001-of-00002.safetensors", "bytes"]),
        (flipped_header, 65, ["model-00001-of-00002.safetensors", "header"]),
        (without_one_expert_tensor, 65, ["Layer 1 expert 7: up_proj.weight is missing"]),
    ],
)
def test_a_damaged_model(
    damage: Callable[[Path], object], code: int, says: list[str], sound: Path, tmp_path: Path, short_dir: Path
) -> None:
    model = Path(shutil.copytree(sound, tmp_path / "model"))
    damage(model)
    done = serve(short_dir, "--model", model, "--slots", 8)
    assert done.returncode == code, done.stderr
    assert all(part in done.stderr for part in says), done.stderr
    assert "Traceback" not in done.stderr
    assert not (short_dir / "run").exists(), "it was refused before anything was made"


@pytest.mark.parametrize(
    ("slots", "code", "says"),
    [(3, 78, "each token of this model needs 4 experts"), (17, 78, "has 16 experts per layer")],
)
def test_slots_that_cannot_work(slots: int, code: int, says: str, sound: Path, short_dir: Path) -> None:
    done = serve(short_dir, "--model", sound, "--slots", slots)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("size", "code", "says"),
    [
        ("0.00005", 78, "2 slots a layer, and each token of this model needs 4 experts"),
        # 12,288 bytes an expert and two layers: 8 slots.
        ("0.0002", 75, "three times the 4 experts"),
    ],
)
def test_a_cache_is_checked_by_its_slots(
    size: str, code: int, says: str, sound: Path, short_dir: Path
) -> None:
    """The second one goes on, up to a runtime directory that another daemon holds."""
    (short_dir / "run/private").mkdir(parents=True, mode=0o700)
    with (short_dir / "run/private/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = serve(short_dir, "--model", sound, "--cache-gb", size)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def grown(shard: Path, times: int) -> None:
    """Experts that are `times` as large, in a sparse file."""
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    position = 0
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            by = times if ".experts." in name else 1
            entry["shape"][-1] *= by
            entry["data_offsets"] = [position, position + (end - begin) * by]
            position += (end - begin) * by
    text = json.dumps(header).encode()
    with shard.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)


def test_experts_that_do_not_fit_into_memory(sound: Path, tmp_path: Path, short_dir: Path) -> None:
    model = Path(shutil.copytree(sound, tmp_path / "model"))
    for shard in model.glob("*.safetensors"):
        grown(shard, 4 << 20)
    done = serve(short_dir, "--model", model, "--slots", 8, "--json-log")
    assert done.returncode == 75, done.stderr
    assert "The model's experts take 1536.0 GiB of host memory" in done.stderr
    assert "GiB left" in done.stderr
    (event,) = (json.loads(line) for line in done.stderr.splitlines() if '"memory"' in line)
    assert event["experts_bytes"] == 1536 << 30 > event["available_bytes"] > 0
    assert not (short_dir / "run").exists()


def test_few_slots_are_warned_of(sound: Path, short_dir: Path) -> None:
    """The start goes on, up to a runtime directory that is a file."""
    (short_dir / "run").write_text("")
    done = serve(short_dir, "--model", sound, "--slots", 8)
    assert "less than three times the 4 experts of a token" in done.stderr
    assert done.returncode in (77, 78), done.stderr
