"""Tests that need NCCL: its flight recorder and coalesced launches; on two GPUs also hangs, failures and existing process groups."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.core.config.torch_kwargs import DistributedDataParallelKwargs
from headway.core.runtime import group
from headway.core.runtime.flight_recorder import FlightRecorder
from headway.core.runtime.group import can_coalesce, start_collectives
from headway.core.strategies.ddp_hooks import check_communication_hook
from tests.distributed.test_launch import start_launch
from tests.unit.core.runtime.nccl_dump import make_entry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()),
        reason="needs a CUDA device and a torch with NCCL; this machine shows none",
    ),
]

two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank; this machine shows fewer than two"
)


@pytest.fixture
def single_rank_group():
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    yield
    torch.cuda.synchronize()
    dist.destroy_process_group()


def test_the_recorder_has_the_fields_that_the_tests_without_a_gpu_use(single_rank_group):
    import json

    import torch._C._distributed_c10d as engine

    dist.all_reduce(torch.ones(4, device="cuda"))
    (*_, last) = json.loads(engine._dump_nccl_trace_json())["entries"]
    assert set(make_entry(1, "all_reduce")) <= set(last)
    assert last["profiling_name"] == "nccl:all_reduce"


def test_the_earliest_open_collective_is_found_while_the_device_is_at_work(single_rank_group):
    value = torch.ones(4, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**10)  # several seconds
    for _ in range(3):
        dist.all_reduce(value)
    recorder = FlightRecorder()
    recorder.check_counters()
    recorder.check_counters()
    (call,) = [call for call in recorder._calls if call["group"] == "nccl:0"]
    assert (call["operation"], call["number"]) == ("all_reduce", 2)
    assert call["since"] is not None
    torch.cuda.synchronize()
    deadline = time.monotonic() + 30
    while call["since"] is not None and time.monotonic() < deadline:
        time.sleep(0.2)  # the watchdog polls every 0.1 seconds
        recorder = FlightRecorder()
        recorder.check_counters()
        recorder.check_counters()
        (call,) = [call for call in recorder._calls if call["group"] == "nccl:0"]
    assert (call["number"], call["since"]) == (4, None)


def test_several_tensors_in_one_launch(single_rank_group):
    device = torch.device("cuda", 0)
    assert can_coalesce(None, device)
    assert group.has_blocking_backend()
    found = [torch.full((size,), float(size), device=device) for size in (1, 5, 300)]
    for is_sum in (True, False):
        for work in start_collectives(
            found,
            lambda tensor: None,
            lambda tensor: (
                dist.all_reduce(tensor, async_op=True) if is_sum else dist.broadcast(tensor, 0, async_op=True)
            ),
            is_sum=is_sum,
        ):
            work.wait()
    assert [tensor.unique().tolist() for tensor in found] == [[1.0], [5.0], [300.0]]


def test_the_bf16_hook_is_allowed(single_rank_group):
    check_communication_hook(DistributedDataParallelKwargs(comm_hook="bf16"), torch.device("cuda", 0), dist.group.WORLD)


# -------------------------------------------------------------------- two GPUs

START = """
import os, sys, time, torch, torch.distributed as dist
from headway import Accelerator, InitProcessGroupKwargs, find_executable_batch_size
"""
OURS = (
    START
    + """
accelerator = Accelerator()
rank = accelerator.process_index
value = torch.ones(4, device=accelerator.device)
for _ in range(3):
    dist.all_reduce(value)
torch.cuda.synchronize()
"""
)


def run_to_end(folder: Path, body: str, *flags: str) -> tuple[int, str, str, float]:
    began = time.monotonic()
    process = start_launch(folder, body, "-n", "2", "-q", "--log_dir", "logs", *flags)
    try:
        out, err = process.communicate(timeout=180)
    finally:
        process.kill()
    return process.returncode, out, err, time.monotonic() - began


@two
def test_a_hang_on_the_device_names_the_missing_rank(tmp_path):
    body = (
        OURS
        + """
if rank == 1:
    time.sleep(300)
for _ in range(5):
    dist.all_reduce(value)
print(value.sum().item())
"""
    )
    code, _, err, _ = run_to_end(tmp_path, body, "--timeout", "10")
    assert code == 1, err
    assert "rank 1 of 2 is missing from all_reduce, where rank 0 has waited for " in err


@two
@pytest.mark.parametrize("caught", [False, True])
def test_a_failure_ends_at_once_while_the_peer_is_inside_a_collective(tmp_path, caught):
    body = (
        OURS
        + f"""
try:
    if rank == 1:
        raise ValueError("no such sample")
    dist.all_reduce(value)
    print(value.sum().item())
except ValueError:
    if not {caught}:
        raise
    sys.exit(3)
"""
    )
    code, _, err, took = run_to_end(tmp_path, body)
    assert code == (3 if caught else 1), err
    assert took < 90


@two
@pytest.mark.parametrize("update", [0, 4])
def test_out_of_memory_on_one_rank_ends_the_attempt_on_both(tmp_path, update):
    body = (
        START
        + f"""
accelerator = Accelerator()
@find_executable_batch_size(starting_batch_size=16)
def train(batch_size):
    accelerator.free_memory()
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(6):
        loss = model(torch.randn(batch_size, 64, device=accelerator.device)).square().mean()
        if batch_size > 8 and accelerator.process_index == 1 and step == {update}:
            torch.empty(2**50, device=accelerator.device)
        accelerator.backward(loss, weight=batch_size)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return batch_size
print("fits:", train())
"""
    )
    code, out, err, took = run_to_end(tmp_path, body)
    assert code == 0, err
    assert out.count("fits: 8") == 2
    assert took < 120


@two
@pytest.mark.parametrize("way", ["ours", "the script's"])
def test_group_of_nccl_alone_works_for_all_features(tmp_path, way):
    begun = (
        "accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend='nccl')])"
        if way == "ours"
        else "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\ndist.init_process_group('nccl')\naccelerator = Accelerator()"
    )
    body = (
        START
        + begun
        + """
rank = accelerator.process_index
print("found", accelerator.gather(torch.full((1 + rank,), rank, device=accelerator.device)).tolist(),
      accelerator.gather(torch.tensor([rank])).tolist(), flush=True)
accelerator.end_training()
if dist.is_initialized():
    dist.destroy_process_group()
"""
    )
    code, out, err, _ = run_to_end(tmp_path, body)
    assert code == 0, err
    assert out.count("found [0, 1, 1] [0, 1]") == 2
