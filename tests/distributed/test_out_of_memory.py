"""Out of memory on any rank, in any phase before the second vote, costs one repeated batch and changes no result.

All cells of the matrix run in one pair of processes. Each cell is reported as a separate test. A cell is compared with a
run that uses the final piece size from the failed batch on, and must be exactly equal. Without BatchNorm or dropout, a
cell is also compared with a run that never runs out of memory.
"""

import gc
import itertools
import resource
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.core.config.torch_kwargs import DDPCommunicationHookType, DistributedDataParallelKwargs, GradScalerKwargs
from headway.core.runtime.device import HARDWARE
from headway.errors import HeadwayError, MemoryExhausted, PrepareError, UnsupportedError
from headway.extras.replay.allocator_pressure import AllocatorPressure
from headway.extras.replay.step import PieceStep
from headway.extras.replay.transaction import BatchTransaction
from tests.devices import DEVICE, ON_CPU
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.on_device

TIMEOUT = 60
TEXT = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
NUM_BATCHES = 6  # per rank: two epochs of 3 batches of 8 rows

PHASES = ["forward", "loss", "backward", "read", "buckets", "clip", "first step", "reserve"]
RANKS = [(0,), (1,), (0, 1)]
FORMS = ["loop", "function"]
CELLS = list(itertools.product(PHASES, RANKS, [1, 3], ["dropout", "BatchNorm", "plain"], FORMS))
# Loops differ from functions only in how a batch is repeated. A plain model adds little to the other kinds.
CELLS = [c for c in CELLS if (c[4] == "loop" and (c[3] != "plain" or c[1] == (0,))) or c[3] == "dropout"]
CELLS = [c for c in CELLS if c[0] != "read" or c[4] == "loop"]


class Fault:
    """Out-of-memory error raised once, in phase `phase` of batch `batch`, on the ranks `who`."""

    def __init__(self, phase: str = "", batch: int = -1, who: tuple[int, ...] = (), rank: int = 0) -> None:
        self.phase, self.batch, self.is_armed = phase, batch, rank in who
        self.now = -1

    def trigger(self, phase: str) -> None:
        if self.is_armed and phase == self.phase and self.now == self.batch:
            self.is_armed = False
            raise torch.OutOfMemoryError("CUDA out of memory.") if self.batch % 2 else RuntimeError(TEXT)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.fault.trigger("backward")
        return grad, None


class Net(nn.Module):
    def __init__(self, kind: str, fault: Fault) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.between = {"dropout": nn.Dropout(0.4), "BatchNorm": nn.BatchNorm1d(8), "plain": nn.Identity()}[kind]
        self.fault = [fault]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(torch.tanh(self.first(x)))
        self.fault[0].trigger("forward")
        return self.last(Failing.apply(x, self.fault[0]))


def make_data(num_rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(num_rows, 3, generator=generator), torch.randn(num_rows, 1, generator=generator))


def get_transaction(accelerator: Accelerator) -> BatchTransaction | None:
    """Return the transaction that repeats batches, or None if batches are not split."""
    step = accelerator._training_step
    return step.transaction if isinstance(step, PieceStep) else None


