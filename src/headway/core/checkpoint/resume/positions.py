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
from typing import Any

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

    A save within the window stores this state in place of the current state. `rng_states` and `changed` are recorded
    only in runs that are expected to save.

    Attributes:
        rng_states: RNG states. None if the run is not expected to save.
        loaders: State of each loader.
        epoch: Epoch of the loop. A window that continues in the next epoch starts in the epoch before it.
        over: Number of finished passes of that epoch, by the loaders' seeds.
        num_calls: For each learning rate scheduler, the number of `step` calls without an update.
        local_steps: For each model, the number of steps made in its local SGD block. None if it is in no such block.
        pieces: State of automatic micro-batching: the limit on rows per micro-batch, and the search for it. Empty if
            batches are not split automatically.
        changed: Copies of the buffers and extra state, which forward passes can change. None if the run is not expected
            to save.
    """

    rng_states: dict[str, Any] | None
    loaders: list[dict[str, Any]]
    epoch: int
    over: dict[int, int]
    num_calls: list[int]
    local_steps: list[int | None]
    pieces: dict[str, int | None]
    changed: "WindowStartCopies | None" = None


class WindowStartCopies:
    """Copies of the models' buffers and extra state at the start of an accumulation window.

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
        now = {
            name: buffer.detach()
            for index, model in enumerate(models)
            for name, buffer in _iterate_buffers(index, model)
        }
        fits = self._buffers.keys() == now.keys() and all(_is_like(self._buffers[name], now[name]) for name in now)
        if not fits:
            self._buffers = {name: buffer.clone() for name, buffer in now.items()}
        elif now:
            foreach_copy_(list(self._buffers.values()), [now[name] for name in self._buffers])
        self._extra = [
            {name: copy.deepcopy(module.get_extra_state()) for name, module in _with_extra_state(model)}
            for model in models
        ]

    def put_into(self, collected: CollectedState) -> None:
        """Replace the buffers and extra states in a collected state with the copies from the start of the window.

        The window is the accumulation window in which `record_state` was called. Parameters and optimizer states are not
        replaced. Names that are missing in `collected` are skipped.
        """
        collected.tensors.update((name, kept) for name, kept in self._buffers.items() if name in collected.tensors)
        for index, (kept, extra) in enumerate(zip(self._extra, collected.state["extra"])):
            for name in kept.keys() & extra.keys():
                for reference in find_references(extra[name]):
                    del collected.tensors[reference["name"]]
                extra[name] = encode_value(kept[name], f"extra/{index}/{name}", collected.tensors)


def has_changing_state(models: Sequence[torch.nn.Module]) -> bool:
    """Whether the models have persistent buffers or extra state, which a forward pass can change."""
    return any(
        any(True for _ in _iterate_buffers(0, model)) or any(True for _ in _with_extra_state(model)) for model in models
    )


def _iterate_buffers(index: int, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) for each persistent buffer of a model. The name is the one in the checkpoint.

    Args:
        index: Index of the model.
        model: Model without wrappers.
    """
    found = [
        (f"model/{index}/{prefix}{'.' if prefix else ''}{name}", buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    yield from rename_bare_items(found)


def _with_extra_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name in the checkpoint, module) for each module of a model that has extra state."""
    found = [
        (f"{prefix}{'.' if prefix else ''}_extra_state", module)
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    ]
    yield from rename_bare_items(found)


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def list_loader_states(loaders: Sequence[PreparedLoader], mark: WindowSnapshot | None) -> list[dict[str, Any]]:
    """Return the states of the loaders.

    For a loader that has been read since the accumulation window began, return its state at that time.

    Args:
        loaders: Prepared loaders.
        mark: State at the start of the accumulation window, or None outside of a window.
    """
    states = [each.run_state() for each in loaders]
    if mark is None:
        return states
    return [
        state if (state["epoch"], state["consumed"]) == (began["epoch"], began["consumed"]) else began
        for state, began in zip(states, mark.loaders)
    ]


