"""Test the copies that a background save takes: this rank's part, from all devices, without waiting for them.

Devices are simulated by tensors that claim to be on one. Copies to the host run only when a thread waits for them.
"""

import threading
import time

import pytest
import torch

from headway.core.checkpoint.format.manifest import read_manifest
from headway.core.checkpoint.saving import writer
from headway.core.checkpoint.saving.background import BackgroundSave
from headway.core.checkpoint.saving.snapshot import HostCopies
from headway.core.checkpoint.state import CollectedState
from headway.core.runtime import pinned_memory
from headway.core.weights.tensor_bytes import get_raw_bytes
from tests.unit.core.checkpoint.reading import read_tensors
from tests.unit.core.checkpoint.saved import TENSORS, make_job


class Devices:
    """Simulated devices: queues of copies, and the devices and threads that waited."""

    def __init__(self):
        self.queues, self.waited, self.num_pinned = {}, [], 0

    def mark_position(self, device):
        return Arrival(self, device)

    def allocate(self, num_bytes):
        self.num_pinned += num_bytes
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def put_on_device(self, device, values, number):
        return OnDevice(values, self, torch.device(device, number))


class Arrival:
    """Point in the queue of a device. Waiting for it runs the queued copies."""

    def __init__(self, devices, device):
        self.devices, self.device = devices, device

    def wait(self):
        self.devices.waited.append((self.device, threading.current_thread().name))
        for act in self.devices.queues.pop(self.device, ()):
            act()


class OnDevice(torch.Tensor):
    """Tensor on a simulated device. It can be detached, and copied to the host later."""

    @staticmethod
    def __new__(cls, values, devices, device):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=device)

    def __init__(self, values, devices, device):
        self.values, self.devices = values, devices

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return OnDevice(args[0].values, args[0].devices, args[0].device)
        assert func is torch.ops.aten.copy_.default, func
        target, source = args[:2]
        assert kwargs == {"non_blocking": True} or args[2:] == (True,)
        source.devices.queues.setdefault(source.device, []).append(lambda: target.copy_(source.values))
        return target


def make_state(devices):
    """Return a state on two devices and the host."""
    return {
        "model/0/a": devices.put_on_device("cuda", torch.arange(300.0), 0),
        "model/0/b": devices.put_on_device("cuda", torch.ones(4, 5, dtype=torch.bfloat16), 1),
        "model/0/c": torch.arange(7),
        "model/0/d": devices.put_on_device("cuda", torch.tensor(3), 1),
    }


VALUES = {
    "model/0/a": torch.arange(300.0), "model/0/b": torch.ones(4, 5, dtype=torch.bfloat16), "model/0/c": torch.arange(7),
    "model/0/d": torch.tensor(3),
}  # fmt: skip


def test_writing_thread_waits_for_every_device(tmp_path):
    devices = Devices()
    taken = HostCopies(devices.mark_position, devices.allocate).copy_tensors(make_state(devices), VALUES)
    assert devices.waited == []
    made = make_job(tmp_path, content=CollectedState(taken.tensors), pending_copies=taken.pending_copies)
    writer.create_staging(made)
    writer.mark_as_writing(made)
    background = BackgroundSave()
    background.start(made)
    background.join()
    background.raise_error()
    assert devices.waited == [(torch.device("cuda", n), "headway-save") for n in (0, 1)]
    folder = tmp_path / "checkpoint_1"
    found = dict(read_tensors(folder, read_manifest(folder)))
    assert all(torch.equal(found[name], value) for name, value in VALUES.items())


