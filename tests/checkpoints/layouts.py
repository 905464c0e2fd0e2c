"""Checkpoints with the names of those that people download, where `zoo` has only the language model's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vvllm_msd import demo_model

_HIDDEN, _WIDTH = 256, 128
EXPERTS, TOP_K = 32, 4


def qwen3_5_moe(directory: Path, *, fused: bool, extras: bool, seed: int = 0) -> Path:
    """Qwen3.5's and 3.6's: the language model behind `model.language_model.`, an untied head, and with `extras` the
    vision tower and a layer of draft tokens with experts of its own (`mtp.`), which text-only serving leaves unread.

    Args:
        fused: the experts of a layer as two stacks, as Qwen publishes them in bf16; else one by one, as the tools
            that quantise write them.

    Returns:
        `directory`.
    """
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    config = Qwen3_5MoeConfig(
        text_config=demo_model.COMMON | _QWEN_TEXT,
        vision_config=_QWEN_VISION,
        image_token_id=300,
        video_token_id=301,
        vision_start_token_id=302,
        vision_end_token_id=303,
    )
    torch.manual_seed(seed)  # some parameters are drawn by the model itself
    model = Qwen3_5MoeForConditionalGeneration(config).to(torch.bfloat16)
    demo_model.draw_weights(model.state_dict(), seed)
    tensors = _saved(model, directory)
    if extras:
        tensors |= _drafts(tensors)
    return _written(tensors, directory, fused, extras)


def gemma4(directory: Path, *, fused: bool, extras: bool, seed: int = 0) -> Path:
    """Gemma 4's: also behind `model.language_model.`, a dense MLP beside the experts of each layer, heads of another
    size in layers with full attention, whose keys are values too, and the embedding as head; `extras` is the vision
    tower.

    Args:
        fused: the experts of a layer as two stacks, as Google publishes them; else one by one, as NVFP4 is.

    Returns:
        `directory`.
    """
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    config = Gemma4Config(
        text_config=demo_model.COMMON | _GEMMA_TEXT,
        vision_config=_GEMMA_VISION,
        audio_config=None,
        tie_word_embeddings=True,
        image_token_id=300,
        boi_token_id=301,
        eoi_token_id=302,
    )
    torch.manual_seed(seed)
    model = Gemma4ForConditionalGeneration(config).to(torch.bfloat16)
    demo_model.draw_weights(model.state_dict(), seed)
    # Its square root times the embedding goes in: that would drown what the layers add, and each token repeat itself.
    model.get_input_embeddings().weight.data /= _HIDDEN**0.5
    return _written(_saved(model, directory), directory, fused, extras)


LAYOUTS = {"qwen3_5_moe": qwen3_5_moe, "gemma4": gemma4}
"""By family."""


def _saved(model: Any, directory: Path) -> dict[str, Tensor]:
    """Write the configuration and a tokenizer; what `_written` is to write of the weights, one expert by itself."""
    model.save_pretrained(directory)
    demo_model.write_tokenizer(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    return _apart(tensors)


def _written(tensors: dict[str, Tensor], directory: Path, fused: bool, extras: bool) -> Path:
    if not extras:
        tensors = {name: tensor for name, tensor in tensors.items() if not re.search("visual|vision", name)}
    file = "model-00001-of-00001.safetensors"
    save_file(_stacked(tensors) if fused else tensors, directory / file, metadata={"format": "pt"})
    return directory


_QWEN_TEXT: dict[str, Any] = {
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 4096,
    "mtp_num_hidden_layers": 1,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": _HIDDEN,
    "num_position_embeddings": 16,
}
_GEMMA_TEXT: dict[str, Any] = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": EXPERTS,
    "top_k_experts": TOP_K,
    "moe_intermediate_size": _WIDTH,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_GEMMA_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "position_embedding_size": 64,
}


def _drafts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A draft layer: a layer with full attention, and what joins a token's embedding to the hidden state."""
    layer = "model.language_model.layers.1."
    copies = {
        f"mtp.layers.0.{name.removeprefix(layer)}": t.clone() for name, t in tensors.items() if layer in name
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    copies |= {f"mtp.{norm}.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16) for norm in norms}
    return copies | {"mtp.fc.weight": torch.zeros(_HIDDEN, 2 * _HIDDEN, dtype=torch.bfloat16)}


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `_stacked`: so some of transformers' models are saved."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(?P<stem>.+\.experts)\.(?P<which>gate_up|down)_proj", name)
        if match is None:
            apart[name] = tensor
            continue
        projections = ("gate_proj", "up_proj") if match["which"] == "gate_up" else ("down_proj",)
        for e, matrix in enumerate(tensor):
            for projection, part in zip(projections, matrix.chunk(len(projections)), strict=True):
                apart[f"{match['stem']}.{e}.{projection}.weight"] = part.clone()
    return apart


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each layer's experts as `gate_up_proj` [E, 2 N, K] and `down_proj` [E, K, N]."""
    one = re.compile(r"(?P<stem>.+\.experts)\.0\.gate_proj\.weight")
    fused = {name: t for name, t in tensors.items() if not re.search(r"\.experts\.\d+\.", name)}
    for match in filter(None, map(one.fullmatch, tensors)):
        stem = match["stem"]

        def of(projection: str, stem: str = stem) -> Tensor:
            return torch.stack([tensors[f"{stem}.{e}.{projection}.weight"] for e in range(EXPERTS)])

        fused[f"{stem}.gate_up_proj"] = torch.cat([of("gate_proj"), of("up_proj")], dim=1)
        fused[f"{stem}.down_proj"] = of("down_proj")
    return fused
