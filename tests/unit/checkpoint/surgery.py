"""Open a safetensors file, change what is in it, and close it again: sound, or damaged on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, list[int], bytes]]
"""Name to dtype, shape and bytes."""


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data, unchecked."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, header: object, data: bytes) -> None:
    """Whatever header, whatever data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def tensors_of(path: Path) -> Tensors:
    header, data = read(path)
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def save(path: Path, tensors: Tensors) -> None:
    """A sound file of `tensors`."""
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    write(path, header, b"".join(data for _, _, data in tensors.values()))


def edit(path: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a file; it stays sound in itself."""
    tensors = tensors_of(path)
    change(tensors)
    save(path, tensors)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header alone."""
    header, data = read(path)
    change(header)
    write(path, header, data)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def drop(names: Iterable[str]) -> Callable[[Tensors], None]:
    """For `edit`: without these tensors."""

    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change