def list_loader_lengths(loaders: Sequence[PreparedLoader]) -> list[int | None]:
    """Return, for each loader, the number of samples in an epoch.

    An item is None if the data has no length, or if the dataset can change with the epoch.
    """
    return [_count_samples(each) for each in loaders]


def find_changed_loaders(
    loaders: Sequence[PreparedLoader], saved: SavedRun, collectives: Collectives
) -> tuple[list[str], list[str]]:
    """Compare the numbers of samples of all loaders with the saved ones. Every rank must call it.

    Rank 0's numbers are compared, because one rank can read the data for all ranks. A difference prevents a resume if
    the loader was used for training, or was saved in the middle of a pass.

    Args:
        loaders: Prepared loaders.
        saved: Counters and positions of the saved run.
        collectives: Collectives over all ranks.

    Returns:
        Pair of (differences that prevent a resume, differences that are only reported), one line each.
    """
    trained_on, refused, reported = saved.trained_on, [], []
    for index, (before, now) in enumerate(
        zip(saved.lengths, collectives.broadcast_object(list_loader_lengths(loaders)))
    ):
        if before is None or now is None or before == now:
            continue
        where = f"loader {index} ({type(loaders[index].dataset).__name__})"
        if index in trained_on or saved.loaders[index]["consumed"]:
            refused.append(f"{where} had {before} samples when the checkpoint was saved, and has {now}")
        else:
            reported.append(f"{where}: {before} -> {now} samples")
    return refused, reported


def restore_loader_positions(
    loaders: Sequence[PreparedLoader], saved: SavedRun, is_new: bool, rollback: LoadRollback
) -> None:
    """Restore the saved positions of the loaders.

    Args:
        loaders: Prepared loaders.
        saved: Counters and positions of the saved run.
        is_new: Whether the loaders' data was replaced. If so, they start the epoch at its first batch.
        rollback: Rollback to which an undo step is added before each change.
    """
    for index, (loader, state, seed) in enumerate(zip(loaders, saved.loaders, saved.seeds)):
        rollback.add(f"loader {index}", partial(_put_back, loader, loader.seed, loader.state_dict()))
        _put_back(loader, seed, {"epoch": state["epoch"], "consumed": 0} if is_new else state)


@dataclass
class LaterLoaders:
    """Saved positions of loaders that the script prepares only after the load.

    Attributes:
        saved: Counters and positions of the saved run.
        is_new: Whether the loaders' data was replaced.
        is_past: Whether the epoch in which the run was saved is over. Default: False.
    """

    saved: SavedRun
    is_new: bool
    is_past: bool = False

    def put_back(self, loader: PreparedLoader, index: int, collectives: Collectives) -> bool:
        """Restore the position of a loader that was prepared after the load. Every rank must call it.

        Args:
            loader: Prepared loader.
            index: Index of the loader, by which its saved position is found.
            collectives: Collectives over all ranks.

        Returns:
            Whether the checkpoint has a position for this loader.

        Raises:
            CheckpointError: If `is_new` is False, and the number of samples of a loader that was used for training or
                saved in the middle of a pass has changed.
        """
        saved = self.saved
        if index >= len(saved.loaders):
            return False
        state = saved.loaders[index]
        before, now = saved.lengths[index], collectives.broadcast_object(_count_samples(loader))
        is_other = before is not None and now is not None and before != now
        if is_other and not self.is_new and (index in saved.trained_on or state["consumed"]):
            raise CheckpointError(
                f"loader {index} ({type(loader.dataset).__name__}), prepared after the checkpoint was loaded, had {before} samples "
                f"when that was saved, and has {now}. If this change is intended, load with changed='data'"
            )
        _put_back(loader, saved.seeds[index], {"epoch": state["epoch"], "consumed": 0} if self.is_new else state)
        return True


def _put_back(loader: PreparedLoader, seed: int, state: dict[str, Any]) -> None:
    loader.seed = seed
    loader.load_state_dict(state)


