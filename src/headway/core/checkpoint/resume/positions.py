"""Position of a run: loaders, finished passes, evaluations in progress, and the start of the accumulation window.

A checkpoint stores the positions of the loaders. A load checks whether their data still has the same length.

A run that resumes in the middle of an epoch does not repeat the passes that are finished. A loop can read several
loaders one after the other. In this example, a run that resumes from the save enters the epoch again, and its pass over
`first` is empty::

    for epoch in accelerator.epochs(n):
        for batch in first: ...
        for batch in second: ...     # saved here

After a save during an evaluation, the resumed run continues with the state at the evaluation's start, right after the
last update. An evaluation between two epochs is repeated completely. For this purpose, the loaders' positions and RNG
states at the end of the training pass are recorded. An evaluation within an epoch is not repeated, because the loop
continues with the next training batch. The next evaluation reads its loader from the start.

After a save in the middle of an accumulation window (the micro-batches of one update), the resumed run continues at the
window's start (`WindowSnapshot`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import sampler as samplers

from headway.core.checkpoint._torch import foreach_copy_
from headway.core.checkpoint.format.values import encode_value, find_references
from headway.core.checkpoint.loading.restoring import LoadRollback
from headway.core.checkpoint.resume.saved import SavedRun
from headway.core.checkpoint.state import CollectedState
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.checked import Collectives
from headway.core.training.prepared.objects import SchedulerEntry
from headway.core.training.windows import AccumulationWindows
from headway.core.weights.compiled import rename_bare_items
from headway.errors import CheckpointError


@dataclass
class WindowSnapshot:
    """State at the start of an accumulation window, which is the series of micro-batches of one update.

    A save within the window stores this state in place of the current state. `rng_states` and `forward_state` are
    recorded only in runs that are expected to save.

    Attributes:
        rng_states: RNG states. None if the run is not expected to save.
        loaders: State of each loader.
        epoch: Epoch of the loop. A window that continues in the next epoch starts in the epoch before it.
        finished_passes: Number of finished passes of that epoch, by the loaders' seeds.
        num_calls: For each learning rate scheduler, the number of `step` calls that do not depend on updates.
        local_steps: For each model, the number of steps made in its local SGD block. None if it is in no such block.
        pieces: State of automatic micro-batching: the limit on rows per micro-batch, and the search for it. Empty if
            batches are not split automatically.
        forward_state: Copies of the buffers and extra state, which forward passes can change. None if the run is not
            expected to save.
    """

    rng_states: dict[str, Any] | None
    loaders: list[dict[str, Any]]
    epoch: int
    finished_passes: dict[int, int]
    num_calls: list[int]
    local_steps: list[int | None]
    pieces: dict[str, int | None]
    forward_state: "ForwardStateCopies | None" = None


class ForwardStateCopies:
    """Copies of the state that forward passes change, buffers and extra state, at the start of an accumulation window.

    A resumed run repeats the window's forward passes. If it started from the buffers at the time of the save, batch
    norm would count these passes twice. The memory of the copies is reused in each window.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._extra: list[dict[str, Any]] = []

    def record_state(self, models: Sequence[torch.nn.Module]) -> None:
        """Copy the current persistent buffers and extra states of the models.

        Args:
            models: Models without wrappers.
        """
        current = {
            name: buffer.detach()
            for index, model in enumerate(models)
            for name, buffer in _iterate_buffers(index, model)
        }
        can_reuse = self._buffers.keys() == current.keys() and all(
            _has_equal_layout(self._buffers[name], current[name]) for name in current
        )
        if not can_reuse:
            self._buffers = {name: buffer.clone() for name, buffer in current.items()}
        elif current:
            foreach_copy_(list(self._buffers.values()), [current[name] for name in self._buffers])
        self._extra = [
            {name: copy.deepcopy(module.get_extra_state()) for name, module in _iterate_extra_state_modules(model)}
            for model in models
        ]

    def replace_state(self, collected: CollectedState) -> None:
        """Replace the buffers and extra states in a collected state with the copies from the start of the window.

        The window is the accumulation window in which `record_state` was called. Parameters and optimizer states are not
        replaced. Names that are missing in `collected` are skipped.
        """
        collected.tensors.update((name, values) for name, values in self._buffers.items() if name in collected.tensors)
        for index, (copies, extra) in enumerate(zip(self._extra, collected.state["extra"])):
            for name in copies.keys() & extra.keys():
                for reference in find_references(extra[name]):
                    del collected.tensors[reference["name"]]
                extra[name] = encode_value(copies[name], f"extra/{index}/{name}", collected.tensors)


