"""Out-of-memory errors on a real device: piece sizes, peaks with several readers, and the messages that count as out of memory."""

import subprocess
import sys

import pytest
import torch

from headway import Accelerator, MemoryMonitor
from headway.core.memory.monitor import PeakReader
from headway.core.memory.use import read_free_bytes
from headway.core.runtime.device import HARDWARE
from headway.extras.replay.allocator_pressure import AllocatorPressure
from headway.extras.replay.step_undo import OptimizerRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine shows none"),
]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _limit_memory():
    """Limit this process to about 1 GiB, so that memory runs out quickly and other processes keep theirs."""
    torch.nn.Linear(1, 1, device="cuda")(
        torch.ones(1, 1, device="cuda")
    ).backward()  # allocates cuBLAS's workspaces for the forward and the backward thread
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1024 * MIB) / total)
    yield
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def allocate_and_free(num_mib: int) -> None:
    torch.empty(num_mib * MIB, dtype=torch.uint8, device="cuda")


def test_an_out_of_memory_error_counts_as_one_retry_and_not_as_thrashing() -> None:
    headroom = AllocatorPressure(HARDWARE["cuda"], torch.device("cuda", 0))
    headroom.is_thrashing()
    before = torch.cuda.memory_stats()
    with pytest.raises(torch.OutOfMemoryError):
        allocate_and_free(2048)
    after = torch.cuda.memory_stats()
    assert [after[name] - before[name] for name in ("num_alloc_retries", "num_ooms")] == [1, 1]
    assert not any(headroom.is_thrashing() for _ in range(64))


def test_pieces_that_fit_stay_as_they_are() -> None:
    accelerator = Accelerator(microbatching="auto")
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    sizes: list[int] = []

    def loss(piece: torch.Tensor) -> torch.Tensor:
        if not sizes or sizes[-1] != len(piece):
            sizes.append(len(piece))
        allocate_and_free(25 * len(piece))
        return model(piece).mean()

    for _ in range(24):
        accelerator.forward_backward(torch.ones(64, 1, device="cuda"), loss)
        optimizer.step()
        optimizer.zero_grad()
    assert sizes[0] == 64
    assert sizes[-1] == 32  # predicted from measurements of pieces with 16 and 8 rows
    assert set(sizes) == {64, 32, 16, 8}


def test_a_monitor_leaves_the_other_readers_their_peak() -> None:
    reader = PeakReader(HARDWARE["cuda"], torch.device("cuda", 0))
    reader.reset()
    with MemoryMonitor("cuda") as monitor:
        before = torch.cuda.memory_allocated()
        allocate_and_free(256)
        with monitor.phase("small"):
            allocate_and_free(1)
    assert reader.read_peak() - before >= 256 * MIB
    assert monitor.peaks["small"] - before < 256 * MIB


# Runs in a new process, whose libraries have not created their handles yet, while the device is almost full.
FULL = """
import sys
import torch
from headway import is_out_of_memory

spare, kind = int(sys.argv[1]) << 20, sys.argv[2]
torch.backends.cudnn.benchmark = kind == "find"
x = torch.ones(8, 64, 64, 64, device="cuda")
weight = torch.ones(256, 64, 3, 3, device="cuda")
y = torch.ones(256, 256, device="cuda", dtype=torch.complex64)
torch.cuda.synchronize()
held = torch.empty(max(0, torch.cuda.mem_get_info()[0] - spare), dtype=torch.uint8, device="cuda")
try:
    if kind == "matmul":
        y @ y
    elif kind == "solve":
        torch.linalg.eigh(y)
    else:
        torch.nn.functional.conv2d(x, weight)
    torch.cuda.synchronize()
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0], sep=": ")
    assert is_out_of_memory(error), error
"""


@pytest.mark.parametrize("kind", ["find", "get", "matmul", "solve"])
@pytest.mark.parametrize("spare", [4, 16, 64, 160])
def test_whatever_a_full_device_raises_is_recognized(kind: str, spare: int) -> None:
    result = subprocess.run([sys.executable, "-c", FULL, str(spare), kind], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    print(result.stdout)


class Momentum(torch.optim.Optimizer):
    """An optimizer that is not from torch and creates its state in its first step."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            p -= 0.05 * self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)


@pytest.mark.card("needs the profiler of a device; tests/simulated_cuda/test_out_of_memory.py counts the copies")
def test_a_foreign_optimizers_later_steps_copy_nothing_to_the_host() -> None:
    accelerator = Accelerator(microbatching="auto")
    model = torch.nn.Linear(1024, 1024)
    model, optimizer = accelerator.prepare(model, Momentum(model.parameters()))
    for number in range(4):
        accelerator.forward_backward(torch.ones(4, 1024, device="cuda"), lambda piece: model(piece).mean())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimizer.step()
            torch.cuda.synchronize()
        optimizer.zero_grad()
        copies = [event for event in profile.events() if "DtoH" in event.name]
        assert bool(copies) == (number < 2), (number, copies)


def test_temporaries_are_reserved_where_free_memory_lies_in_pieces() -> None:
    """Reserve the optimizer's temporaries although free memory is fragmented.

    One segment has free gaps of 32 MiB. Each temporary fits into a gap, but one block of their total size does not fit.
    """
    parameters = [torch.nn.Parameter(torch.ones(8 * MIB, device="cuda")) for _ in range(3)]  # 32 MiB each
    known = OptimizerRecord(torch.optim.AdamW(parameters, foreach=True))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    known.measure_step(lambda: known._optimizer.step() is None)
    known.confirm_step()
    torch.cuda.empty_cache()
    num_blocks = read_free_bytes(HARDWARE["cuda"], torch.device("cuda", 0)) // (32 * MIB)
    allocate_and_free(num_blocks * 32)  # one segment, which the blocks below share
    blocks = [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda") for _ in range(num_blocks)]
    assert known.num_bytes <= num_blocks // 2 * 32 * MIB
    del blocks[::2]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(known.num_bytes, dtype=torch.uint8, device="cuda")
    known.reserve_memory()
