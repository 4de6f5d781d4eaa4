"""Test the size of pieces in automatic micro-batching: free memory and thrashing, with a simulated allocator."""

from collections.abc import Callable

import pytest
import torch

from headway import Accelerator
from headway.common import scope
from headway.core.memory import oom
from headway.core.memory.monitor import PeakReader
from headway.core.runtime.device import HARDWARE
from headway.extras.replay.allocator_pressure import AllocatorPressure
from headway.extras.replay.piece_size import FIRST_PATIENCE
from tests.unit.core.memory.simulated import SimulatedAllocator

CUDA, DEVICE = HARDWARE["cuda"], torch.device("cuda", 0)


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimulatedAllocator]:
    """Return a function that installs a simulated allocator as the CUDA device."""

    def install_allocator(capacity: int, reuses_larger: bool = True) -> SimulatedAllocator:
        allocator = SimulatedAllocator(capacity, reuses_larger=reuses_larger)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: allocator)
        return allocator

    return install_allocator


def run_batches(
    allocator: SimulatedAllocator, num_rows: int, num_batches: int, uses: Callable[[int], list[int]]
) -> list[int]:
    """Run batches whose pieces use blocks of `uses(rows)` bytes, and return the piece sizes tried, in order."""
    accelerator = Accelerator(cpu=True, microbatching="auto", gradient_accumulation_steps=1)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    accelerator._training_step.transaction.allocator = AllocatorPressure(CUDA, DEVICE)
    sizes: list[int] = []

    def compute_loss(piece: torch.Tensor) -> torch.Tensor:
        if not sizes or sizes[-1] != len(piece):
            sizes.append(len(piece))
        for size in uses(len(piece)):
            allocator.use(size)
        return model(piece).mean()

    for _ in range(num_batches):
        accelerator.forward_backward(torch.ones(num_rows, 1), compute_loss)
        optimizer.step()
        optimizer.zero_grad()
    return sizes


CALIBRATION = [16, 8] * 2
"""Sizes of pieces in the two updates after 64 rows failed."""


def test_out_of_memory_error_does_not_count_as_thrashing(simulate) -> None:
    allocator = simulate(40)
    assert run_batches(allocator, 64, 60, lambda rows: [rows]) == [64, *CALIBRATION, 32]
    assert (allocator.num_ooms, allocator.num_retries) == (1, 1)


def test_pieces_grow_as_far_as_memory_allows_without_another_error(simulate, caplog) -> None:
    allocator = simulate(40)
    assert run_batches(allocator, 84, 4 * FIRST_PATIENCE, lambda rows: [rows + 1]) == [84, 21, 11, 10, 21, 11, 10, 28]
    assert allocator.num_ooms == 1  # the use of 10, 11 and 21 rows shows that 42 rows do not fit
    with caplog.at_level("INFO"):
        run_batches(simulate(40), 108, 4 * FIRST_PATIENCE, lambda rows: [rows])
    assert "trying micro-batches of up to 36 rows" in caplog.text
    assert caplog.text.count("trying micro-batches of up to") == 1, (
        "40 rows are predicted, but the batch would still need 3 pieces"
    )


def test_peak_of_an_evaluation_does_not_keep_pieces_small_forever(simulate, caplog) -> None:
    allocator = simulate(20)  # another process uses half of the device until it ends
    num_pieces = 0

    def uses(rows: int) -> list[int]:
        nonlocal num_pieces
        num_pieces += 1
        allocator.capacity = 20 if num_pieces < 18 else 40
        return [rows, *([38] if num_pieces == 21 else [])]  # an evaluation

    with caplog.at_level("INFO"):
        sizes = run_batches(allocator, 32, FIRST_PATIENCE + 6, uses)
        assert sizes[-1] == 16
        assert "up to 32 rows" not in caplog.text, "with the evaluation's 38 bytes, 32 rows must not be tried"
        num_pieces = 0
        allocator.empty_cache()
        run_batches(allocator, 32, 2 * FIRST_PATIENCE + 8, uses)
    assert "trying micro-batches of up to 32 rows" in caplog.text


def test_thrashing_allocator_makes_pieces_smaller(simulate, caplog) -> None:
    # Two blocks fit one after the other, but not both in the cache. With half the rows, both fit.
    allocator = simulate(40, reuses_larger=False)
    assert run_batches(allocator, 32, 10, lambda rows: [rows, rows + 2])[:2] == [32, 16]
    assert allocator.num_ooms == 0
    assert "keeps emptying its cache" in caplog.text


ENGINE = "FIND was unable to find an engine to execute this computation"


def test_error_hidden_by_a_library_is_recognized(simulate, monkeypatch) -> None:
    allocator = simulate(40 << 30)
    allocator.malloc(1 << 20)  # the weights
    monkeypatch.setattr(oom, "HARDWARE", {"cuda": CUDA})
    scope.drop(oom._CountedErrors)

    def uses(rows: int) -> list[int]:
        try:
            allocator.use(rows << 30)
        except torch.OutOfMemoryError:
            raise RuntimeError(ENGINE) from None
        return []

    assert run_batches(allocator, 64, 4, uses) == [64, *CALIBRATION, 32]


