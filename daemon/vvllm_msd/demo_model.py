"""Small random Mixture-of-Experts models, written on the spot: the demo's own, and the tests'.

They have the files, names and layouts of real checkpoints, so that everything around the weights is the real
thing. The weights are drawn from a seed: **the text that such a model writes is random** and means nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

NOTICE = "a small model with random weights: its text is random"
"""What to tell whoever sees this model's text."""

VOCABULARY = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2: padding, start and end of a chat message."""
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Shown as text, as in real tokenizers; vLLM's reasoning and tool parsers look them up in the vocabulary."""
END_OF_TEXT, _, END_OF_MESSAGE = range(3)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# The tokenizer learns its words from these sentences.
CORPUS = """
The weights of this model are random, and so is every word that it writes. It is here to show how the experts
of a large model travel between main memory and the graphics card while an answer is being written. A router
picks a few experts for each token; those that are already in a slot are hits, the others are misses and are
loaded first. Calculate the product step by step: multiply, carry, add the partial results, then check the
answer once more. Hello, who are you and what can you do for me today? Tell me a short story about the sea,
the moon and a lighthouse. Nothing here was learned from books: those who want true sentences should give the
daemon a trained model.
"""

_COMPLETE = "config.json"  # written last


def ensure(directory: Path) -> Path:
    """The demo's model in `directory`: made there unless it is complete already.

    The same bytes each time, and without the network. Several processes may ask at once: each writes its own
    copy, and the first to finish puts it in place.

    Returns:
        `directory`.
    """
    if (directory / _COMPLETE).is_file():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        made = write(
            qwen3_moe_config(num_hidden_layers=4, num_experts=32, num_experts_per_tok=4),
            Path(scratch) / "model",
        )
        (made / "README.md").write_text(f"This is {NOTICE}.\n")
        _put_in_place(made, directory)
    return directory


def _put_in_place(made: Path, directory: Path) -> None:
    if directory.exists() and not (directory / _COMPLETE).is_file():
        shutil.rmtree(directory)
    try:
        os.rename(made, directory)
    except OSError:
        # Another process was faster, which is as good; anything else is a failure.
        if not (directory / _COMPLETE).is_file():
            raise


def qwen3_moe_config(**overrides: Any) -> PretrainedConfig:
    """A Qwen3-MoE of toy size."""
    from transformers import Qwen3MoeConfig

    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": 32768,
    }
    return Qwen3MoeConfig(**COMMON | shape | overrides)


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_MESSAGE,
    "pad_token_id": END_OF_TEXT,
    "tie_word_embeddings": False,
}
"""What every config here shares: it fits the tokenizer of `write_tokenizer`."""


def write(
    config: PretrainedConfig, directory: Path, *, dtype: str = "bfloat16", seed: int = 0, shards: int = 1
) -> Path:
    """Write a whole checkpoint of `config` with weights drawn from `seed`.

    Args:
        directory: made if missing; it is complete once it holds `config.json`.
        dtype: a torch dtype's name, of the weights as stored.
        shards: number of safetensors files; more than one come with an index.

    Returns:
        `directory`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    draw_weights(model.state_dict(), seed)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        with _without_progress_bar():
            model.save_pretrained(scratch)
        if shards > 1:
            _split(Path(scratch), shards)
        write_tokenizer(Path(scratch))
        for path in sorted(Path(scratch).iterdir(), key=lambda path: path.name == _COMPLETE):
            os.replace(path, directory / path.name)
    return directory


def draw_weights(tensors: dict[str, Tensor], seed: int) -> None:
    """Draw in place: matrices at about four times the usual spread, else every greedy token is the same.

    Vectors of zeros are drawn too: a bias that is lost on the way must change the output.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    for _, tensor in sorted(tensors.items()):
        if tensor.dim() > 1 or not tensor.any():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.08)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _split(directory: Path, shards: int) -> None:
    """Replace `model.safetensors` by `shards` files and their index, as large checkpoints are stored."""
    from safetensors.torch import load_file, save_file

    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        filename = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in mine}, directory / filename, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, filename)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    whole.unlink()


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer with a chat template: it encodes any text, and each of its ids is text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKER_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.split("\n"), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKER_TOKENS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[END_OF_TEXT],
        eos_token=SPECIAL_TOKENS[END_OF_MESSAGE],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1 << 20,
    ).save_pretrained(directory)