def test_failure_of_a_device_fails_the_save(tmp_path):
    class Broken:
        def wait(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    made = make_job(tmp_path, pending_copies=(Broken(),))
    writer.create_staging(made)
    writer.mark_as_writing(made)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        writer.write_checkpoint(made)
    assert not list(made.staging.glob(".writing-*"))  # so other ranks do not wait for this part


def test_pinned_memory_is_one_arena_and_is_reused():
    devices = Devices()
    snapshot = HostCopies(devices.mark_position, devices.allocate)
    first = snapshot.copy_tensors(make_state(devices), VALUES)
    assert devices.num_pinned == 2048  # 1,200 + 40 + 8 bytes, each at a multiple of 256
    assert (
        len({first.tensors[name].untyped_storage().data_ptr() for name in ("model/0/a", "model/0/b", "model/0/d")}) == 1
    )
    second = snapshot.copy_tensors(make_state(devices), VALUES)
    assert devices.num_pinned == 2048
    assert all(second.tensors[name].data_ptr() == first.tensors[name].data_ptr() for name in VALUES)
    other = snapshot.copy_tensors({"model/0/a": devices.put_on_device("cuda", torch.ones(3), 0)}, {"model/0/a"})
    assert other.tensors["model/0/a"].shape == (3,)


def test_failed_pinning_causes_one_warning(caplog):
    def refuse(num_bytes):
        raise RuntimeError("CUDA error: out of memory")

    devices = Devices()
    taken = HostCopies(devices.mark_position, refuse).copy_tensors(make_state(devices), VALUES)
    for arrival in taken.pending_copies:
        arrival.wait()
    assert all(torch.equal(taken.tensors[name], value) for name, value in VALUES.items())
    (record,) = caplog.records
    assert "could not be pinned (CUDA error: out of memory)" in record.getMessage()


def test_host_memory_is_reused():
    snapshot = HostCopies()
    first = snapshot.copy_tensors(TENSORS, TENSORS).tensors
    source = {name: tensor.clone() for name, tensor in TENSORS.items()}
    source["model/0/a"] += 1
    second = snapshot.copy_tensors(source, TENSORS).tensors
    assert second["model/0/a"].data_ptr() == first["model/0/a"].data_ptr()
    assert torch.equal(second["model/0/a"], source["model/0/a"])


def test_each_rank_copies_its_own_part_and_the_manifest_has_all(tmp_path):
    made = [make_job(tmp_path, part=part, num_parts=3, is_committer=part == 0) for part in range(3)]
    names = [each.own_names for each in made]
    assert set().union(*names) == set(TENSORS)
    assert sum(map(len, names)) == len(TENSORS)
    assert make_job(tmp_path, part=None, num_parts=3).own_names == frozenset()
    taken = [HostCopies().copy_tensors(TENSORS, own).tensors for own in names]
    assert [{name for name, tensor in each.items() if not tensor.is_meta} for each in taken] == [
        set(own) for own in names
    ]
    ranks = [
        make_job(tmp_path, part=part, num_parts=3, is_committer=part == 0, tensors=tensors)
        for part, tensors in enumerate(taken)
    ]
    writer.create_staging(ranks[0])
    for each in ranks:
        writer.mark_as_writing(each)
    for each in reversed(ranks):
        writer.write_checkpoint(each)
    folder = tmp_path / "checkpoint_1"
    found = dict(read_tensors(folder, read_manifest(folder)))
    for name, value in TENSORS.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(get_raw_bytes(found[name]), get_raw_bytes(value)), name


def test_memory_pinned_in_advance_is_used_by_the_first_copies(monkeypatch):
    monkeypatch.setattr(pinned_memory, "MAX_ARENA_BYTES", 1024)
    devices = Devices()
    snapshot = HostCopies(devices.mark_position, devices.allocate)
    snapshot.start_pinning(2 * 1024 + 5)
    wait_until(lambda: devices.num_pinned == 2048)
    taken = snapshot.copy_tensors(make_state(devices), VALUES)
    assert devices.num_pinned == 2048 + 2048  # one tensor of 1,200 bytes has an arena of its own
    for arrival in taken.pending_copies:
        arrival.wait()
    assert all(torch.equal(taken.tensors[name], value) for name, value in VALUES.items())
    snapshot.start_pinning(1 << 20)  # has no effect, because memory exists
    assert devices.num_pinned == 4096


def test_copies_begin_while_later_memory_is_pinned(monkeypatch):
    monkeypatch.setattr(pinned_memory, "MAX_ARENA_BYTES", 1024)
    devices, may_go_on = Devices(), threading.Event()
    begun = []

    def allocate(num_bytes):
        if begun:
            assert may_go_on.wait(20)
        begun.append(num_bytes)
        return devices.allocate(num_bytes)

    def mark_position(device):
        return devices.mark_position(device)

    tensors = {f"model/0/{i}": devices.put_on_device("cuda", torch.full((256,), float(i)), 0) for i in range(4)}
    monkeypatch.setattr(pinned_memory, "choose_num_threads", lambda: 1)
    taking = threading.Thread(target=lambda: HostCopies(mark_position, allocate).copy_tensors(tensors, tensors))
    taking.start()
    try:
        wait_until(lambda: any(devices.queues.values()))
        assert len(begun) == 1
    finally:
        may_go_on.set()
        taking.join()
    assert begun == [1024] * 4


def wait_until(is_so):
    """Wait up to 20 s for a condition."""
    deadline = time.monotonic() + 20
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_so()
