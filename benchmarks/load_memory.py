"""VRAM and time of the whole path at a real model's shape: load through the daemon, one prompt, what it held when.

    python benchmarks/load_memory.py --layers 8 --slots 32 --json result.json

Writes a checkpoint of random weights in the shape of Qwen3-30B-A3B (its first layers), serves it with `vvllm-msd serve`
in a directory of its own, samples the GPU's memory with NVML the whole time, sends a prompt with `vvllm-client`, and
reads the engine's descriptors. It prints what was held at most while loading against what the slots, the dense weights
and the KV cache need: a ratio near 1 says that experts never lay in VRAM beyond their slots. Random weights say
nothing about quality.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shapes import SHAPES
from vram import Sampler

from vvllm_client import Client
from vvllm_shared.errors import VvllmError

MIB = 2**20
KV_BYTES = 1024 * MIB


def write_checkpoint(directory: Path, layers: int) -> None:
    """Random bf16 weights under the names of the real checkpoint, a file per layer."""
    import torch
    from safetensors.torch import save_file

    from vvllm_msd import demo_model

    directory.mkdir(parents=True)
    shape = SHAPES["qwen3-30b-a3b"].cut(layers)
    shape.write(directory, "bf16")
    demo_model.write_tokenizer(directory)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(torch.bfloat16).cpu()

    weight_map: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, directory / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    values, experts = shape.values, shape.experts
    hidden, wide, width = values["hidden_size"], values["moe_intermediate_size"], values["head_dim"]
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(layers):
        base = f"model.layers.{layer}"
        tensors = {
            f"{base}.input_layernorm.weight": ones.clone(),
            f"{base}.post_attention_layernorm.weight": ones.clone(),
            f"{base}.self_attn.q_proj.weight": random(heads * width, hidden),
            f"{base}.self_attn.k_proj.weight": random(kv_heads * width, hidden),
            f"{base}.self_attn.v_proj.weight": random(kv_heads * width, hidden),
            f"{base}.self_attn.o_proj.weight": random(hidden, heads * width),
            f"{base}.self_attn.q_norm.weight": torch.ones(width, dtype=torch.bfloat16),
            f"{base}.self_attn.k_norm.weight": torch.ones(width, dtype=torch.bfloat16),
            f"{base}.mlp.gate.weight": random(experts, hidden),
        }
        for expert in range(experts):
            tensors[f"{base}.mlp.experts.{expert}.gate_proj.weight"] = random(wide, hidden)
            tensors[f"{base}.mlp.experts.{expert}.up_proj.weight"] = random(wide, hidden)
            tensors[f"{base}.mlp.experts.{expert}.down_proj.weight"] = random(hidden, wide)
        save(f"model-{layer:05}.safetensors", tensors)
    ends = {
        "model.embed_tokens.weight": random(values["vocab_size"], hidden),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": random(values["vocab_size"], hidden),
    }
    save("model-ends.safetensors", ends)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@contextlib.contextmanager
def daemon(
    model: Path, runtime: Path, slots: int, log: Path, engine: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that serves `model`; `engine` are more lines of the configuration's `[engine]`."""
    config = runtime.with_suffix(".toml")
    config.write_text(f"[engine]\nkv_cache_memory_bytes = {KV_BYTES}\n{engine}")
    command = [sys.executable, "-m", "vvllm_msd", "serve", "--config", str(config), "--model", str(model)]
    environment = os.environ | {"VVLLM_RUNTIME_DIR": str(runtime)}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--slots", str(slots)], env=environment, stdout=sink, stderr=sink
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def status(runtime: Path) -> dict[str, Any]:
    try:
        return Client(runtime / "http.sock").status()
    except VvllmError:
        return {"stage": "absent"}


def descriptors(pid: int, runtime: Path) -> dict[str, Any]:
    """What the engine has open, and whether the daemon's listening socket or lock is among it."""
    listening = {
        line.split()[6]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if line.endswith("http.sock")
    }
    lock = (runtime / "private" / "lock").stat().st_ino
    targets = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            targets[int(entry.name)] = os.readlink(entry)
    ours = [
        t
        for t in targets.values()
        if t.removeprefix("socket:[").rstrip("]") in listening or t.endswith("/lock")
    ]
    return {
        "open": len(targets),
        "of_the_daemon": ours,
        "lock_inode": lock,
        "targets": sorted(set(targets.values())),
    }


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    model, runtime = scratch / "model", scratch / "run"
    began = time.monotonic()
    write_checkpoint(model, args.layers)
    written = time.monotonic() - began
    import torch

    torch.cuda.empty_cache()
    sampler = Sampler()
    began = time.monotonic()
    with daemon(model, runtime, args.slots, args.log) as process:
        state = status(runtime)
        while state["stage"] != "ready":
            assert process.poll() is None, args.log.read_text()[-4000:]
            time.sleep(0.5)
            state = status(runtime)
        ready = time.monotonic() - began
        load_peak, after = sampler.reset(), sampler.now()
        command = "import sys; from vvllm_client.cli import main; sys.exit(main())"
        options = [
            "--socket",
            str(runtime / "http.sock"),
            "--stats",
            "--temperature",
            "0",
            "--max-tokens",
            "64",
        ]
        answer = subprocess.run(
            [sys.executable, "-c", command, *options, "Calculate 347 * 892 step by step"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        serve_peak = sampler.reset()
        held = descriptors(state["engine_pid"], runtime)
        cache = status(runtime)["cache"]
    slot_bytes = cache["layers"] * cache["slots"] * cache["bundle_bytes"]
    expert_bytes = cache["layers"] * cache["experts"] * cache["bundle_bytes"]
    dense_bytes = sum(f.stat().st_size for f in model.glob("*.safetensors")) - expert_bytes
    needed = slot_bytes + dense_bytes + KV_BYTES
    return {
        "layers": args.layers,
        "slots": args.slots,
        "write_s": round(written, 1),
        "ready_s": round(ready, 1),
        "mib": {
            "experts_all": expert_bytes // MIB,
            "slots": slot_bytes // MIB,
            "dense": dense_bytes // MIB,
            "kv": KV_BYTES // MIB,
            "highest_while_loading": load_peak // MIB,
            "after_loading": after // MIB,
            "highest_while_serving": serve_peak // MIB,
        },
        "highest_while_loading_over_needed": round(load_peak / needed, 3),
        "highest_while_loading_over_stock": round(load_peak / (expert_bytes + dense_bytes + KV_BYTES), 3),
        "stats": answer.stderr.strip(),
        "cache": cache,
        "descriptors": held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--scratch", type=Path, default=Path.home())
    parser.add_argument("--log", type=Path, default=Path("load_memory.log"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vvllm-bench-", dir=args.scratch) as scratch:
        result = measure(args, Path(scratch))
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
