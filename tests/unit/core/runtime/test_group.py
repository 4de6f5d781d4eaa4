"""Test the backends of process groups. torch's fake backend replaces NCCL, which needs a GPU."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from headway.common.sealing import Seal, UnsealedCounter
from headway.core.config.torch_kwargs import DistributedDataParallelKwargs
from headway.core.runtime import group, process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.ending import ProcessExit, is_uncaught
from headway.core.strategies.ddp_hooks import check_communication_hook
from headway.errors import ConfigError, UnsupportedError

CUDA = torch.device("cuda", 1)


@pytest.fixture
def init_group():
    """Return a function that starts a group of one process with a backend, as a user's script may do."""

    from torch.testing._internal.distributed import fake_pg  # registers the backend

    assert fake_pg

    def init_one_process(backend):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    yield init_one_process
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("asked", "kind", "engines"),
    [
        ("nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("NCCL", "cuda", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo, cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("xccl", "xpu", "cpu:gloo,xpu:xccl"),
        ("gloo", "cuda", "gloo"),
        ("gloo", "mps", "gloo"),
        ("of_my_own", "cuda", "of_my_own"),  # torch checks other names
    ],
)
def test_cpu_tensors_always_have_a_backend(asked, kind, engines):
    assert group.complete_backend(asked, kind) == engines


def test_backend_for_another_device_is_refused():
    with pytest.raises(
        ConfigError, match=r"backend='nccl'\) carries tensors of cuda, but this process computes on cpu"
    ):
        group.complete_backend("nccl", "cpu")


def test_group_is_bound_to_the_device_of_its_backend():
    assert group.choose_bound_device(CUDA, "cpu:gloo,cuda:nccl") == CUDA
    assert group.choose_bound_device(CUDA, "gloo") is None
    assert group.choose_bound_device(torch.device("cpu"), "cpu:gloo,cuda:nccl") is None
    assert group.choose_bound_device(torch.device("mps"), "gloo") is None


def test_backends_are_found_by_device(init_group):
    init_group("cpu:gloo,cuda:fake")
    assert (group.find_backend(torch.device("cpu")), group.find_backend(CUDA)) == ("gloo", "fake")
    assert group.find_backend(torch.device("xpu", 0)) == ""
    assert group.has_blocking_backend()


def test_ending_a_gloo_group_never_waits(init_group):
    init_group("gloo")
    assert not group.has_blocking_backend()
    assert group.can_carry_cpu()


def test_bf16_hooks_need_a_backend_other_than_gloo(init_group):
    init_group("cpu:gloo,cuda:fake")
    for options in ({"comm_hook": "bf16"}, {"comm_hook": "power_sgd", "comm_wrapper": "bf16"}):
        hook = DistributedDataParallelKwargs(**options)
        check_communication_hook(hook, CUDA, dist.group.WORLD)
        with pytest.raises(UnsupportedError, match="on gloo use comm_hook='fp16'"):
            check_communication_hook(hook, torch.device("cpu"), dist.group.WORLD)


def test_group_started_by_the_script_gets_an_additional_gloo_group(init_group, monkeypatch):
    """Let torch report two ranks, because on one process no backend is checked."""
    init_group("cuda:fake")
    monkeypatch.setenv("LOCAL_RANK", "0")  # otherwise the local rank would be derived from the other rank's host
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(group, "create_cpu_group", lambda timeout: dist.new_group(ranks=[0], backend="gloo"))
    runtime = process.start(cpu=True)
    assert runtime.cpu_group is not None
    assert not group.can_carry_cpu()
    collectives = Collectives(runtime)
    assert collectives.get_group(torch.ones(1)) is runtime.cpu_group
    assert collectives.get_group(torch.ones(1, device="meta")) is None
    process.reset()
    assert dist.is_initialized()  # the script's own group stays
    assert runtime.cpu_group not in dist.distributed_c10d._world.pg_map


def test_no_group_is_added_if_the_default_one_carries_cpu_tensors(init_group):
    init_group("cpu:gloo,cuda:fake")
    assert group.create_cpu_group(timedelta(seconds=5)) is None


def seal_store(store):
    return SealedStore(store, "group", Seal(b"", UnsealedCounter(print)))


def test_ranks_end_a_group_together_or_not_at_all():
    store = seal_store(dist.HashStore())
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(group.wait_for_all_to_end, store, rank, 2, timedelta(seconds=30)) for rank in range(2)]
        assert [each.result() for each in asked] == [True, True]
    store = seal_store(dist.HashStore())
    assert not group.wait_for_all_to_end(store, 0, 2, timedelta(seconds=0.1))
    assert not group.wait_for_all_to_end(store, 1, 2, timedelta(seconds=30))  # rank 0 has given up


class LateStore(dist.HashStore):
    """Store at which rank 1 arrives between rank 0's last check and its timeout."""

    def __init__(self):
        super().__init__()
        self.has_come, self.description = False, None

    def check(self, keys):
        is_there = super().check(keys)
        if not is_there and not self.has_come:
            self.has_come = True
            self.description = group.wait_for_all_to_end(seal_store(self), 1, 2, timedelta(seconds=30))
        return is_there


def test_ranks_agree_even_if_one_times_out_as_the_last_one_arrives():
    store = LateStore()
    assert (group.wait_for_all_to_end(seal_store(store), 0, 2, timedelta(seconds=-1)), store.description) == (
        True,
        True,
    )


def test_exit_codes_and_errors_that_count_as_failures(monkeypatch):
    ending = ProcessExit()
    assert not ending.is_failure
    for code, is_failure in ((0, False), (75, False), (1, True), (130, True)):
        ending.code = code
        assert ending.is_failure is is_failure
    error = ValueError()
    assert not is_uncaught(error)
    monkeypatch.setattr("sys.last_value", error, raising=False)
    assert is_uncaught(error)
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    assert not is_uncaught(error)