def test_missing_engine_for_another_reason_costs_at_most_one_more_attempt(simulate, monkeypatch) -> None:
    allocator = simulate(40 << 30)
    allocator.malloc(1 << 20)  # the weights
    monkeypatch.setattr(oom, "HARDWARE", {"cuda": CUDA})
    scope.drop(oom._CountedErrors)
    tried: list[int] = []

    def uses(rows: int) -> list[int]:
        tried.append(rows)
        allocator.use(rows << 20)
        raise RuntimeError(ENGINE)

    with pytest.raises(RuntimeError, match="FIND was unable"):
        run_batches(allocator, 64, 1, uses)
    assert tried == [64]
    with pytest.raises(torch.OutOfMemoryError):  # an earlier error that the script handled
        allocator.malloc(1 << 40)
    with pytest.raises(RuntimeError, match="FIND was unable"):
        run_batches(allocator, 64, 1, uses)
    assert tried == [64, 64, 16]


def test_single_retry_is_not_thrashing(simulate) -> None:
    allocator = simulate(40, reuses_larger=False)
    allocator.use(32)
    pressure = AllocatorPressure(CUDA, DEVICE)
    found = []
    for vote in range(64):
        if vote == 20:  # like an evaluation between two batches
            allocator.use(30)
        allocator.use(32) if vote < 20 else allocator.use(30)
        found.append(pressure.is_thrashing())
    assert allocator.num_retries == 1
    assert not any(found)


def test_earlier_retries_are_not_counted(simulate) -> None:
    allocator = simulate(40, reuses_larger=False)
    for size in (32, 30) * 20:
        allocator.use(size)
    pressure = AllocatorPressure(CUDA, DEVICE)
    assert not any(pressure.is_thrashing() for _ in range(64))


def test_monitor_does_not_reset_the_peak_that_pieces_use(simulate) -> None:
    allocator = simulate(50)
    pressure = AllocatorPressure(CUDA, DEVICE)
    meter = PeakReader(CUDA, DEVICE)
    allocator.use(30)  # forward and backward of a piece, before the phase "step" begins
    meter.reset()
    allocator.use(1)
    assert meter.read_peak() == 1
    assert pressure.predict_rows(3) == 5, "3 rows use 30 of 50 bytes"


def test_pieces_do_not_reset_the_peak_of_a_monitor(simulate) -> None:
    allocator = simulate(40)
    meter = PeakReader(CUDA, torch.device("cuda"))  # the current device, which is the same device
    pressure = AllocatorPressure(CUDA, DEVICE)
    allocator.use(30)
    pressure.reset_statistics()
    assert meter.read_peak() == 30
    pressure.record_piece(0)
    allocator.use(20)
    pressure.record_piece(2)
    allocator.use(10)
    pressure.record_piece(1)
    assert (pressure.predict_rows(2), meter.read_peak()) == (2, 30), (
        "each row uses 10 of 40 bytes, and 10 are fragmented"
    )


def test_unreferenced_reader_is_not_updated(simulate) -> None:
    allocator = simulate(40)
    first = PeakReader(CUDA, DEVICE)
    first.reset()
    other = PeakReader(CUDA, torch.device("cuda", 1))  # readers of another device are not updated
    allocator.use(7)
    first.reset()
    assert (first.read_peak(), other._recorded_peak) == (0, 0)


class ThrashingOnce(AllocatorPressure):
    """Allocator that reports thrashing at the first vote, in a batch that then runs out of memory."""

    def __init__(self) -> None:
        super().__init__(HARDWARE["cpu"], torch.device("cpu"))
        self.answers = [True]

    def is_thrashing(self) -> bool:
        return bool(self.answers) and self.answers.pop()


def test_batch_that_thrashed_and_ran_out_of_memory_is_made_smaller_once() -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto")
    model, sizes, failures = torch.nn.Linear(1, 1), [], [torch.OutOfMemoryError("CUDA out of memory")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    transaction = accelerator._training_step.transaction
    transaction.allocator = ThrashingOnce()

    def fail_once(*_: object) -> None:
        if failures:
            raise failures.pop()

    optimizer.optimizer.register_step_pre_hook(fail_once)

    def compute_loss(piece: torch.Tensor) -> torch.Tensor:
        sizes.append(len(piece))
        return model(piece).mean()

    for _ in range(2):
        accelerator.forward_backward(torch.ones(16, 1), compute_loss)
        optimizer.step()
        optimizer.zero_grad()
    assert sizes == [16, 8, 8, 8, 8]


def test_cpu_has_no_measurements_and_does_not_thrash() -> None:
    pressure = AllocatorPressure(HARDWARE["cpu"], torch.device("cpu"))
    pressure.reset_statistics()
    pressure.record_piece(1)
    assert not pressure.is_measured
    assert pressure.predict_rows(1) == -1
    assert not any(pressure.is_thrashing() for _ in range(64))
