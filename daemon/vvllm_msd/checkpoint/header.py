"""The header of one safetensors file, read as what it is: bytes from a stranger.

A file is 8 bytes with the header's length (little endian), the header (JSON: name to dtype, shape and offsets), and
the tensors' bytes, which the offsets must cover once and without holes.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from vvllm_shared.errors import CheckpointError

HEADER_BYTES = 100_000_000
"""The format's own limit for a header."""
DIMENSIONS = 16
_LENGTH_BYTES = 8

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "C64": 64,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}

DOWNLOAD_AGAIN = "Download this file again and compare its size and checksum with the source's."


class Tensor(NamedTuple):
    """One tensor as a header describes it; its bytes are those from `begin` to `end` after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size as stored."""
        return self.end - self.begin


def read_header(path: Path) -> dict[str, Tensor]:
    """Every tensor in the file at `path`; their names are printable.

    Raises:
        CheckpointError: the file cannot be read, is not safetensors, is truncated, or its header contradicts itself.
    """
    raw, data_bytes = _read(path)
    tensors = {name: _tensor(path, name, entry) for name, entry in _entries(path, raw)}
    _check_coverage(path, tensors, data_bytes)
    return tensors


def _refuse(path: Path, what: str, hint: str = DOWNLOAD_AGAIN) -> NoReturn:
    raise CheckpointError(f"{path.name} {what}.", hint)


def _read(path: Path) -> tuple[bytes, int]:
    """The header's bytes, and how many bytes follow it."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            return _read_open(path, file)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}", f"See `ls -l {path}`.")


def _open_without_waiting(path: str, flags: int) -> int:
    """A named pipe in a file's place must not hang us."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _read_open(path: Path, file: BinaryIO) -> tuple[bytes, int]:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        _refuse(path, "is not a regular file")
    rest = status.st_size - _LENGTH_BYTES
    if rest < 0:
        _refuse(path, f"is truncated: {status.st_size} bytes are no safetensors file")
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > HEADER_BYTES:
        _refuse(path, f"is no safetensors file: its header would be {length} bytes, over {HEADER_BYTES}")
    if length > rest:
        _refuse(path, f"is truncated: its header alone is {length} bytes, but {rest} are there")
    raw = file.read(length)
    if len(raw) != length:
        _refuse(path, "became shorter while it was read")
    return raw, rest - length


def _entries(path: Path, raw: bytes) -> list[tuple[str, Any]]:
    """The header's tensors, names checked, in file order."""
    if not raw.startswith(b"{"):
        _refuse(path, "has a damaged header: it does not begin with a JSON object")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except _DuplicateError as error:
        _refuse(path, f"has a damaged header: it names {error} twice")
    except (ValueError, RecursionError) as error:
        _refuse(path, f"has a damaged header: {type(error).__name__}, not JSON in UTF-8")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "has a damaged header: its __metadata__ is not a map of texts")
    for name in header:
        if not name or not name.isprintable():
            _refuse(path, f"has a damaged header: {name[:100]!r} is no name for a tensor")
    return list(header.items())


class _DuplicateError(Exception):
    """A JSON object with the same key twice."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        name, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _DuplicateError(repr(name[:100]))
    return entries


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _tensor(path: Path, name: str, entry: Any) -> Tensor:
    """One entry, checked against itself: shape x dtype must be what the offsets span."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"has a damaged header: {name} lacks dtype, shape or data_offsets, or has more")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(path, f"holds {name} in the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS or not all(map(_is_size, shape)):
        _refuse(path, f"has a damaged header: {name} has an impossible shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _refuse(path, f"has a damaged header: {name} has impossible offsets")
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        _refuse(
            path,
            f"has a damaged header: {name} is {dtype} {shape}, which takes {bits / 8:g} bytes, "
            f"but its offsets span {end - begin}",
        )
    return Tensor(dtype, tuple(shape), begin, end)


def _check_coverage(path: Path, tensors: dict[str, Tensor], data_bytes: int) -> None:
    """The tensors lie one after the other, from the first byte to the last."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            how = "overlaps the tensor before it" if tensor.begin < position else "leaves a hole before it"
            _refuse(path, f"has a damaged header: {name} {how} (it begins at {tensor.begin}, not {position})")
        position = tensor.end
    if position > data_bytes:
        _refuse(path, f"is truncated: its tensors take {position} bytes, but {data_bytes} are there")
    if position < data_bytes:
        _refuse(path, f"is damaged: {data_bytes - position} bytes follow its last tensor")