def _count_samples(loader: PreparedLoader) -> int | None:
    """Return the number of samples in an epoch, from torch's own sampler or from the dataset.

    Return None if the data has no length, or if the dataset can change with the epoch.
    """
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
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
        self._windows: dict[int, int] = {}
        self._trained: set[int] = set()
        self._over: dict[int, int] = {}
        self._made_before: dict[int, int] = {}
        self._resumed: dict[int, int] = {}
        self._is_entered_again = False

    def record_request(self, loader: PreparedLoader) -> None:
        """Record that the loop is about to request a batch from a loader."""
        accumulation, seed = self._accumulation, loader.seed
        if loader.is_fresh:
            self._windows[seed] = accumulation.num_windows
            if len(accumulation.active) == 1:
                self._over = {
                    each.seed: self._count_passes(each, loader) for each in self._loaders if each.seed in self._trained
                }
        else:
            self._note_trained(loader)

    def _note_trained(self, loader: PreparedLoader) -> None:
        if self._accumulation.num_windows > self._windows.get(loader.seed, self._accumulation.num_windows):
            self._trained.add(loader.seed)

    def _count_passes(self, loader: PreparedLoader, begun: PreparedLoader) -> int:
        made = loader.num_passes - self._made_before.get(loader.seed, 0) - (loader.seed == begun.seed)
        return made + self._resumed.get(loader.seed, 0)

    def begin_epoch(self) -> None:
        """Record that an epoch of the training loop begins, or that it is entered again after a load."""
        if not self._is_entered_again:
            self._reset_epoch()
        self._is_entered_again = False
        self._made_before = {each.seed: each.num_passes for each in self._loaders}

    def end_epoch(self) -> None:
        """Record that an epoch of the training loop is over."""
        self._is_entered_again = False
        self._reset_epoch()

    def _reset_epoch(self) -> None:
        self._over, self._resumed = {}, {}
        self._trained.clear()

    def add(self, loader: PreparedLoader, count: int | None) -> None:
        """Restore the number of finished passes of a loader that is prepared after the load.

        Args:
            loader: Loader to add.
            count: Number of finished training passes over it in the epoch. None: it was not used for training.
        """
        if count is None:
            return
        self._resumed[loader.seed] = count
        loader.skip_passes(count)
        self._over[loader.seed] = count
        self._trained.add(loader.seed)

    def count_finished(self) -> dict[int, int]:
        """Return, for each training loader, the number of finished passes in the current epoch.

        A run that is resumed from a save at this point skips these passes.

        Returns:
            Mapping from a loader's seed to the number of passes.
        """
        for loader in self._accumulation.active:  # also a loader whose first window has just begun in this pass
            self._note_trained(loader)
        return {seed: self._over.get(seed, 0) for seed in self._trained}

    def state(self, over: Mapping[int, int]) -> list[int | None]:
        """Return the numbers of finished passes as a list by loader index.

        The item of a loader that was not used for training is None.

        Args:
            over: Number of finished passes, by the loaders' seeds.
        """
        return [over.get(each.seed) for each in self._loaders]

    def load(self, counts: Sequence[int | None]) -> None:
        """Restore the numbers of finished passes from a saved run. The loaders' states must be restored first.

        Args:
            counts: For each loader, the number of its finished passes, or None if it was not used for training.
        """
        self._reset_epoch()
        self._resumed = {each.seed: count for each, count in zip(self._loaders, counts) if count is not None}
        for loader in self._loaders:
            loader.skip_passes(self._resumed.get(loader.seed, 0))
        self._over = dict(self._resumed)
        self._is_entered_again = True
        self._trained.update(self._resumed)


@dataclass(frozen=True)
class EvaluationStart:
    """State of the run immediately before an evaluation.

    Attributes:
        rng_states: RNG states before the evaluation. None: a resumed run uses those at the time of the save.
        states: States of all loaders before the evaluation.
        epoch: Epoch at which a resumed run continues.
        num_windows: Number of accumulation windows that had begun before the evaluation. When another window begins,
            the evaluation is over and this object is outdated.
        over: Number of finished passes of the epoch that a resumed run skips, by the loaders' seeds.
        num_calls: For each learning rate scheduler, the number of `step` calls before the evaluation.
    """

    rng_states: dict[str, Any] | None
    states: list[dict[str, Any]]
    epoch: int
    num_windows: int
    over: dict[int, int]
    num_calls: list[int]


