"""The virtual clock: the duration of operations, the order in which they finish, and identical times in repeated runs."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")

MIB = 1 << 20
START = """
import json, torch, simulated_cuda
def timed(work, stream=None):
    with torch.cuda.stream(stream):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record(); kept = work(); last.record()
    last.synchronize()
    return first.elapsed_time(last)
"""


def run_with_clock(code: str, **environment: str) -> Any:
    """Run code in a process with a virtual clock, and return the JSON that it prints."""
    variables = {**os.environ, "SIMULATED_CUDA_CLOCK": "1", **environment}
    result = subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True, env=variables, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


COSTS = """
host, pageable = torch.empty(55_000_000, dtype=torch.uint8, pin_memory=True), torch.empty(55_000_000, dtype=torch.uint8)
a, b = (torch.zeros(4096, 4096, device="cuda") for _ in range(2))
half = a.half()
torch.cuda.synchronize()
print(json.dumps([timed(work) for work in (
    lambda: host.to("cuda", non_blocking=True), lambda: pageable.to("cuda"), lambda: a.add_(b), lambda: a @ b,
    lambda: half @ half, lambda: torch.cuda._sleep(2_000_000))]))
"""


def test_durations_follow_from_bytes_and_multiplications() -> None:
    copied, pageable, added, product, half, slept = run_with_clock(COSTS, SIMULATED_CUDA_VALUES="0")
    assert copied == pytest.approx(55e6 / 55e9 * 1e3, rel=0.02)  # ms, on an H100
    assert pageable == pytest.approx(2 * copied, rel=0.02)
    assert added == pytest.approx(2 * 4096 * 4096 * 4 / 3350e9 * 1e3, rel=0.2)
    assert product == pytest.approx(2 * 4096**3 / 67e12 * 1e3, rel=0.02)
    assert half == pytest.approx(2 * 4096**3 / 989e12 * 1e3, rel=0.05)
    assert slept == pytest.approx(1, rel=0.02)


def test_durations_scale_with_the_factors_and_the_device() -> None:
    plain = run_with_clock(COSTS, SIMULATED_CUDA_VALUES="0")
    slow = run_with_clock(
        COSTS, SIMULATED_CUDA_VALUES="0", SIMULATED_CUDA_COPY_TIME="8", SIMULATED_CUDA_KERNEL_TIME="0.5"
    )
    assert [slow[0] / plain[0], slow[3] / plain[3]] == pytest.approx([8, 0.5], rel=0.02)
    other = run_with_clock(COSTS, SIMULATED_CUDA_VALUES="0", SIMULATED_CUDA="t4")
    assert [other[0] / plain[0], other[3] / plain[3]] == pytest.approx([55 / 12, 67 / 8.1], rel=0.02)


def test_host_runs_ahead_until_it_waits_and_each_query_advances_it() -> None:
    code = """
a = torch.zeros(8192, 8192, device="cuda")
torch.cuda.synchronize(); begin = simulated_cuda.clock()
for _ in range(10): a = a @ a
event = torch.cuda.Event(); event.record()
ahead, before = simulated_cuda.clock() - begin, event.query()
event.synchronize()
waited = simulated_cuda.clock() - begin
a = a @ a; event.record()
looks = 0
while not event.query(): looks += 1
print(json.dumps([ahead, before, waited, event.query(), looks]))
"""
    ahead, before, waited, after, looks = run_with_clock(code, SIMULATED_CUDA_VALUES="0")
    each = 2 * 8192**3 / 67e12 * 1e3
    assert ahead < 1
    assert waited == pytest.approx(10 * each, rel=0.02)
    assert (before, after) == (False, True)
    assert 10 < looks < 1000


def test_memory_is_not_reused_before_its_copy_to_the_host_is_done() -> None:
    """Check that memory with `record_stream` is reused only after the side stream's copy.

    Peak memory therefore grows the further the host runs ahead.
    """
    code = """
side, host = torch.cuda.Stream(), torch.empty(8, 16 << 20, dtype=torch.uint8, pin_memory=True)
weight = torch.zeros(4096, 4096, device="cuda")
torch.mm(weight, weight, out=weight)
torch.cuda.synchronize()
for number in range(8):
    made = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host[number].copy_(made, non_blocking=True)
    made.record_stream(side)
    del made
    torch.mm(weight, weight, out=weight)