def train(steps: int, kind: str, form: str, fault: Fault, limit_from: int = 99, precision: str = "no",
          is_automatic: bool = True, batch_size: int = 8, limit: int = 4) -> dict[str, Any]:  # fmt: skip
    """Train two epochs, in pieces of `limit` rows from batch `limit_from` on. Return all results that memory must not affect."""
    accelerator = Accelerator(
        cpu=ON_CPU, gradient_accumulation_steps=steps, microbatching="auto" if is_automatic else None,
        mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=64.0, growth_interval=2)],
    )  # fmt: skip
    torch.manual_seed(7 + accelerator.process_index)
    model = Net(kind, fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01)
    loader = DataLoader(
        make_data(NUM_BATCHES // 2 * 8 * accelerator.num_processes), batch_size=batch_size, shuffle=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.95**n)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    transaction = get_transaction(accelerator)
    if transaction is not None:
        # As on a CPU. A device's memory would predict other piece sizes than those of the undisturbed run.
        transaction.allocator = AllocatorPressure(HARDWARE["cpu"], torch.device("cpu"))
    optimizer.optimizer.register_step_post_hook(lambda *_: fault.trigger("first step"))
    add_faults(accelerator, fault, optimizer)
    losses, sizes = [], []

    def compute(piece: Any) -> torch.Tensor:
        loss = mse_loss(model(piece[0]).float(), piece[1])
        fault.trigger("loss")
        return loss

    def close() -> None:
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    for batch in itertools.chain.from_iterable(loader for _ in range(2)):
        fault.now += 1
        if fault.now == limit_from:
            transaction.size.limit = limit
        if form == "function":
            losses.append(accelerator.forward_backward(batch, compute).item())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            close()
        else:
            for piece in accelerator.microbatches(batch):
                with accelerator.accumulate(model):
                    accelerator.backward(compute(piece))
                    fault.trigger("read")
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    close()
        sizes.append(transaction.size.limit if transaction else None)
    assert not fault.is_armed, "the fault did not happen"
    state = {name: value.clone() for name, value in model.state_dict().items()}
    scale = accelerator.precision.state_dict().get("scale")
    end = torch.rand(2).tolist()  # shows the RNG states
    result = {
        "state": state, "losses": losses, "updates": accelerator.num_updates, "rate": schedule.get_last_lr(),
        "sizes": sizes, "end": end, "scale": scale, "momentum": [s["momentum_buffer"] for s in optimizer.state.values()],
        "windows": accelerator._training_step.windows.num_windows, "grads": [p.grad is None for p in model.parameters()],
    }  # fmt: skip
    accelerator.free_memory()
    return result


def add_faults(accelerator: Accelerator, fault: Fault, optimizer: Any) -> None:
    """Add faults inside Headway's own work: preparing buckets, clipping, and reserving memory for later steps."""
    strategy = accelerator.strategy
    ready, clip = strategy.prepare_reduction, strategy.clip_gradients

    def failing_ready(parameters: Any) -> int:
        fault.trigger("buckets")
        return ready(parameters)

    def failing_clip(*args: Any) -> torch.Tensor:
        norm = clip(*args)
        fault.trigger("clip")
        return norm

    strategy.prepare_reduction, strategy.clip_gradients = failing_ready, failing_clip
    transaction = get_transaction(accelerator)
    if transaction is not None:
        known = transaction._get_optimizer_record(optimizer.optimizer)
        reserve = known.reserve_memory

        def failing_reserve() -> None:
            fault.trigger("reserve")
            reserve()

        known.reserve_memory = failing_reserve


def choose_batch(phase: str, steps: int) -> int:
    """Return the number of the failing batch: within a window if the phase occurs there, otherwise at a window's end."""
    if phase == "first step":
        return steps - 1
    if phase in ("forward", "loss", "backward"):
        return 0 if phase == "loss" else 4
    return 5


def compare(found: dict[str, Any], expected: dict[str, Any], is_exact: bool) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(found["state"], expected["state"], **tolerance)
    torch.testing.assert_close(found["momentum"], expected["momentum"], **tolerance)
    torch.testing.assert_close(found["losses"], expected["losses"], **tolerance)
    for name in ("updates", "rate", "end", "scale", "windows", "grads"):
        assert found[name] == expected[name], name


def run_cells_and_scenarios(cells: list[tuple[Any, ...]]) -> dict[Any, str]:
    """Run each cell and each scenario, and return the tracebacks of those that failed."""
    gc.freeze()  # later garbage collections need not search the existing objects
    rank = Accelerator(cpu=ON_CPU).process_index
    found: dict[Any, str] = {}
    references: dict[Any, Any] = {}

    def reference(*key: Any) -> Any:
        if key not in references:
            steps, kind, form, batch = key
            references[key] = train(steps, kind, form, Fault(), batch)
        return references[key]

    for cell in cells:
        phase, who, steps, kind, form = cell
        try:
            batch, start = choose_batch(phase, steps), time.monotonic()
            result = train(steps, kind, form, Fault(phase, batch, who, rank))
            assert time.monotonic() - start < TIMEOUT
            if form == "function" and phase in ("clip", "first step", "reserve"):
                # its loss was returned before memory ran out
                result["losses"][batch] = reference(steps, kind, form, batch)["losses"][batch]
            assert result["sizes"] == [None] * batch + [4] * (NUM_BATCHES - batch)
            compare(result, reference(steps, kind, form, batch), is_exact=True)
            if kind == "plain":
                compare(result, reference(steps, kind, form, 99), is_exact=False)
        except Exception:
            found[cell] = traceback.format_exc()
    for scenario in SCENARIOS:
        try:
            scenario()
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    return found


# ---------------------------------------------------------------- scenarios


def no_failure_equals_ddp() -> None:
    """Without a failure, weights, momentum and losses equal those of DDP."""
    for steps, form in itertools.product([1, 3], FORMS):
        automatic, plain = (train(steps, "plain", form, Fault(), is_automatic=is_on) for is_on in (True, False))
        compare(automatic, plain, is_exact=False)


def ragged_pieces_of_unequal_batches() -> None:
    """Batches of 7 rows are split into 4 + 3, and the ranks' last batches differ in size."""
    for steps, batch_size in [(1, 7), (2, 7), (3, 5)]:
        whole = train(steps, "plain", "loop", Fault(), is_automatic=False, batch_size=batch_size)
        for form in FORMS:
            cut = train(steps, "plain", form, Fault(), 0, batch_size=batch_size)
            cut["losses"] = whole["losses"]
            torch.testing.assert_close(cut["state"], whole["state"], rtol=1e-4, atol=1e-6)
            assert cut["updates"] == whole["updates"]


def repeated_faults() -> None:
    """Three attempts at one batch, whole and in pieces of 4 and of 2 rows, fail on alternating ranks."""
    rank = Accelerator(cpu=ON_CPU).process_index

    class Twice(Fault):
        count = 0

        def trigger(self, phase: str) -> None:
            if phase == "backward" and self.now == 2 and self.count < 2:
                self.count += 1
                if rank == self.count % 2:
                    raise RuntimeError(TEXT)

    for steps, form in itertools.product([1, 3], FORMS):
        fault = Twice()
        found = train(steps, "dropout", form, fault)
        assert found["sizes"][2:] == [2] * 4
        compare(found, train(steps, "dropout", form, Fault(), 2, limit=2), is_exact=True)


def gradient_scaler_is_restored() -> None:
    """With fp16, loss scale, unscaled gradients and skipped steps equal those of a run with the final piece size."""
    rank = Accelerator(cpu=ON_CPU).process_index
    for phase, who, form in [("clip", (1,), "loop"), ("clip", (0,), "function"), ("backward", (0,), "loop"),
                             ("first step", (0, 1), "function"), ("reserve", (1,), "function")]:  # fmt: skip
        batch = choose_batch(phase, 1)
        found = train(1, "dropout", form, Fault(phase, batch, who, rank), precision="fp16")
        expected = train(1, "dropout", form, Fault(), batch, precision="fp16")
        if form == "function":  # its loss was returned before memory ran out
            found["losses"][batch] = expected["losses"][batch]
        compare(found, expected, is_exact=True)
        assert found["scale"] == 64.0 * 2**3  # six updates; the scale grows at every second one


def failure_with_one_row_is_an_error_on_all_ranks() -> None:
    class Always(Fault):
        def trigger(self, phase: str) -> None:
            if phase == "forward" and self.now == 1 and rank == 1:
                raise RuntimeError(TEXT)

    rank = Accelerator(cpu=ON_CPU).process_index
    for form in FORMS:
        with pytest.raises(MemoryExhausted, match="rank 1 with micro-batches of one row"):
            train(1, "plain", form, Always())


def token_means() -> None:
    """Each piece has its own weight, and one rank's batch has no token with a label."""
    rank = Accelerator(cpu=ON_CPU).process_index
    labels = torch.tensor([[1, 2, -100, 3], [-100] * 4, [2, -100, -100, -100], [0, 1, 2, 3]])
    labels = (labels if rank == 0 else torch.full_like(labels, -100)).to(DEVICE)
    inputs = torch.arange(16.0, device=DEVICE).reshape(4, 4) / 7

    def gradient(limit: int | None, form: str, is_on: bool) -> torch.Tensor:
        accelerator = Accelerator(cpu=ON_CPU, microbatching="auto" if is_on else None)
        torch.manual_seed(0)
        model = accelerator.prepare(nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Linear(1, 4)))
        if is_on:
            accelerator._training_step.transaction.size.limit = limit

        def loss(piece: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(
                model(piece["x"]).flatten(0, 1), piece["labels"].flatten(), ignore_index=-100
            )

        def count(piece: Any) -> torch.Tensor:
            return (piece["labels"] != -100).sum()

        batch = {"x": inputs, "labels": labels}
        if form == "function":
            accelerator.forward_backward(batch, loss, weight=count)
        else:
            for piece in accelerator.microbatches(batch):
                with accelerator.accumulate(model):
                    accelerator.backward(loss(piece), weight=count(piece))
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradient(None, "loop", False)
    for limit, form in itertools.product([None, 3, 1], FORMS):
        torch.testing.assert_close(gradient(limit, form, True), expected, rtol=1e-5, atol=1e-7)


def unused_and_unfrozen_parameters() -> None:
    """A parameter used on one rank is averaged, one used nowhere has no gradient, and unfrozen ones are reduced."""
    accelerator = Accelerator(cpu=ON_CPU, microbatching="auto")
    torch.manual_seed(accelerator.process_index)
    model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("all", "one", "none", "thawed")})
    model["thawed"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model["none"].weight.detach().clone()
    model["thawed"].requires_grad_(True)
    x = torch.ones(4, 2, device=DEVICE) * (1 + accelerator.process_index)

    def loss(x: torch.Tensor) -> torch.Tensor:
        total = model["all"](x) + model["thawed"](x)
        return (total + model["one"](x) if accelerator.is_main_process else total).mean()

    for _ in range(2):
        accelerator.forward_backward(x, loss)
        torch.testing.assert_close(model["one"].weight.grad, torch.full((1, 2), 0.5, device=DEVICE))
        torch.testing.assert_close(model["thawed"].weight.grad, torch.full((1, 2), 1.5, device=DEVICE))
        assert model["none"].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model["none"].weight, before)
    weights = accelerator.gather(torch.cat([p.detach() for p in model.parameters()]))
    assert torch.equal(weights[:4], weights[4:])


