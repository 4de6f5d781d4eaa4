"""Test copies to devices by several threads. The host stands for a device here, and tests/gpu tests a real one."""

import threading

import pytest
import torch

from headway import Accelerator
from headway.core.checkpoint.loading import device_copies
from headway.core.checkpoint.loading.device_copies import copy_pairs, move_state


@pytest.fixture
def host_as_device(monkeypatch):
    """Treat the host as a device, and return a list of (thread, bytes) for each copied block."""
    copied = []
    real = device_copies.BlockCopier._copy_block

    def record_block(self, target, source):
        copied.append((threading.current_thread().name, source.numel()))
        real(self, target, source)

    monkeypatch.setattr(device_copies, "_has_own_memory", lambda device: True)
    monkeypatch.setattr(device_copies.BlockCopier, "_copy_block", record_block)
    return copied


def test_large_tensors_are_copied_in_blocks_and_others_one_by_one(host_as_device):
    torch.manual_seed(0)
    sources = [torch.randn(3_000_001), torch.randn(5), torch.randn(900, 800).t(), torch.randn(1 << 20).bfloat16()]
    targets = [torch.zeros_like(source) for source in sources[:3]] + [torch.zeros(1 << 20)]
    one_by_one = []
    copy_pairs(zip(targets, sources), lambda target, values: one_by_one.append(values.shape) or target.copy_(values))
    assert all(torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources))
    assert one_by_one == [(5,), (800, 900), (1 << 20,)]
    assert sorted(size for _, size in host_as_device) == sorted([4 * 2**20, 4 * 2**20, 12_000_004 - 8 * 2**20])
    assert {name for name, _ in host_as_device} == {"headway-copy"}
    assert not [thread for thread in threading.enumerate() if thread.name == "headway-copy"]


def test_error_in_a_thread_is_raised_and_ends_all_threads(host_as_device, monkeypatch):
    def fail(self, target, source):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device_copies.BlockCopier, "_copy_block", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        copy_pairs([(torch.zeros(1 << 20), torch.ones(1 << 20))], lambda target, values: None)
    assert not [thread for thread in threading.enumerate() if thread.name == "headway-copy"]


def test_only_large_plain_tensors_of_a_state_are_moved(host_as_device):
    large, step, view = torch.randn(1 << 19), torch.tensor(3.0), torch.randn(800, 900).t()
    state = {0: {"moment": large, "step": step, "view": view, "text": "x"}, 1: {"moment": large}, "loose": 3}
    move_state(state, {0: torch.device("cpu")})
    assert state[0]["moment"] is not large
    assert torch.equal(state[0]["moment"], large)
    assert state[0]["step"] is step
    assert state[0]["view"] is view
    assert state[1]["moment"] is large


def test_load_restores_weights_and_moments(host_as_device, tmp_path):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(700, 600)
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))

    accelerator, model, optimizer = build()
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 700)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(tmp_path / "a")
    other, twin, restored = build()
    other.load_state(tmp_path / "a")
    assert len(host_as_device) == 3  # the weight and its two moments
    assert torch.equal(twin.weight, model.weight)
    for one, two in zip(optimizer.optimizer.state.values(), restored.optimizer.state.values(), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
