"""Which files hold the weights, and which tensor is in which: what vLLM would read, made sure to be all there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from vvllm_msd.checkpoint.header import DOWNLOAD_AGAIN, Tensor, read_header
from vvllm_shared.errors import CheckpointError, UnsupportedError

JSON_BYTES = 100_000_000
"""Bound on any JSON file of a model; the largest, an index of a million tensors, is near it."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


class Stored(NamedTuple):
    """A tensor and the name of the file that holds it."""

    file: str
    tensor: Tensor


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: it cannot be read, is not JSON, or is not an object.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing.", _link_hint(path) or "Is this the model's directory?")
        if path.stat().st_size > JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {JSON_BYTES} bytes.", DOWNLOAD_AGAIN)
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.", f"See `ls -l {path}`.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON.", DOWNLOAD_AGAIN) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object.", DOWNLOAD_AGAIN)
    return found


def _link_hint(path: Path) -> str:
    """What to say of a link whose target is gone, as an interrupted download leaves it; else nothing."""
    if path.is_symlink() and not path.exists():
        return f"It is a link to {path.readlink()}, which is not there: finish or repeat the download."
    return ""


def read_tensors(directory: Path, warnings: list[str]) -> dict[str, Stored]:
    """Every tensor of the model in `directory`, by name.

    Args:
        warnings: gets a sentence for each file that is there but not read.

    Raises:
        CheckpointError: a file is missing or damaged, or index and files contradict each other.
        UnsupportedError: the weights are in another format than safetensors.
    """
    present = sorted(path.name for path in directory.iterdir() if path.name.endswith(".safetensors"))
    # vLLM prefers Mistral's own files where a directory holds both kinds.
    mistral = [name for name in present if name.startswith("consolidated")]
    index = directory / f"{'consolidated' if mistral else 'model'}.safetensors.index.json"
    if index.is_file() or index.is_symlink():
        return _read_indexed(directory, index, present, warnings)
    if not present:
        _refuse_other_formats(directory)
    files = mistral or present
    _check_numbering(directory, files)
    return _read_all(directory, files)


def _refuse_other_formats(directory: Path) -> None:
    other = sorted(path.name for path in directory.iterdir() if path.suffix in {*PICKLES, ".gguf"})
    if not other:
        raise CheckpointError(f"{directory} has no *.safetensors file.", "Is the download complete?")
    raise UnsupportedError(
        f"{directory} has its weights only as {other[0]}; they are read from safetensors alone.",
        "Take the safetensors variant of this model, or convert it. A pickle file (*.bin, *.pt) can run "
        "any code when it is opened, so it never is.",
    )


def _check_numbering(directory: Path, files: list[str]) -> None:
    """Without an index, `-00001-of-00003` in a name still says how many files there must be."""
    for match in filter(None, map(_NUMBERED.fullmatch, files)):
        count = int(match["count"])
        for number in range(1, count + 1):
            name = f"{match['stem']}-{number:05d}-of-{count:05d}.safetensors"
            if name not in files:
                raise CheckpointError(f"{directory} lacks {name}.", "Download the missing file.")


def _read_all(directory: Path, files: list[str]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, tensor in _read_shard(directory / file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is in two files of {directory}: {tensors[name].file} and {file}.",
                    "Remove the file that does not belong to this model.",
                )
            tensors[name] = Stored(file, tensor)
    return tensors


def _read_shard(path: Path) -> dict[str, Tensor]:
    if hint := _link_hint(path):
        raise CheckpointError(f"{path.name} is missing.", hint)
    return read_header(path)


def _read_indexed(directory: Path, index: Path, present: list[str], warnings: list[str]) -> dict[str, Stored]:
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values()))
    for file in files:
        if file not in present:
            raise CheckpointError(
                f"{index.name} names {file}, which is not in {directory}.", "Download the missing file."
            )
    tensors = _read_all(directory, files)
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(
                f"{index.name} says that {name} is in {file}, but it is not.", DOWNLOAD_AGAIN
            )
    for name, stored in tensors.items():
        if name not in weight_map:
            raise CheckpointError(
                f"{stored.file} holds {name}, which {index.name} does not name.", DOWNLOAD_AGAIN
            )
    warnings.extend(
        f"{name} is not read: {index.name} does not name it." for name in present if name not in files
    )
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{index} has no weight_map.", DOWNLOAD_AGAIN)
    for name, file in found.items():
        if not name.isprintable() or not _is_shard_name(file):
            raise CheckpointError(
                f"{index.name} puts {name!r} into {file!r}, which cannot be.", DOWNLOAD_AGAIN
            )
    return found


def _is_shard_name(file: object) -> bool:
    """The files lie beside the index: a path would lead out of the model's directory."""
    return isinstance(file, str) and file.isprintable() and "/" not in file and file.endswith(".safetensors")