print(json.dumps([torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()["active_bytes.all.peak"]]))
"""
    near, ahead, again = (
        run_with_clock(code, SIMULATED_CUDA_VALUES="0", SIMULATED_CUDA_HOST_US=us) for us in ("4000", "5", "5")
    )
    assert [far - close for far, close in zip(ahead, near)] == [6 * 16 * MIB] * 2  # eight blocks instead of two
    assert ahead == again


def test_race_is_deterministic_and_wait_stream_removes_it() -> None:
    code = """
found = []
for waits in (False, True):
    x, side = torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000)
    x.add_(1)
    if waits: side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.clone()
    side.synchronize()
    found.append(y[0].item())
print(json.dumps(found))
"""
    assert run_with_clock(code) == [0, 1]


def test_training_has_the_same_values_and_time_in_every_run() -> None:
    code = """
from headway import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
data = torch.utils.data.TensorDataset(torch.randn(64, 64))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(data, batch_size=8))
for (x,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward((model(x) - x).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); optimizer.zero_grad()
torch.cuda.synchronize()
print(json.dumps([sum(each.double().sum().item() for each in model.parameters()), simulated_cuda.clock()]))
"""
    first, second, plain = run_with_clock(code), run_with_clock(code), run_with_clock(code, SIMULATED_CUDA_CLOCK="0")
    assert first == second
    assert first[0] == plain[0]
    assert first[1] > 0 == plain[1]


def test_graph_takes_as_long_as_its_kernels() -> None:
    code = """
a = torch.zeros(4096, 4096, device="cuda")
graph, out = torch.cuda.CUDAGraph(), torch.empty_like(a)
with torch.cuda.graph(graph):
    for _ in range(4): torch.mm(a, a, out=out)
print(json.dumps([timed(lambda: torch.mm(a, a, out=out)), timed(graph.replay)]))
"""
    one, four = run_with_clock(code, SIMULATED_CUDA_VALUES="0")
    assert four == pytest.approx(4 * one, rel=0.05)


OFFLOAD = """
import os
from headway import Accelerator
accelerator = Accelerator()
blocks = (torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)) for _ in range(12))
model = torch.nn.Sequential(*blocks)
if "OFFLOADED" in os.environ:
    accelerator.checkpoint_activations(model, policy="keep_all", offload=True)
model = accelerator.prepare(model)
x = torch.zeros(8192, 512, device="cuda")
for _ in range(2):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = simulated_cuda.clock()
    accelerator.backward(model(x).square().mean())
torch.cuda.synchronize()
found = torch.cuda.memory_stats()
names = ("active_bytes.all.peak", "reserved_bytes.all.peak")
print(json.dumps([*(found[name] / 2**20 for name in names), simulated_cuda.clock() - begin]))
"""


def test_memory_of_offloading_does_not_depend_on_copy_and_kernel_speed() -> None:
    clocks: list[dict[str, str]] = [{}, {"SIMULATED_CUDA_COPY_TIME": "16"}, {"SIMULATED_CUDA_KERNEL_TIME": "16"}]
    kept = run_with_clock(OFFLOAD, SIMULATED_CUDA_VALUES="0")
    found = [run_with_clock(OFFLOAD, SIMULATED_CUDA_VALUES="0", OFFLOADED="1", **clock) for clock in clocks]
    assert found[1][2] > 4 * found[0][2]
    for active, reserved, _ in found:
        assert (active, reserved) == pytest.approx(found[0][:2], rel=0.1)
        assert active < 0.6 * kept[0]
        assert reserved < 0.6 * kept[1]


def join_nccl_group() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1, device="cuda"))


def test_several_ranks_are_refused() -> None:
    code = """
from tests.distributed.ranks import run_ranks
from tests.simulated_cuda.test_clock import join_nccl_group
try:
    run_ranks(join_nccl_group, 2)
except AssertionError as error:
    print(json.dumps(str(error)))
"""
    assert "invalid usage" in run_with_clock(code, SIMULATED_CUDA_DEVICES="2")
