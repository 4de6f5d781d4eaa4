"""Result of a trace: the memory that training steps allocate and free, in order (`StorageTracker` records it)."""

from dataclasses import dataclass, field
from typing import NamedTuple

from headway.forecasting.device.memory_events import MemoryEvent, StepMemory
from headway.forecasting.tracing.work import StepWork


class PhaseStart(NamedTuple):
    """Start of a phase of the traced steps.

    Attributes:
        phase: Name of the phase, such as "step 1 forward", "step 1 backward" or "step 1 update". "set-up" precedes the
            first step, and "end" follows the last one.
        event_index: Index of the first event of the phase.
    """

    phase: str
    event_index: int


@dataclass(frozen=True)
class Trace:
    """Allocation events of traced training steps.

    Attributes:
        events: Allocations and frees, in order.
        phase_starts: Starts of the phases, in order. With gradient accumulation, "forward" and "backward" of a step
            start once for each micro-batch.
        operations: Number of calls of each operation, by name.
        caveats: Assumptions and known gaps of the trace, as sentences.
        work: Floating point operations and memory traffic by phase. Empty if they were not counted.
        unsure_bytes: Bytes that a run might need in addition, such as a kernel's workspace of unknown size.
    """

    events: list[MemoryEvent]
    phase_starts: list[PhaseStart]
    operations: dict[str, int]
    caveats: tuple[str, ...]
    work: dict[str, StepWork] = field(default_factory=dict)
    unsure_bytes: int = 0

    @property
    def phases(self) -> dict[str, int]:
        """Index of the first event of each phase, by name. If a phase starts several times, its first start counts."""
        first_indices: dict[str, int] = {}
        for phase, index in self.phase_starts:
            first_indices.setdefault(phase, index)
        return first_indices

    @property
    def memory(self) -> StepMemory:
        """The part of the trace from which the peak memory follows."""
        return StepMemory(self.events, self.unsure_bytes)
