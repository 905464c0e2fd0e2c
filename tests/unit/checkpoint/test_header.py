"""A safetensors header is bytes from a stranger: read right, or refused by name, whatever they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import surgery
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from vvllm_msd.checkpoint.header import DTYPE_BITS, Tensor, read_header
from vvllm_shared.errors import CheckpointError

GOOD = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F4", "shape": [5, 2], "data_offsets": [12, 17]},
    "empty": {"dtype": "F32", "shape": [0, 7], "data_offsets": [17, 17]},
    "scalar": {"dtype": "I64", "shape": [], "data_offsets": [17, 25]},
}


def test_reads_what_the_format_allows(tmp_path: Path) -> None:
    surgery.write(tmp_path / "x.safetensors", json.dumps(GOOD).encode() + b"  \n ", b"\0" * 25)
    assert read_header(tmp_path / "x.safetensors") == {
        "a": Tensor("BF16", (2, 3), 0, 12),
        "b": Tensor("F4", (5, 2), 12, 17),
        "empty": Tensor("F32", (0, 7), 17, 17),
        "scalar": Tensor("I64", (), 17, 25),
    }


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    import numpy as np

    save_file({"x": np.zeros((3, 4), np.float16), "y": np.zeros(5, np.int8)}, tmp_path / "x.safetensors")
    found = read_header(tmp_path / "x.safetensors")
    assert {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in found.items()} == {
        "x": ("F16", (3, 4), 24),
        "y": ("I8", (5,), 5),
    }


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ([], "does not begin with a JSON object"),
        (b"", "does not begin with a JSON object"),
        (b'{"a": ', "JSONDecodeError, not JSON"),
        (b'{"a\xff": 1}', "UnicodeDecodeError"),
        (b'{"a":' * 200_000, "RecursionError"),
        (
            b'{"x":' + json.dumps(entry()).encode() + b',"x":' + json.dumps(entry()).encode() + b"}",
            "'x' twice",
        ),
        ({"x": entry(), "__metadata__": {"a": 1}}, "__metadata__"),
        ({"x": entry(), "__metadata__": ["a"]}, "__metadata__"),
        ({"": entry()}, "no name"),
        ({"a\x1b[2J": entry()}, r"'a\x1b[2J' is no name"),
        ({"\ud800": entry()}, r"'\ud800' is no name"),
        ({"x": 4}, "x lacks dtype"),
        ({"x": {"dtype": "U8", "shape": [4]}}, "x lacks dtype"),
        ({"x": entry(more=1)}, "x lacks dtype"),
        ({"x": entry(dtype="U9")}, "x in the unknown dtype 'U9'"),
        ({"x": entry(dtype=["U8"])}, "x in the unknown dtype"),
        ({"x": entry(shape=4)}, "x has an impossible shape"),
        ({"x": entry(shape=[-4])}, "x has an impossible shape"),
        ({"x": entry(shape=[4.0])}, "x has an impossible shape"),
        ({"x": entry(shape=[True, 4])}, "x has an impossible shape"),
        ({"x": entry(shape=[1 << 64])}, "x has an impossible shape"),
        ({"x": entry(shape=[1] * 17)}, "x has an impossible shape"),
        ({"x": entry(data_offsets=[0])}, "x has impossible offsets"),
        ({"x": entry(data_offsets=[-4, 0])}, "x has impossible offsets"),
        ({"x": entry(data_offsets=[0, 1 << 63])}, "x has impossible offsets"),
        ({"x": entry(data_offsets=[4, 0])}, "x is U8 [4], which takes 4 bytes, but its offsets span -4"),
        ({"x": entry(shape=[3])}, "x is U8 [3], which takes 3 bytes, but its offsets span 4"),
        ({"x": entry(dtype="F4", shape=[7])}, "takes 3.5 bytes"),
        ({"x": entry(), "y": entry(data_offsets=[2, 6])}, "y overlaps the tensor before it"),
        ({"x": entry(), "y": entry()}, "y overlaps the tensor before it"),
        ({"x": entry(data_offsets=[4, 8])}, "x leaves a hole before it"),
        (
            {"x": entry(), "y": entry(data_offsets=[4, 8])},
            "is truncated: its tensors take 8 bytes, but 4 are there",
        ),
        ({"x": entry(shape=[3], data_offsets=[0, 3])}, "1 bytes follow its last tensor"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: object, says: str) -> None:
    surgery.write(tmp_path / "x.safetensors", header, b"\0" * 4)
    with pytest.raises(CheckpointError) as caught:
        read_header(tmp_path / "x.safetensors")
    assert says in caught.value.sentence
    assert caught.value.sentence.startswith("x.safetensors ")
    assert caught.value.hint
    assert caught.value.sentence.isprintable()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is truncated: 0 bytes"),
        (b"1234567", "is truncated: 7 bytes"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "would be 100000001 bytes"),
        (b"\xff" * 8 + b"{}", "would be 18446744073709551615 bytes"),
        ((5000).to_bytes(8, "little") + b"{}", "its header alone is 5000 bytes, but 2 are there"),
    ],
)
def test_a_length_that_cannot_be_is_refused_before_it_is_read(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=says):
        read_header(tmp_path / "x.safetensors")


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, says in {
        "pipe": "pipe is not a regular file",
        "folder": "folder cannot be read: Is a directory",
        "none": "none cannot be read: No such file",
    }.items():
        with pytest.raises(CheckpointError, match=says):
            read_header(tmp_path / name)


sizes = st.integers(-2, 40) | st.integers() | st.booleans() | st.floats()
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(DTYPE_BITS)) | anything,
        "shape": st.lists(sizes, max_size=3) | anything,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | anything,
    }
)
headers = st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), entries | anything, max_size=4)
raw_headers = st.binary(max_size=200) | headers.map(lambda header: json.dumps(header).encode())
files = st.binary(max_size=200) | st.builds(
    lambda header, data: len(header).to_bytes(8, "little") + header + data,
    raw_headers,
    st.binary(max_size=50),
)


@settings(max_examples=400, deadline=None)
@given(raw=files)
def test_no_bytes_raise_anything_else(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(raw)
    try:
        tensors = read_header(path)
    except CheckpointError as error:
        assert error.sentence.isprintable()  # noqa: PT017 - nothing has to be raised
    else:
        assert 8 + sum(tensor.nbytes for tensor in tensors.values()) <= len(raw)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_good_file_raises_anything_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    header = json.dumps(GOOD).encode()
    raw = bytearray(len(header).to_bytes(8, "little") + header + b"\0" * 25)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        read_header(path)
    except CheckpointError as error:
        assert error.sentence.isprintable()  # noqa: PT017 - nothing has to be raised
