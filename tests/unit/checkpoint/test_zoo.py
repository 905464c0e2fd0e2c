"""The tiny models are whole, repeatable checkpoints; that vLLM runs them is shown by the engine tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import zoo
from vvllm_msd import demo_model


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_family_is_a_whole_checkpoint(family: str, zoo_model: Callable[[str], Path]) -> None:
    model = zoo_model(family)
    config = json.loads((model / "config.json").read_text())
    assert config["model_type"] == family
    assert config["dtype"] == "bfloat16"
    expected = {"model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert expected < set(digests(model))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (
        digests(zoo.make("qwen3_moe", tmp_path / name, seed=seed))
        for name, seed in [("a", 0), ("b", 0), ("c", 1)]
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_shards_hold_the_tensors_of_the_whole(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole = load_file(zoo.make("mixtral", tmp_path / "whole") / "model.safetensors")
    split = zoo.make("mixtral", tmp_path / "split", shards=3)
    weight_map = json.loads((split / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(path.name for path in split.glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    parts = {name: load_file(split / name) for name in files}
    assert {name: filename for filename in files for name in parts[filename]} == weight_map
    assert all(whole[name].equal(parts[filename][name]) for name, filename in weight_map.items())
    assert weight_map.keys() == whole.keys()


def test_the_tokenizer_reads_any_text_and_shows_any_id(zoo_model: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(zoo_model("qwen3_moe"))
    text = "Calculate 347 * 892 — Ärger, 日本語, 🙂\x00\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == demo_model.VOCABULARY
    assert all(tokenizer.decode([token]) for token in range(demo_model.VOCABULARY))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(prompt)[0] == 1


def test_the_demo_model_is_made_once_and_replaces_a_half_made_one(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "demo"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"half")
    assert demo_model.ensure(directory) == directory
    assert "random" in (directory / "README.md").read_text()
    made = (directory / "config.json").stat()
    assert demo_model.ensure(directory) == directory
    assert (directory / "config.json").stat() == made
    assert list(directory.parent.iterdir()) == [directory]
