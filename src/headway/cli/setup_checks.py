"""Checks that `headway test` runs on every rank: collectives, data order, gradients, RNG states and metrics."""

import time
from collections.abc import Callable

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway.accelerator import Accelerator
from headway.core.config.run import DataLoaderConfiguration
from headway.core.runtime.collectives.rng import synchronize_rng_states
from headway.core.runtime.seed import set_seed

_NUM_ROWS = 37  # a prime, so that no batch size or number of ranks divides it

_BATCH_SIZE = 4


def _make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of the checks, which are equal on all ranks."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(_NUM_ROWS, 6, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def _make_model() -> torch.nn.Module:
    """Return the model of the checks, with equal weights on all ranks. The RNG state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)  # torch.manual_seed would also seed the accelerators
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def _require_true(is_true: bool, message: str) -> None:
    if not is_true:
        raise AssertionError(message)


def _gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, which is a collective, or the tensor itself."""
    gather = getattr(tensor, "full_tensor", None)
    full_tensor: torch.Tensor = tensor if gather is None else gather()
    return full_tensor


def check_collectives(accelerator: Accelerator) -> str:
    """Raise AssertionError if a collective of the Accelerator returns a wrong result.

    The checked methods are gather, reduce, pad_across_processes and gather_objects. Every rank must call it.

    Returns:
        Description of the successful check, for the report.
    """
    rank, count = accelerator.process_index, accelerator.num_processes
    rows = torch.full((rank + 1,), rank, device=accelerator.device)
    expected = [r for r in range(count) for _ in range(r + 1)]
    _require_true(accelerator.gather(rows).tolist() == expected, "gather lost or reordered rows")
    _require_true(
        accelerator.pad_across_processes(rows).shape[0] == count, "pad_across_processes missed the longest rank"
    )
    total = accelerator.reduce(torch.tensor([float(rank)], device=accelerator.device), "sum").item()
    _require_true(total == count * (count - 1) / 2, "reduce added up wrongly")
    _require_true(
        accelerator.collectives.gather_objects(f"rank {rank}")[-1] == f"rank {count - 1}", "objects were mixed up"
    )
    return f"gather, pad, reduce and objects over {count} ranks"


def check_data(accelerator: Accelerator) -> str:
    """Raise AssertionError if an epoch misses or repeats a sample, or if two epochs have the same sample order.

    Every rank must call it.

    Returns:
        Description of the successful check, for the report.
    """
    loader = DataLoader(TensorDataset(torch.arange(_NUM_ROWS)), batch_size=_BATCH_SIZE, shuffle=True)
    prepared = accelerator.prepare_data_loader(loader)
    epochs = []
    for _ in range(2):
        rows = [accelerator.gather_for_metrics(batch[0]).tolist() for batch in prepared]
        epochs.append([row for step in rows for row in step])
    _require_true(all(sorted(epoch) == list(range(_NUM_ROWS)) for epoch in epochs), "samples were lost or repeated")
    _require_true(epochs[0] != epochs[1], "two epochs had the same order")
    return f"{_NUM_ROWS} samples exactly once in each of 2 epochs"


def check_gradient(accelerator: Accelerator) -> str:
    """Raise AssertionError if the gradient of an accumulation window with micro-batches of different sizes is wrong.

    The reduced gradient must equal that of a single batch with all data, which each rank computes with plain PyTorch.
    The tolerance is 1e-5, or 5e-2 with mixed precision. Every rank must call it.

    Returns:
        Description of the successful check, for the report.
    """
    inputs, targets = _make_data()
    reference_model = _make_model()
    torch.autograd.backward(mse_loss(reference_model(inputs), targets))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=_BATCH_SIZE)
    model = accelerator.prepare_model(_make_model())
    prepared = accelerator.prepare_data_loader(loader)
    prepared.even_batches = False  # otherwise repeated rows would count in the loss
    accelerator.gradient_accumulation_steps = len(prepared)
    for batch, target in prepared:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(batch), target))
    tolerance = 1e-5 if accelerator.mixed_precision == "no" else 5e-2
    scale = accelerator.precision.get_gradient_scale()
    errors = {}
    for (name, parameter), reference in zip(model.named_parameters(), reference_model.parameters()):
        assert parameter.grad is not None
        assert reference.grad is not None
        gradient = (
            _gather_full_tensor(parameter.grad).cpu().float() / scale
        )  # gathering a sharded gradient is a collective that all ranks must run
        errors[name] = (gradient - reference.grad).abs().max().item()
    for name, error in errors.items():
        _require_true(error <= tolerance, f"the gradient of {name} is off by {error:.2g}")
    return f"a window of {len(prepared)} micro-batches on {accelerator.num_processes} ranks = one batch of {_NUM_ROWS}"


