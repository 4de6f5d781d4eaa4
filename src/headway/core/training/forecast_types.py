"""Request and result of a memory forecast. `headway.forecasting` makes the forecast."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from headway.common.text import format_bytes
from headway.core.runtime.collectives.tree import Tree
from headway.core.training.run import Run

Forward = Callable[[Any, Any], torch.Tensor]
"""Function of a model and a micro-batch that returns the loss."""

Loss = Callable[[Any, Any], torch.Tensor]
"""Function of a model's outputs and a micro-batch's targets that returns the loss."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Function that creates an optimizer from parameters."""

Loop = Callable[[nn.Module, Iterable[Any], torch.optim.Optimizer | None], object]
"""Training loop of the user, called as `loop(model, micro_batches, optimizer)`."""


@dataclass(frozen=True)
class TrainingSetup:
    """Training settings of an Accelerator that a memory forecast depends on.

    Attributes:
        run: Run of the Accelerator.
        recompute: Function called with the prepared model and its copy. It enables activation checkpointing in the copy
            for the modules that use it in the model.
    """

    run: Run
    recompute: Callable[[nn.Module, nn.Module], None]


@dataclass(frozen=True)
class ForecastRequest:
    """Arguments of a memory forecast. `Accelerator.forecast` documents each of them."""

    model: nn.Module
    batch: Tree
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None
    loss: Loss | None = None
    forward: Forward | None = None
    budget: int | str | None = None
    largest: bool = True
    batch_fn: Callable[[int], Tree] | None = None
    max_norm: float | None = None
    device: str | None = None
    loop: str | Loop = "plain"


@dataclass(frozen=True)
class Timeline:
    """Memory in use over the allocation events of a training step.

    Events are grouped into stretches of equal length. Each stretch is represented by the event at which the most memory
    is in use.

    Attributes:
        places: Index of the representative event of each stretch, in ascending order.
        sizes: Bytes in use at each event in `places`, by kind of memory. Only kinds that occur are included, in the
            order of `KINDS`.
        phases: Pairs of a phase, such as "step 1 forward", and the index of its first event, in order. With gradient
            accumulation, "forward" and "backward" of a step occur once for each micro-batch.
    """

    places: tuple[int, ...]
    sizes: dict[str, tuple[int, ...]]
    phases: tuple[tuple[str, int], ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes in use at each event in `places`, summed over all kinds of memory."""
        return tuple(map(sum, zip(*self.sizes.values())))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Memory that a training step needs on a device. Sizes are in bytes.

    Attributes:
        device: Name of the target device, as listed in docs/forecast.md.
        batch_size: Samples per micro-batch.
        allocated: Peak memory of tensors (`torch.cuda.max_memory_allocated`).
        reserved: Peak memory that torch's allocator reserves on the device (`torch.cuda.max_memory_reserved`).
        least: Lower bound of the memory in use on the device as `nvidia-smi` shows it, which includes the device
            context and libraries.
        total: Likely memory in use on the device, including the device context and libraries.
        most: Upper bound of the memory in use on the device. docs/forecast_reference.md explains the margin.
        split: Bytes of `allocated` at the peak, by kind of memory.
        peak: Phase in which the peak is reached, such as "step 2 backward".
        peak_line: Line of the user's code that requested the memory at the peak, or "" if the request came from
            elsewhere.
        budget: Available bytes, or None if unknown.
        fits: True if `most` fits into the budget, False if not even `least` fits, and None if the answer is uncertain.
        largest_batch: Largest batch whose `most` fits into the budget, or None if it was not searched for.
        longest_sequence: Longest sequence whose `most` fits into the budget at `batch_size`, or None if it was not
            searched for.
        timeline: Memory of tensors over the traced steps, by kind of memory.
        by_batch: Pairs of a batch size and its `most`, including some sizes above `largest_batch`. Empty if the largest
            batch was not searched for.
        num_traces: Number of training steps that were traced.
        seconds: Duration of the forecast in seconds.
        caveats: Assumptions and known gaps of this forecast, as sentences.
        strategy: Layout over ranks, or "" for one process.
        num_ranks: World size. With more than one rank, the sizes are those of the rank `rank`.
        rank: Rank whose memory is forecast, which needs as much as any other rank or more. 0 unless single ranks update
            full parameters for all others, as with Muon and Adafactor under `fsdp`.
    """

    device: str
    batch_size: int
    allocated: int
    reserved: int
    least: int
    total: int
    most: int
    split: dict[str, int]
    peak: str
    peak_line: str
    budget: int | None
    fits: bool | None
    largest_batch: int | None = None
    longest_sequence: int | None = None
    timeline: Timeline = field(repr=False)
    by_batch: tuple[tuple[int, int], ...] = ()
    num_traces: int = 1
    seconds: float = 0.0
    caveats: tuple[str, ...]
    strategy: str = ""
    num_ranks: int = 1
    rank: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as nested dictionaries that can be written as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Return the forecast as lines of text for the terminal."""
        lines = [
            f"{self.device}, {self._describe_ranks()}batch {self.batch_size}: {format_bytes(self.total)} "
            f"({format_bytes(self.least)} to {format_bytes(self.most)}: context, libraries and workspaces vary)",
            f"tensors {format_bytes(self.allocated)}, allocator {format_bytes(self.reserved)}; the most in {self.peak}"
            + (f", at {self.peak_line}" if self.peak_line else ""),
            *(f"  {kind:<16} {format_bytes(size):>10}" for kind, size in self.split.items()),
        ]
        if self.budget is not None:
            answer = {True: "fits", False: "does not fit", None: "may fit: it is too close to tell"}[self.fits]
            lines.append(f"{answer} into {format_bytes(self.budget)}")
        if self.largest_batch is not None:
            why = (
                "even the most in use stays within the budget"
                if self.largest_batch
                else "not even one sample is sure to fit"
            )
            lines.append(f"largest batch: {self.largest_batch} ({why})")
        if self.longest_sequence is not None:
            lines.append(f"longest sequence in a batch of {self.batch_size}: {self.longest_sequence:,}")
        lines += [f"note: {caveat}" for caveat in self.caveats]
        noun = "training step" if self.num_traces == 1 else "training steps"
        return "\n".join([*lines, f"traced {self.num_traces} {noun} in {self.seconds:.1f} s"])

    def _describe_ranks(self) -> str:
        return f"rank {self.rank:,} of {self.num_ranks:,} under {self.strategy}, " if self.num_ranks > 1 else ""
