"""Test the writer and the reader of safetensors files, compared with the safetensors library."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.core.weights.safetensors_format import CODES, DTYPES, order_widest_first, read_header, write_file
from headway.core.weights.tensor_bytes import TensorSpec, is_bit_identical
from headway.errors import CheckpointError


def make_specs(tensors):
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def read_file_header(path):
    with open(path, "rb", buffering=0) as file:
        return read_header(file, path)


def make_tensor(dtype):
    return torch.arange(6, dtype=torch.float32).reshape(2, 3).to(dtype)


TENSORS = {
    "flag": make_tensor(torch.bool), "half": make_tensor(torch.bfloat16), "none": torch.empty(0, 3), "one": torch.ones(()),
    "wide": make_tensor(torch.float64), "turned": make_tensor(torch.float32).t(), "é": make_tensor(torch.int16),
}  # fmt: skip


def test_safetensors_library_reads_every_dtype(tmp_path):
    tensors = {
        code: make_tensor(dtype) if code != "F8_E8M0" else torch.ones(6, dtype=dtype) for code, dtype in DTYPES.items()
    }
    write_file(tmp_path / "f", make_specs(tensors), tensors.items())
    read = load_file(tmp_path / "f")
    assert all(is_bit_identical(read[name], tensor) for name, tensor in tensors.items())
    assert {CODES[tensor.dtype] for tensor in read.values()} == set(DTYPES)


def test_values_in_any_order_are_written_in_the_order_of_the_specs(tmp_path):
    specs = order_widest_first(make_specs(TENSORS))
    write_file(tmp_path / "f", specs, reversed(TENSORS.items()), {"whose": "mine"})
    tensors, metadata = read_file_header(tmp_path / "f")
    assert list(tensors) == list(specs)
    assert metadata == {"format": "pt", "whose": "mine"}
    assert all(start % spec.dtype.itemsize == 0 for spec, start in tensors.values())
    read = load_file(tmp_path / "f")
    assert all(is_bit_identical(read[name], tensor) for name, tensor in TENSORS.items())


def test_files_of_the_safetensors_library_are_read(tmp_path):
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "f", {"a": "b"})
    tensors, metadata = read_file_header(tmp_path / "f")
    assert {name: spec for name, (spec, _) in tensors.items()} == make_specs(TENSORS)
    assert metadata == {"a": "b"}


@pytest.mark.parametrize(("values", "said"), [
    ([], "no values were passed for a"), ([("a", torch.ones(3))], r"a is to be written as \[3\]"),
    ([("b", torch.ones(2))], "b is to be written as"),
    ([("a", torch.ones(2).double())], "a is to be written as .*float64"),
])  # fmt: skip
def test_values_that_differ_from_the_specs_are_refused(tmp_path, values, said):
    with pytest.raises(CheckpointError, match=said):
        write_file(tmp_path / "f", {"a": TensorSpec((2,), torch.float32)}, values)


@pytest.mark.parametrize(("name", "dtype", "said"), [
    ("a", torch.complex128, "a is of torch.complex128, which the safetensors format does not have"),
    ("\ud800", torch.float32, "which UTF-8 does not have"),
])  # fmt: skip
def test_unsupported_dtype_and_name_are_refused(tmp_path, name, dtype, said):
    with pytest.raises(CheckpointError, match=said):
        write_file(tmp_path / "f", {name: TensorSpec((2,), dtype)}, [(name, torch.ones(2, dtype=dtype))])


@pytest.mark.parametrize("entry", [
    {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}, {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [2**62, 0], "data_offsets": [0, 0]}, {"dtype": [], "shape": 1}, None, [],
])  # fmt: skip
def test_invalid_header_is_refused(tmp_path, entry):
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "f").write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    with pytest.raises(CheckpointError, match=str(tmp_path / "f")):
        read_file_header(tmp_path / "f")


def test_full_disk_is_an_os_error():
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_file(Path("/dev/full"), {"a": TensorSpec((2,), torch.float32)}, [("a", torch.ones(2))])