def unsupported_models_are_errors() -> None:
    accelerator = Accelerator(cpu=ON_CPU, microbatching="auto")
    with pytest.raises(PrepareError, match="SyncBatchNorm at '1'"):
        accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(UnsupportedError, match="communication hook"):
        Accelerator(cpu=ON_CPU, microbatching="auto", kwargs_handlers=[hook])


def unfreezing_with_ddp_is_an_error() -> None:
    """DDP's reducer does not know an unfrozen parameter, so ranks would diverge. Automatic micro-batching is off."""
    accelerator = Accelerator(cpu=ON_CPU)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for is_thawed in (False, True):
        model[0].requires_grad_(is_thawed)
        accelerator.backward(model(torch.ones(2, 2, device=DEVICE)).mean())
        if is_thawed:
            with pytest.raises(HeadwayError, match="unfrozen after prepare"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()


SCENARIOS: list[Callable[[], None]] = [
    no_failure_equals_ddp, ragged_pieces_of_unequal_batches, repeated_faults, gradient_scaler_is_restored,
    failure_with_one_row_is_an_error_on_all_ranks, token_means, unused_and_unfrozen_parameters, unsupported_models_are_errors,
    unfreezing_with_ddp_is_an_error,
]  # fmt: skip


@pytest.fixture(scope="module")
def failures() -> list[dict[Any, str]]:
    return run_ranks(run_cells_and_scenarios, 2, CELLS, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_matrix_cell(cell: tuple[Any, ...], failures: list[dict[Any, str]]) -> None:
    reports = [f"rank {rank}: {found[cell]}" for rank, found in enumerate(failures) if cell in found]
    assert not reports, "\n".join(reports)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario_on_two_processes(name: str, failures: list[dict[Any, str]]) -> None:
    reports = [f"rank {rank}: {found[name]}" for rank, found in enumerate(failures) if name in found]
    assert not reports, "\n".join(reports)


# ---------------------------------------------------------------- real memory limits


ROWS, WIDTH = 65536, 32


def limit_memory(num_bytes: int) -> None:
    """Limit further memory of this process, of its address space or of the device."""
    if not ON_CPU:
        share = (torch.cuda.memory_reserved() + num_bytes) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(share)
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def train_with_memory_limit(num_mib: int | None) -> dict[str, Any]:
    """Make two updates on batches whose activations take about 110 MiB. Memory may grow by `num_mib` MiB, or without limit."""
    accelerator = Accelerator(cpu=ON_CPU, microbatching="auto")
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(accelerator.process_index)).to(DEVICE)
    model, optimizer = accelerator.prepare(model, optimizer)
    if num_mib is not None and accelerator.process_index == accelerator.num_processes - 1:
        limit_memory(num_mib << 20)
    losses = []
    for _ in range(2):
        loss = accelerator.forward_backward(inputs, lambda x: model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    limit = accelerator._training_step.transaction.size.limit
    return {"weights": [p.detach().clone() for p in model.parameters()], "losses": losses, "limit": limit}


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_with_too_little_memory_reach_the_same_weights(world_size: int) -> None:
    """The last rank cannot hold a whole batch, so all ranks split batches and reach the same weights."""
    free, tight = (
        run_ranks(train_with_memory_limit, world_size, None),
        run_ranks(train_with_memory_limit, world_size, 80),
    )
    assert [each["limit"] for each in free] == [None] * world_size
    limits = {each["limit"] for each in tight}
    assert len(limits) == 1
    limit = limits.pop()
    assert (
        limit in (ROWS // 2, ROWS // 4, ROWS // 8) if DEVICE.type == "cpu" else 0 < limit <= ROWS // 2
    )  # on a device, piece sizes are predicted
    for one, other in zip(tight, free):
        torch.testing.assert_close(one["weights"], other["weights"], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(one["losses"], other["losses"], rtol=1e-4, atol=1e-6)