def has_changing_state(models: Sequence[torch.nn.Module]) -> bool:
    """Whether the models have persistent buffers or extra state, which a forward pass can change."""
    return any(
        any(True for _ in _iterate_buffers(0, model)) or any(True for _ in _iterate_extra_state_modules(model))
        for model in models
    )


def _iterate_buffers(index: int, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) for each persistent buffer of a model. The name is the one in the checkpoint.

    Args:
        index: Index of the model.
        model: Model without wrappers.
    """
    named = [
        (f"model/{index}/{prefix}{'.' if prefix else ''}{name}", buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    yield from rename_bare_items(named)


def _iterate_extra_state_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name in the checkpoint, module) for each module of a model that has extra state."""
    named = [
        (f"{prefix}{'.' if prefix else ''}_extra_state", module)
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    ]
    yield from rename_bare_items(named)


def _has_equal_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def list_loader_states(loaders: Sequence[PreparedLoader], window_start: WindowSnapshot | None) -> list[dict[str, Any]]:
    """Return the states of the loaders.

    For a loader that has been read since the accumulation window began, return its state at that time.

    Args:
        loaders: Prepared loaders.
        window_start: State at the start of the accumulation window, or None outside of a window.
    """
    current_states = [each.checkpoint_state() for each in loaders]
    if window_start is None:
        return current_states
    states = []
    for current, earlier in zip(current_states, window_start.loaders):
        is_unread = (current["epoch"], current["consumed"]) == (earlier["epoch"], earlier["consumed"])
        # At an equal position the current state is better, because the snapshot's lacks states for the latest batch.
        states.append(current if is_unread else earlier)
    return states


def list_loader_lengths(loaders: Sequence[PreparedLoader]) -> list[int | None]:
    """Return, for each loader, the number of samples in an epoch.

    An item is None if the data has no length, or if the dataset can change with the epoch.
    """
    return [_count_samples(each) for each in loaders]


class Differences(NamedTuple):
    """Differences between the saved run and this run, one line each.

    Attributes:
        refused: Differences that prevent a resume.
        reported: Differences that are only reported.
    """

    refused: list[str]
    reported: list[str]


def find_changed_loaders(
    loaders: Sequence[PreparedLoader], saved_run: SavedRun, collectives: Collectives
) -> Differences:
    """Compare the numbers of samples of all loaders with the saved ones. Every rank must call it.

    Rank 0's numbers are compared, because one rank can read the data for all ranks. A difference prevents a resume if
    the loader was used for training, or was saved in the middle of a pass.

    Args:
        loaders: Prepared loaders.
        saved_run: Counters and positions of the saved run.
        collectives: Collectives over all ranks.
    """
    refused, reported = [], []
    for index, (before, now) in enumerate(
        zip(saved_run.lengths, collectives.broadcast_object(list_loader_lengths(loaders)))
    ):
        if before is None or now is None or before == now:
            continue
        where = f"loader {index} ({type(loaders[index].dataset).__name__})"
        if index in saved_run.trained_on or saved_run.loaders[index]["consumed"]:
            refused.append(f"{where} had {before} samples when the checkpoint was saved, and has {now}")
        else:
            reported.append(f"{where}: {before} -> {now} samples")
    return Differences(refused, reported)


def restore_loader_positions(
    loaders: Sequence[PreparedLoader], saved_run: SavedRun, is_data_replaced: bool, rollback: LoadRollback
) -> None:
    """Restore the saved positions of the loaders.

    Args:
        loaders: Prepared loaders.
        saved_run: Counters and positions of the saved run.
        is_data_replaced: Whether the loaders' data was replaced. If so, they start the epoch at its first batch.
        rollback: Rollback to which an undo step is added before each change.
    """
    for index, (loader, state, seed) in enumerate(zip(loaders, saved_run.loaders, saved_run.seeds)):
        rollback.add(f"loader {index}", partial(_set_position, loader, loader.seed, loader.state_dict()))
        _set_position(loader, seed, {"epoch": state["epoch"], "consumed": 0} if is_data_replaced else state)


