"""Detect evaluations, and record the state at their start, so that a resumed run can repeat them.

After a save during an evaluation, the resumed run continues with the state at the evaluation's start, right after the
last update. An evaluation between two epochs is repeated completely. For this purpose, the loaders' positions and RNG
states at the end of the training pass are recorded. An evaluation within an epoch is not repeated, because the loop
continues with the next training batch. The next evaluation reads its loader from the start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from headway.core.checkpoint.resume.training_passes import TrainingPasses
from headway.core.data.loader import PreparedLoader
from headway.core.training.prepared.objects import SchedulerEntry
from headway.core.training.windows import AccumulationWindows


@dataclass(frozen=True)
class EvaluationStart:
    """State of the run immediately before an evaluation.

    Attributes:
        rng_states: RNG states before the evaluation. None: a resumed run uses those at the time of the save.
        loader_states: States of all loaders before the evaluation.
        epoch: Epoch at which a resumed run continues.
        num_windows: Number of accumulation windows that had begun before the evaluation. When another window begins,
            the evaluation is over and this object is outdated.
        finished_passes: Number of finished passes of the epoch that a resumed run skips, by the loaders' seeds.
        num_calls: For each learning rate scheduler, the number of `step` calls before the evaluation that do not depend
            on updates.
    """

    rng_states: dict[str, Any] | None
    loader_states: list[dict[str, Any]]
    epoch: int
    num_windows: int
    finished_passes: dict[int, int]
    num_calls: list[int]


class PassSnapshot(NamedTuple):
    """State at the start of a pass over a loader.

    Attributes:
        num_windows: Number of accumulation windows that had begun before the pass.
        loader_state: State of the loader.
    """

    num_windows: int
    loader_state: dict[str, Any]


@dataclass
class EvaluationDetector:
    """Detector of evaluations, which are passes over loaders without training.

    It also records the state of the run before each evaluation, from which a resumed run continues. A pass over a
    loader counts as an evaluation if no accumulation window has begun in this pass or an earlier one over the loader.
    In addition, windows must have begun in passes over another loader.

    Attributes:
        accumulation: Accumulation windows of the run, with their number and the loaders that are being iterated.
        loaders: Prepared loaders. The run may add loaders to this list later.
        read_rng_states: Function that reads the RNG states.
        compute_next_epoch: Function that returns the epoch at which a resumed run would continue.
        passes: Finished training passes of the epoch.
        schedules: Prepared learning rate schedulers. The run may add schedulers to this list later.
    """

    accumulation: AccumulationWindows
    loaders: Sequence[PreparedLoader]
    read_rng_states: Callable[[], dict[str, Any]]
    compute_next_epoch: Callable[[], int]
    passes: TrainingPasses
    schedules: Sequence[SchedulerEntry]
    _pass_starts: dict[int, PassSnapshot] = field(default_factory=dict, init=False)
    """Start of the current or last pass over each loader, by the loader's seed."""
    _recorded_start: EvaluationStart | None = field(default=None, init=False)
    """State when an evaluation could last have begun. It is outdated once another accumulation window begins."""

    def record_request(self, loader: PreparedLoader) -> None:
        """Record that the loop is about to request a batch from a loader."""
        accumulation = self.accumulation
        if loader.has_no_batch_yet:
            self._pass_starts[loader.seed] = PassSnapshot(
                accumulation.num_windows, loader.checkpoint_state(is_brief=True)
            )
            # A resumed pass might have no batches left. Its start is then also its end.
            if len(accumulation.reads.active_loaders) > 1 or loader.num_consumed:
                self._recorded_start = self._make_start()
        elif loader.is_last and not self.is_evaluation(loader) and not accumulation.is_unfinished:
            self._recorded_start = self._make_start()

    def is_evaluation(self, loader: PreparedLoader) -> bool:
        """Whether the current pass over a loader is an evaluation.

        It is one if no accumulation window has begun in this pass or in an earlier pass over the loader.
        """
        start = self._pass_starts.get(loader.seed)
        has_trained = any(each.seed == loader.seed for each in self.accumulation.reads.read_in_training)
        return start is not None and start.num_windows == self.accumulation.num_windows and not has_trained

    def find_start(self, *, reenters_epoch: bool) -> EvaluationStart | None:
        """Return the position that a save must store if an evaluation is in progress, else None.

        Also return None if no loader has been used for training yet.

        Args:
            reenters_epoch: Whether a resumed run enters the epoch again and repeats its evaluations. False: only the
                evaluations in progress are repeated.
        """
        if not self.accumulation.reads.trained_on:
            return None  # a loader that is only read continues at its position, and so does one before its first update
        if not any(each.is_unfinished and self.is_evaluation(each) for each in self.loaders):
            return None
        return self.get_start() if reenters_epoch else replace(self._make_start(), rng_states=None)

    @property
    def is_within_training_pass(self) -> bool:
        """Whether a pass over a training loader is in progress."""
        return any(each.is_running and each.is_unfinished for each in self.accumulation.reads.trained_on)

    def get_start(self) -> EvaluationStart:
        """Return the state at the start of the evaluation in progress.

        A save stores it in place of the current state. If no start has been recorded since the last accumulation window
        began, return the current state, with each evaluated loader at the start of its pass.
        """
        recorded = self._recorded_start
        if recorded is not None and recorded.num_windows == self.accumulation.num_windows:
            return recorded
        return self._make_start()

    def discard_positions(self) -> None:
        """Discard the recorded positions. Called after a state has been loaded."""
        self._pass_starts.clear()
        self._recorded_start = None

    def _make_start(self) -> EvaluationStart:
        """Return the state of the run at this moment, at which an evaluation begins."""
        return EvaluationStart(
            rng_states=self.read_rng_states(),
            loader_states=[self._get_rewound_state(each) for each in self.loaders],
            epoch=self.compute_next_epoch(),
            num_windows=self.accumulation.num_windows,
            finished_passes=self.passes.count_finished(),
            num_calls=[each.num_calls for each in self.schedules],
        )

    def _get_rewound_state(self, loader: PreparedLoader) -> dict[str, Any]:
        """Return a loader's state. During an evaluation over the loader, return its state at the evaluation's start."""
        if not loader.is_running or loader.has_no_batch_yet or not self.is_evaluation(loader):
            return loader.checkpoint_state()
        return self._pass_starts[loader.seed].loader_state
