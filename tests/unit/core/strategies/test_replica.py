"""Test allocations and collectives of the gradient exchange. torch's fake backend stands for the other rank."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from headway.core.config.torch_kwargs import DistributedDataParallelKwargs
from headway.core.runtime import _torch, group
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.device import CPU
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.replica import ReplicaStrategy

LARGE = (128, 64, 8, 8)  # 2 MB


class Watch(TorchDispatchMode):
    """Mode that counts allocated bytes and records the collectives that are launched."""

    def __init__(self):
        super().__init__()
        self.allocated, self.launched = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if name.startswith("c10d."):
            self.launched.append(name.split(".")[1])
        elif isinstance(result, torch.Tensor) and not any(
            isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
            for each in args
        ):
            self.allocated += result.nbytes
        return result


@pytest.fixture
def collectives():
    """Collectives of two ranks on torch's fake backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield Collectives(ProcessRuntime(0, 2, 0, 2, CPU, torch.device("cpu"), owns_group=False))
    dist.destroy_process_group()


def make_parameters(*shapes, memory_format=torch.contiguous_format):
    found = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in found:
        of_images = parameter.ndim == 4
        parameter.grad = torch.randn_like(parameter).contiguous(
            memory_format=memory_format if of_images else torch.contiguous_format
        )
    return found


@pytest.mark.parametrize("has_gaps", [False, True])
def test_no_large_memory_is_allocated_after_the_vote(collectives, has_gaps):
    """Use gradients in channels_last, and one that no rank has. Both were once allocated during the exchange."""
    strategy = ReplicaStrategy(collectives, DistributedDataParallelKwargs())
    trained = make_parameters(LARGE, LARGE, (64,), memory_format=torch.channels_last)
    before = [parameter.grad.clone() for parameter in trained]
    if has_gaps:
        trained[1].grad = None
    assert strategy.prepare_reduction(trained) == has_gaps
    with Watch() as watch:
        strategy.reduce_gradients(trained, has_gaps)
    assert watch.allocated < 10_000
    assert torch.equal(trained[0].grad, before[0])  # the fake backend adds nothing
    assert trained[0].grad.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(trained[2].grad, before[2])
    assert (trained[1].grad is None) is has_gaps


def test_copies_are_freed_after_the_exchange(collectives):
    strategy = ReplicaStrategy(collectives, DistributedDataParallelKwargs())
    trained = make_parameters(LARGE, memory_format=torch.channels_last)
    for _ in range(2):
        strategy.prepare_reduction(trained)
        strategy.reduce_gradients(trained)
    ((_, buckets),) = [kept for kept in strategy._buckets.values() if kept[0]]
    assert buckets._copies == {}


def test_capable_backend_gets_all_large_tensors_in_one_launch(collectives, monkeypatch):
    """The fake backend, unlike NCCL, does not report this ability, so the function that asks is a stub."""
    strategy = ReplicaStrategy(collectives, DistributedDataParallelKwargs())
    trained = make_parameters(*[LARGE] * 6, (64,))
    counts = []
    for can in (False, True):
        monkeypatch.setattr(group, "can_coalesce", lambda group, device, can=can: can)
        strategy.prepare_reduction(trained)
        with Watch() as watch:
            strategy.reduce_gradients(trained)
        counts.append(watch.launched)
    assert counts == [["allreduce_"] * 7, ["allreduce_coalesced_"]]


def test_dtypes_are_launched_separately(collectives, monkeypatch):
    monkeypatch.setattr(group, "can_coalesce", lambda group, device: True)
    with Watch() as watch:
        collectives.sum_in_place([torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(4), torch.ones(0)])
    assert watch.launched == ["allreduce_coalesced_", "allreduce_"]


def test_broadcasts_are_coalesced(collectives, monkeypatch):
    monkeypatch.setattr(group, "can_coalesce", lambda group, device: True)
    began = []
    real = _torch.coalescing_manager
    monkeypatch.setattr(_torch, "coalescing_manager", lambda *args, **more: began.append(args) or real(*args, **more))
    with Watch() as watch:
        collectives.broadcast_in_place([torch.ones(3), torch.ones(4)])
    assert watch.launched == ["broadcast_"] * 2
    assert began == [(None, torch.device("cpu"))]


def test_gloo_cannot_coalesce(collectives):
    assert not group.can_coalesce(None, torch.device("cpu"))