@dataclass
class LaterLoaders:
    """Saved positions of loaders that the script prepares only after the load.

    Attributes:
        saved_run: Counters and positions of the saved run.
        is_data_replaced: Whether the loaders' data was replaced. Each loader then starts the epoch at its first batch.
        is_epoch_over: Whether the epoch in which the run was saved is over. Default: False.
    """

    saved_run: SavedRun
    is_data_replaced: bool
    is_epoch_over: bool = False

    def restore_position(self, loader: PreparedLoader, index: int, collectives: Collectives) -> bool:
        """Restore the position of a loader that was prepared after the load. Every rank must call it.

        Args:
            loader: Prepared loader.
            index: Index of the loader, by which its saved position is found.
            collectives: Collectives over all ranks.

        Returns:
            Whether the checkpoint has a position for this loader.

        Raises:
            CheckpointError: If `is_data_replaced` is False, and the number of samples of a loader that was used for training or
                saved in the middle of a pass has changed.
        """
        saved_run = self.saved_run
        if index >= len(saved_run.loaders):
            return False
        state = saved_run.loaders[index]
        before, now = saved_run.lengths[index], collectives.broadcast_object(_count_samples(loader))
        has_changed = before is not None and now is not None and before != now
        if has_changed and not self.is_data_replaced and (index in saved_run.trained_on or state["consumed"]):
            raise CheckpointError(
                f"loader {index} ({type(loader.dataset).__name__}), prepared after the checkpoint was loaded, had {before} samples "
                f"when that was saved, and has {now}. If this change is intended, load with changed='data'"
            )
        if self.is_data_replaced:
            state = {"epoch": state["epoch"], "consumed": 0}
        _set_position(loader, saved_run.seeds[index], state)
        return True


def _set_position(loader: PreparedLoader, seed: int, state: dict[str, Any]) -> None:
    loader.seed = seed
    loader.load_state_dict(state)


def _count_samples(loader: PreparedLoader) -> int | None:
    """Return the number of samples in an epoch, from torch's own sampler or from the dataset.

    Return None if the data has no length, or if the dataset can change with the epoch.
    """
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    # torch's own samplers know the number of samples, which can differ from the dataset's. Others might not have a length.
    counted: Any = sampler if type(sampler).__module__ == samplers.__name__ else loader.dataset
    if callable(getattr(loader.dataset, "set_epoch", None)):
        return None
    try:
        return len(counted)
    except (TypeError, NotImplementedError):
        return None


class TrainingPasses:
    """Counter of the finished training passes over each loader in the loop's current epoch.

    Only passes that ended before the current outermost pass began are counted. A pass over a loader inside another
    loader's loop, or in a `zip` with it, belongs to the outer pass. It is not counted while the outer pass is in
    progress.

    Args:
        accumulation: Accumulation windows of the run, with their number and the loaders that are being iterated.
        loaders: Prepared loaders. The run may add loaders to this list later.
    """

    def __init__(self, accumulation: AccumulationWindows, loaders: Sequence[PreparedLoader]) -> None:
        self._accumulation = accumulation
        self._loaders = loaders
        # All keys and items are seeds of loaders, which identify a loader even through a view that skips batches.
        self._num_windows_at_start: dict[int, int] = {}
        """Number of accumulation windows that had begun before the current pass over a loader."""
        self._trained: set[int] = set()
        """Loaders that were used for training in the current epoch."""
        self._finished: dict[int, int] = {}
        """Number of training passes in the epoch that ended before the current outermost pass began."""
        self._passes_before_epoch: dict[int, int] = {}
        """Value of `PreparedLoader.num_passes` when the epoch began."""
        self._resumed: dict[int, int] = {}
        """Number of passes in the epoch that the saved run had finished."""
        self._reenters_epoch = False
        """Whether a state was loaded, and the loop has not begun an epoch since."""

    def record_request(self, loader: PreparedLoader) -> None:
        """Record that the loop is about to request a batch from a loader."""
        accumulation, seed = self._accumulation, loader.seed
        if loader.has_no_batch_yet:
            self._num_windows_at_start[seed] = accumulation.num_windows
            if len(accumulation.active) == 1:  # no other pass is in progress, so this one is the outermost
                self._finished = {
                    each.seed: self._count_passes(each, loader) for each in self._loaders if each.seed in self._trained
                }
        else:
            self._note_trained(loader)

    def _note_trained(self, loader: PreparedLoader) -> None:
        num_windows = self._accumulation.num_windows
        if num_windows > self._num_windows_at_start.get(loader.seed, num_windows):
            self._trained.add(loader.seed)

    def _count_passes(self, loader: PreparedLoader, current: PreparedLoader) -> int:
        """Return the number of finished passes over a loader in the current epoch.

        Args:
            loader: Loader whose passes are counted.
            current: Loader over which a pass has just begun. `num_passes` already includes this pass.
        """
        num_passes = loader.num_passes - self._passes_before_epoch.get(loader.seed, 0) - (loader.seed == current.seed)
        return num_passes + self._resumed.get(loader.seed, 0)

    def begin_epoch(self) -> None:
        """Record that an epoch of the training loop begins, or that it is entered again after a load."""
        if not self._reenters_epoch:
            self._reset_epoch()
        self._reenters_epoch = False
        self._passes_before_epoch = {each.seed: each.num_passes for each in self._loaders}

    def end_epoch(self) -> None:
        """Record that an epoch of the training loop is over."""
        self._reenters_epoch = False
        self._reset_epoch()

    def _reset_epoch(self) -> None:
        self._finished, self._resumed = {}, {}
        self._trained.clear()

    def restore_loader(self, loader: PreparedLoader, count: int | None) -> None:
        """Restore the number of finished passes of a loader that is prepared after the load.

        Args:
            loader: Loader that was prepared.
            count: Number of finished training passes over it in the epoch. None: it was not used for training.
        """
        if count is None:
            return
        self._resumed[loader.seed] = count
        loader.skip_passes(count)
        self._finished[loader.seed] = count
        self._trained.add(loader.seed)

    def count_finished(self) -> dict[int, int]:
        """Return, for each training loader, the number of finished passes in the current epoch.

        A run that is resumed from a save at this point skips these passes.

        Returns:
            Mapping from a loader's seed to the number of passes.
        """
        for loader in self._accumulation.active:  # also a loader whose first window has just begun in this pass
            self._note_trained(loader)
        return {seed: self._finished.get(seed, 0) for seed in self._trained}

    def list_by_loader(self, finished_passes: Mapping[int, int]) -> list[int | None]:
        """Return numbers of finished passes as a list by loader index, as a checkpoint stores them.

        The item of a loader that was not used for training is None.

        Args:
            finished_passes: Number of finished passes, by the loaders' seeds.
        """
        return [finished_passes.get(each.seed) for each in self._loaders]

    def restore(self, counts: Sequence[int | None]) -> None:
        """Restore the numbers of finished passes from a saved run. The loaders' states must be restored first.

        Args:
            counts: For each loader, the number of its finished passes, or None if it was not used for training.
        """
        self._reset_epoch()
        self._resumed = {each.seed: count for each, count in zip(self._loaders, counts) if count is not None}
        for loader in self._loaders:
            loader.skip_passes(self._resumed.get(loader.seed, 0))
        self._finished = dict(self._resumed)
        self._reenters_epoch = True
        self._trained.update(self._resumed)


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


