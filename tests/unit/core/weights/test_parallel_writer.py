"""Test files written by several threads: bytes and hashes equal those of the serial writer, and errors leave no thread."""

import os
import threading
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash

from headway.core.weights import file_sinks, parallel_writer
from headway.core.weights.export import save_weights
from headway.core.weights.parallel_writer import ParallelWriter
from headway.core.weights.ranged_file import RANGE
from headway.core.weights.safetensors_format import write_file
from headway.core.weights.tensor_bytes import TensorSpec
from headway.errors import CheckpointError


class AssembledTensor:
    """Chunked tensor that counts how many assembled tensors are in memory."""

    in_memory = 0
    most = 0

    def __init__(self, tensor):
        self._tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def assemble(self):
        made = self._tensor.clone()
        AssembledTensor.in_memory += 1
        AssembledTensor.most = max(AssembledTensor.most, AssembledTensor.in_memory)
        weakref.finalize(made.untyped_storage(), AssembledTensor._free)
        return made

    @staticmethod
    def _free():
        AssembledTensor.in_memory -= 1


def make_tensors():
    """Return tensors of all types that together fill several ranges."""
    torch.manual_seed(0)
    large = torch.randn(3000, 1700)
    return {
        "large": large,
        "columns": torch.randn(1700, 3000).t(),
        "image": torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(50, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "one": large[5:6, 7],
        "half": torch.randn(9_000_001).bfloat16(),
        "bool": torch.rand(1000) < 0.5,
        **{f"small/{i}": torch.randn(i % 7, 5) for i in range(500)},
    }


def make_specs(tensors):
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def hash_pieces(data, piece):
    return [xxhash.xxh3_128(data[start : start + piece]).hexdigest() for start in range(0, len(data), piece)]


@pytest.mark.parametrize("num_threads", [0, 4])
@pytest.mark.parametrize("piece", [RANGE, RANGE // 4])
def test_file_equals_that_of_the_serial_writer(tmp_path, piece, num_threads):
    tensors = make_tensors()
    write_file(tmp_path / "serial", make_specs(tensors), tensors.items(), {"a": "b"})
    with ParallelWriter(num_threads) as writer:
        files = [
            writer.write(
                tmp_path / name, make_specs(tensors), tensors.items(), {"a": "b"}, piece=piece, syncs_to_disk=True
            )
            for name in ("one", "two")
        ]
    expected = (tmp_path / "serial").read_bytes()
    for file in files:
        assert file.path.read_bytes() == expected
        assert (file.num_bytes, file.digests) == (len(expected), hash_pieces(expected, piece))
    assert not [thread for thread in threading.enumerate() if thread.name == "headway-write"]


@pytest.mark.parametrize(("limit", "most", "num_threads"), [(30 * 2**20, 4, 4), (1, 3, 4), (1, 3, 0)])
def test_memory_for_assembled_tensors_is_limited(tmp_path, monkeypatch, limit, most, num_threads):
    monkeypatch.setattr(parallel_writer, "MAX_COPIES", limit)
    monkeypatch.setattr(AssembledTensor, "most", 0)
    tensors = {str(i): torch.full((5_000_000 if i % 2 else 100,), float(i)) for i in range(12)}  # 20 MB and 400 bytes
    with ParallelWriter(num_threads) as writer:
        writer.write(
            tmp_path / "f", make_specs(tensors), [(name, AssembledTensor(each)) for name, each in tensors.items()]
        )
    write_file(tmp_path / "serial", make_specs(tensors), tensors.items())
    assert (tmp_path / "f").read_bytes() == (tmp_path / "serial").read_bytes()
    assert AssembledTensor.in_memory == 0
    assert AssembledTensor.most <= most  # a small tensor can wait in a range that is not full


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "no values were passed for a"),
        ([("a", torch.ones(3))], r"a is to be written as \[3\]"),
        ([("b", torch.ones(2))], "b is to be written as"),
        ([("a", torch.ones(2)), ("a", torch.ones(2))], "a is to be written as"),
    ],
)
def test_values_that_differ_from_the_specs_are_refused(tmp_path, values, said):
    with pytest.raises(CheckpointError, match=said), ParallelWriter() as writer:
        writer.write(tmp_path / "f", {"a": TensorSpec((2,), torch.float32)}, values)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize(("num_elements", "num_threads"), [(2, 4), (20_000_000, 4), (2, 0), (20_000_000, 0)])
def test_error_in_a_thread_names_the_file_and_leaves_no_open_file(tmp_path, num_elements, num_threads):
    tensors = {"a": torch.ones(num_elements)}
    before = set(os.listdir("/proc/self/fd"))

    def write_all():
        with ParallelWriter(num_threads) as writer:
            for path in (tmp_path / "f", Path("/dev/full"), tmp_path / "g"):
                writer.write(path, make_specs(tensors), tensors.items())

    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_all()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "headway-write"]


def test_error_of_the_caller_ends_the_threads(tmp_path):
    tensors = {"a": torch.ones(20_000_000)}

    def write_and_interrupt():
        with ParallelWriter() as writer:
            writer.write(tmp_path / "f", make_specs(tensors), tensors.items())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_interrupt()
    assert not [thread for thread in threading.enumerate() if thread.name == "headway-write"]


@pytest.mark.parametrize("num_bytes", [1, 2**30])  # bytes from which several threads write
def test_weights_changed_by_the_disk_replace_no_file(tmp_path, monkeypatch, num_bytes):
    monkeypatch.setattr(parallel_writer, "_MIN_THREADED_BYTES", num_bytes)
    tensors = {"a": torch.ones(5_000_000), "b": torch.ones(30)}
    save_weights(tensors.items(), tmp_path, "10GB")
    before = (tmp_path / "model.safetensors").read_bytes()
    _change_on_write(monkeypatch)
    with pytest.raises(CheckpointError, match="does not contain what was written"):
        save_weights([("a", torch.zeros(5_000_000))], tmp_path, "10GB")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model.safetensors": before}


def _change_on_write(monkeypatch):
    """Let the writer change the last byte of each file after writing it."""
    finish = file_sinks.DiskSink.finish

    def finish_and_change(sink):
        finish(sink)
        with open(sink._path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\1")

    monkeypatch.setattr(file_sinks.DiskSink, "finish", finish_and_change)


@pytest.mark.parametrize("num_bytes", [1, 2**30])
def test_sharded_weights_are_equal_from_one_and_several_threads(tmp_path, monkeypatch, num_bytes):
    monkeypatch.setattr(parallel_writer, "_MIN_THREADED_BYTES", num_bytes)
    torch.manual_seed(0)
    tensors = {f"layer.{i}": torch.randn(300, 200).t() for i in range(6)}
    files = save_weights(((name, AssembledTensor(each)) for name, each in tensors.items()), tmp_path / "a", 600_000)
    assert [file.name for file in files][-1] == "model.safetensors.index.json"
    assert len(files) == 4
    read = {name: each for file in files[:-1] for name, each in safetensors.torch.load_file(file).items()}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