def check_random_streams(accelerator: Accelerator) -> str:
    """Raise AssertionError if ranks that read different data draw equal random numbers with device-specific seeds.

    `set_seed(..., device_specific=True)` sets these seeds. Ranks that read the same data must draw equal numbers. After
    `synchronize_rng_states`, all ranks must. Every rank must call this function.

    Returns:
        Description of the successful check, for the report.
    """
    set_seed(3, device_specific=True)
    numbers = accelerator.collectives.gather_objects(torch.rand(1).item())
    num_streams = accelerator.strategy.data_shard.count  # ranks that read the same data must draw equal numbers
    _require_true(len(set(numbers)) == num_streams, "device_specific seeds gave two ranks one stream")
    synchronize_rng_states(["torch"])
    _require_true(
        len(set(accelerator.collectives.gather_objects(torch.rand(1).item()))) == 1, "streams stayed different"
    )
    return "ranks differ with device_specific, agree after synchronization"


def check_metrics(accelerator: Accelerator) -> str:
    """Raise AssertionError unless `gather_for_metrics` returns all rows of the dataset once and in order.

    The last batch is incomplete, so that ranks repeat samples to fill it. Every rank must call this function.

    Returns:
        Description of the successful check, for the report.
    """
    inputs, _ = _make_data()
    prepared = accelerator.prepare_data_loader(DataLoader(TensorDataset(inputs), batch_size=_BATCH_SIZE))
    gathered = [accelerator.gather_for_metrics(batch[0]) for batch in prepared]
    _require_true(torch.equal(torch.cat(gathered).cpu(), inputs), "gathered rows differ from the data")
    return f"{_NUM_ROWS} rows back in the data's order"


_CHECKS: list[Callable[[Accelerator], str]] = [
    check_collectives,
    check_data,
    check_gradient,
    check_random_streams,
    check_metrics,
]


def check_setup() -> bool:
    """Run all checks of `headway test` on all ranks and print the results. Return True if none failed on any rank.

    A check fails by an AssertionError. Any other error ends the run. Every rank must call this function.
    """
    started = time.monotonic()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(data_seed=0))
    accelerator.print(
        f"{accelerator.num_processes} processes, {accelerator.device.type}, precision {accelerator.mixed_precision}"
    )
    num_failed = 0
    for check in _CHECKS:
        check_started, problem, result = time.monotonic(), "", ""
        try:
            result = check(accelerator)
        except AssertionError as error:
            problem = f"rank {accelerator.process_index}: {error}"
        accelerator.free_memory()
        problems = [text for text in accelerator.collectives.gather_objects(problem) if text]
        num_failed += bool(problems)
        name = check.__name__.removeprefix("check_").replace("_", " ")
        verdict = "FAILED " + "; ".join(problems) if problems else f"ok     {result}"
        accelerator.print(f"  {name:15} {verdict} ({time.monotonic() - check_started:.2f} s)")
    word = "all checks passed" if not num_failed else f"{num_failed} of {len(_CHECKS)} checks failed"
    accelerator.print(f"{word} in {time.monotonic() - started:.1f} s")
    accelerator.end_training()
    return not num_failed