class PassStart(NamedTuple):
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
    _pass_starts: dict[int, PassStart] = field(default_factory=dict, init=False)
    """Start of the current or last pass over each loader, by the loader's seed."""
    _recorded_start: EvaluationStart | None = field(default=None, init=False)
    """State when an evaluation could last have begun. It is outdated once another accumulation window begins."""

    def record_request(self, loader: PreparedLoader) -> None:
        """Record that the loop is about to request a batch from a loader."""
        accumulation = self.accumulation
        if loader.has_no_batch_yet:
            self._pass_starts[loader.seed] = PassStart(accumulation.num_windows, loader.checkpoint_state(is_brief=True))
            # A resumed pass might have no batches left. Its start is then also its end.
            if len(accumulation.active) > 1 or loader.num_consumed:
                self._recorded_start = self._make_start()
        elif loader.is_last and not self.is_evaluation(loader) and not accumulation.is_unfinished:
            self._recorded_start = self._make_start()

    def is_evaluation(self, loader: PreparedLoader) -> bool:
        """Whether the current pass over a loader is an evaluation.

        It is one if no accumulation window has begun in this pass or in an earlier pass over the loader.
        """
        start = self._pass_starts.get(loader.seed)
        has_trained = any(each.seed == loader.seed for each in self.accumulation.read_in_training)
        return start is not None and start.num_windows == self.accumulation.num_windows and not has_trained

    def find_start(self, *, reenters_epoch: bool) -> EvaluationStart | None:
        """Return the position that a save must store if an evaluation is in progress, else None.

        Also return None if no loader has been used for training yet.

        Args:
            reenters_epoch: Whether a resumed run enters the epoch again and repeats its evaluations. False: only the
                evaluations in progress are repeated.
        """
        if not self.accumulation.trained_on:
            return None  # a loader that is only read continues at its position, and so does one before its first update
        if not any(each.is_unfinished and self.is_evaluation(each) for each in self.loaders):
            return None
        return self.get_start() if reenters_epoch else replace(self._make_start(), rng_states=None)

    @property
    def is_within_training_pass(self) -> bool:
        """Whether a pass over a training loader is in progress."""
        return any(each.is_running and each.is_unfinished for each in self.accumulation.trained_on)

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
