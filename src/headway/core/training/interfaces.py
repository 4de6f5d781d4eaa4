"""Results and interfaces of optional features. The features themselves are in `headway.extras`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headway.core.training.windows import AccumulationWindow


@dataclass(frozen=True)
class NanOrigin:
    """Origin of a NaN or infinity in an accumulation window, as the action "explain" of `on_non_finite` reports it.

    Attributes:
        phase: "forward", "backward", "weight" (a parameter or buffer contained it), "input" (the batch contained it) or
            "elsewhere" (it existed before, or came from another rank).
        operation: torch operation that produced it, such as "aten.log". In backward, the autograd node is added, for
            example "aten.div in SqrtBackward0". For the phase "weight", the name of the parameter or buffer.
        module: Full name of the module that was being called, or an empty string.
        line: Line of the user's code, such as "train.py:12 in loss", or an empty string if unknown.
        rows: Indices of the affected rows in this rank's batch, at most 8. Empty if unknown.
        rank: Rank on which it originated.
    """

    phase: str
    operation: str
    module: str
    line: str
    rows: tuple[int, ...] = ()
    rank: int = 0

    def __str__(self) -> str:
        start = {
            "weight": f"with {self.operation}, which contains values that are not finite",
            "input": f"with the values that were given to {self.operation}",
            "elsewhere": "with a tensor that no checked operation has produced",
        }.get(self.phase, f"in {self.phase} with {self.operation}")
        module = f" in {self.module}" if self.module else ""
        line = f" ({self.line})" if self.line else ""
        rows = ""
        if self.rows:
            rows = f", row{'s' if len(self.rows) > 1 else ''} {', '.join(map(str, self.rows))} of the batch"
        return f"it began {start}{module}{line}{rows}, on rank {self.rank}"


class Proofs(Protocol):
    """Result of `Accelerator.verify`, which checks properties of a training script. Each check is called a proof.

    Attributes:
        passed: Whether no proof failed.
        statuses: Status of each proof ("PASS", "FAIL" or "NOT CHECKED"), by the proof's name, such as "resume".
    """

    passed: bool
    statuses: dict[str, str]

    def describe(self) -> str:
        """Return the result as text: a table of all proofs, and details of those that failed."""


class OriginSearch(Protocol):
    """Interface of the search for the origin of a NaN.

    The search runs an accumulation window a second time and checks each operation.

    Attributes:
        is_armed: Whether a window will be run a second time, as soon as its loader is asked for the next batch.
        is_repeating: Whether the script is processing the repeated batches of a window. No update may be made then.
        tracer: Tracer of the window that is being run a second time, or None.
    """

    is_armed: bool
    is_repeating: bool
    tracer: Any

    def arm_replay(self, window: AccumulationWindow) -> bool:
        """Prepare to run an accumulation window again, whose update the guard has refused, to find the origin of the NaN.

        Returns:
            Whether a window will be run again: this one, or one that was refused before it on the same batches. False
                if a window was run again before, if the batches did not come from a prepared loader, or if there were
                too many of them.
        """

    def is_tracing(self, window: AccumulationWindow) -> bool:
        """Whether `window` is the one that is being run again and traced."""

    def end_replay(self) -> NanOrigin | None:
        """Stop tracing, and return the origin of the NaN that was found on this rank, or None."""


class SpikeReport(Protocol):
    """Counts and latest message of the guard that `on_spike` enables.

    Attributes:
        num_spikes: Number of updates that the guard identified as spikes.
        num_skipped: Number of updates that the guard skipped.
        report: Latest message, or an empty string if there was none.
    """

    num_spikes: int
    num_skipped: int
    report: str


class WeightBuckets(Protocol):
    """Interface of a model's weight stream, which can be iterated over once. Every rank must iterate over it.

    Each item is a bucket: a list of pairs (name, tensor) with a limited total size.

    Attributes:
        metadata: (name, dtype name, shape) of each tensor, in the order in which they are sent.
    """

    metadata: list[tuple[str, str, list[int]]]

    def __iter__(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the buckets. Rank 0 gets full tensors, and the other ranks get meta tensors without memory."""


@dataclass(frozen=True)
class PeakRate:
    """Peak computing rate of a device.

    Attributes:
        flops_per_second: FLOP/s of one device.
        source: Origin of the value: "stated for NAME" if it is from the built-in table, "measured", or "given" by the
            user.
    """

    flops_per_second: float
    source: str


@dataclass(frozen=True)
class RankPace:
    """Speed of one rank, without the time that it waits for other ranks.

    Attributes:
        rank: Rank whose speed it is.
        num_updates: Number of updates that the rank had made when it published its speed.
        forward: Median time in seconds of the rank's latest forward passes, in which no rank waits for another.
        data_wait: Fraction of the rank's time, 0 to 1, in which it waited for data.
    """

    rank: int
    num_updates: int
    forward: float
    data_wait: float


class ThroughputMeter(Protocol):
    """Meter of the training loop's throughput, which `Accelerator.throughput` returns.

    Attributes:
        every: Number of updates between two reports of each rank's speed.
        factor: Multiple of the median forward time above which a rank is a straggler.
        flops_per_sample: FLOPs of forward and backward per sample, for "mfu". None if unknown.
        flops_per_token: FLOPs of forward and backward per token, for "mfu". None if unknown.
    """

    every: int
    factor: float
    flops_per_sample: float | None
    flops_per_token: float | None

    def paused(self) -> AbstractContextManager[None]:
        """Return a context during which time is not measured, for example for a save."""

    def add(self, tokens: float | torch.Tensor, padding: float | torch.Tensor = 0) -> None:
        """Add tokens of this rank to the token count. Padding tokens are counted separately.

        A tensor on an accelerator is read only when values are requested.
        """

    def seen(self) -> dict[str, int]:
        """Return the updates, samples and tokens of all ranks since the run's first update, over all resumes.

        The keys are `num_updates`, `samples_seen`, `tokens_seen` and `padding_tokens_seen`. Every rank must call it.
        """

    def values(self) -> dict[str, float]:
        """Return the throughput since the last call: `samples_per_second`, `tokens_per_second`, `data_wait` and `mfu`.

        `data_wait` is the fraction of time, 0 to 1, that this rank waited for data; on the main process, there is also
        `data_wait/rank_<n>` for each rank that has reported. `mfu` is the model FLOPs utilization. Values that are
        unknown are left out.
        """

    def total(self) -> dict[str, float]:
        """Return the throughput since the meter was started, with the keys of `values()` but without
        `data_wait/rank_<n>`.
        """

    @property
    def seconds(self) -> float:
        """Seconds measured so far, without paused time."""

    def show_in_bars(self) -> None:
        """Show the recent throughput in all progress bars of `headway.track` in this process."""

    def format_rates(self) -> str:
        """Return one line with samples and tokens per second, `mfu` and the fraction of time spent waiting for data."""

    def count_flops(self) -> None:
        """Count the FLOPs per sample in the next batch of a prepared loader, and use this count for all later batches."""

    @property
    def peak(self) -> PeakRate:
        """Peak computing rate of one device in the run's precision. Can be set, in FLOP/s."""

    @peak.setter
    def peak(self, flops_per_second: float | PeakRate) -> None: ...

    def paces(self) -> list[RankPace]:
        """Return the latest speed of each rank. A rank reports its speed once per `every` updates."""

    def stragglers(self) -> dict[int, str]:
        """Return a description of each straggler, by rank.

        A straggler is a rank whose forward or data loading is much slower than the median.
        """