@dataclass
class EvaluationStarts:
    """Detector of evaluations, which are passes over loaders without training.

    A pass over a loader counts as an evaluation if no accumulation window has begun in this pass or an earlier one over
    the loader. In addition, windows must have begun in passes over another loader.

    Attributes:
        accumulation: Accumulation windows of the run, with their number and the loaders that are being iterated.
        loaders: Prepared loaders. The run may add loaders to this list later.
        rng_states: Function that reads the RNG states.
        epoch: Function that returns the epoch at which a resumed run would continue.
        passes: Finished training passes of the epoch.
        schedules: Prepared learning rate schedulers. The run may add schedulers to this list later.
    """

    accumulation: AccumulationWindows
    loaders: Sequence[PreparedLoader]
    rng_states: Callable[[], dict[str, Any]]
    epoch: Callable[[], int]
    passes: TrainingPasses
    schedules: Sequence[SchedulerEntry]
    _begun: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict, init=False)
    _beginning: EvaluationStart | None = field(default=None, init=False)

    def record_request(self, loader: PreparedLoader) -> None:
        """Record that the loop is about to request a batch from a loader."""
        accumulation = self.accumulation
        if loader.is_fresh:
            self._begun[loader.seed] = accumulation.num_windows, loader.run_state(is_brief=True)
            # A resumed pass might have no batches left. Its start is then also its end.
            if len(accumulation.active) > 1 or loader.num_consumed:
                self._beginning = self._make_start()
        elif loader.is_last and not self.is_evaluation(loader) and not accumulation.is_unfinished:
            self._beginning = self._make_start()

    def is_evaluation(self, loader: PreparedLoader) -> bool:
        """Whether the current pass over a loader is an evaluation.

        It is one if no accumulation window has begun in this pass or in an earlier pass over the loader.
        """
        windows, _ = self._begun.get(loader.seed, (-1, {}))
        is_read = any(each.seed == loader.seed for each in self.accumulation.read_in_training)
        return windows == self.accumulation.num_windows and not is_read

    def find_start(self, *, goes_back: bool) -> EvaluationStart | None:
        """Return the position that a save must store if an evaluation is in progress, else None.

        Also return None if no loader has been used for training yet.

        Args:
            goes_back: Whether a resumed run enters the epoch again and repeats its evaluations. False: only the
                evaluations in progress are repeated.
        """
        if not self.accumulation.trained_on:
            return None  # a loader that is only read continues at its position, and so does one before its first update
        if not any(each.is_unfinished and self.is_evaluation(each) for each in self.loaders):
            return None
        return self.get_start() if goes_back else replace(self._make_start(), rng_states=None)

    @property
    def is_within_epoch(self) -> bool:
        """Whether a pass over a training loader is in progress."""
        return any(each.is_running and each.is_unfinished for each in self.accumulation.trained_on)

    def get_start(self) -> EvaluationStart:
        """Return the state at the start of the evaluation in progress.

        A save stores it in place of the current state. If no start has been recorded since the last accumulation window
        began, return the current state, with each evaluated loader at the start of its pass.
        """
        known = self._beginning
        if known is not None and known.num_windows == self.accumulation.num_windows:
            return known
        return self._make_start()

    def discard_positions(self) -> None:
        """Discard the recorded positions. Called after a state has been loaded."""
        self._begun.clear()
        self._beginning = None

    def _make_start(self) -> EvaluationStart:
        states = [self._get_rewound_state(each) for each in self.loaders]
        return EvaluationStart(
            self.rng_states(),
            states,
            self.epoch(),
            self.accumulation.num_windows,
            self.passes.count_finished(),
            [each.num_calls for each in self.schedules],
        )

    def _get_rewound_state(self, loader: PreparedLoader) -> dict[str, Any]:
        """Return a loader's state. During an evaluation over the loader, return its state at the evaluation's start."""
        if not loader.is_running or loader.is_fresh or not self.is_evaluation(loader):
            return loader.run_state()
        return self._begun[loader.seed][1]
