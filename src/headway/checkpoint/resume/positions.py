"""Where a run stands: in its loaders, its passes and evaluations, and where the window began that a save falls into.

Where a run's loaders stand: what a checkpoint keeps of them, and whether what they read is still what it was.

Which passes of the loop's epoch are over: a run that resumes in the middle of the epoch does not make them again.

A loop may read several loaders one after the other::

    for epoch in accelerator.epochs(n):
        for batch in first: ...
        for batch in second: ...     # saved here, the resumed run enters the epoch again: its pass over `first` is empty

Where a run that is saved in the middle of an evaluation goes back to: its beginning, right after the last update.

An evaluation between two epochs is run again, whole, after the resume: the loaders and RNG states of the training
pass's end are kept for that. One within an epoch is not, as the loop goes on at the next batch; its loader starts over.

Where a window began: what a save in its middle goes back to.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import sampler as samplers

from headway.checkpoint.format.values import encode
from headway.checkpoint.loading.restoring import LoadRollback
from headway.checkpoint.resume.saved import SavedRun
from headway.checkpoint.state import CollectedState
from headway.data.loader import PreparedLoader
from headway.runtime.collectives.checked import Collectives
from headway.training.windows import AccumulationWindows


@dataclass
class WindowSnapshot:
    """Where a window began; the generators and what forward changes only in a run that is known to save.

    Attributes:
        rng_states: the RNG states.
        loaders: each loader's state.
        local_steps: of each model in local SGD.
        pieces: how batches are cut.
        changed: what forward changes in the models.
    """

    rng_states: dict[str, Any] | None
    loaders: list[dict[str, Any]]
    local_steps: list[int | None]
    pieces: dict[str, int | None]
    changed: "Changed | None" = None


class Changed:
    """What forward changes in models besides their parameters, as it was when the window began: buffers, extra state.

    A resumed run makes the window's forwards again; with the buffers of its middle, batch norm would count them twice.
    The copies are made again and again in the same memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._extra: list[dict[str, Any]] = []

    def note(self, models: Sequence[torch.nn.Module]) -> None:
        """Copy it."""
        now = {name: buffer.detach() for index, model in enumerate(models) for name, buffer in _buffers(index, model)}
        fits = self._buffers.keys() == now.keys() and all(_is_like(self._buffers[name], now[name]) for name in now)
        if not fits:
            self._buffers = {name: buffer.clone() for name, buffer in now.items()}
        elif now:
            torch._foreach_copy_(list(self._buffers.values()), [now[name] for name in self._buffers])
        self._extra = [
            {name: copy.deepcopy(module.get_extra_state()) for name, module in _with_extra_state(model)}
            for model in models
        ]

    def put_into(self, collected: CollectedState) -> None:
        """Let a state that was collected since hold it in place of what is there now."""
        collected.tensors.update((name, kept) for name, kept in self._buffers.items() if name in collected.tensors)
        for index, (kept, extra) in enumerate(zip(self._extra, collected.state["extra"])):
            for name in kept.keys() & extra.keys():
                extra[name] = encode(kept[name], f"extra/{index}/{name}", collected.tensors)


def has_changing_state(models: Sequence[torch.nn.Module]) -> bool:
    """Is there anything that forward may change?"""
    return any(any(True for _ in _buffers(0, model)) or any(True for _ in _with_extra_state(model)) for model in models)


def _buffers(index: int, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a checkpoint holds, by their names in it."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"model/{index}/{prefix}{'.' if prefix else ''}{name}", buffer


def _with_extra_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{prefix}{'.' if prefix else ''}_extra_state", module


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def loader_states(loaders: Sequence[PreparedLoader], mark: WindowSnapshot | None) -> list[dict[str, Any]]:
    """Each loader's state; one that has moved since the mark goes back to it."""
    states = [each.run_state() for each in loaders]
    if mark is None:
        return states
    return [
        state if (state["epoch"], state["consumed"]) == (began["epoch"], began["consumed"]) else began
        for state, began in zip(states, mark.loaders)
    ]


def loader_lengths(loaders: Sequence[PreparedLoader]) -> list[int | None]:
    """For each loader, the samples of its data; None where nobody knows."""
    return [_num_samples(each) for each in loaders]


def changed_loaders(
    loaders: Sequence[PreparedLoader], saved: SavedRun, collectives: Collectives
) -> tuple[list[str], list[str]]:
    """(what a run cannot go on with, what is only not as it was) of loaders whose data have another length now; a line each.

    The ranks read the same; where one reads for all, it is rank 0. Every rank calls it.
    """
    trained_on, refused, told = saved.trained_on, [], []
    for index, (before, now) in enumerate(zip(saved.lengths, collectives.broadcast_object(loader_lengths(loaders)))):
        if before is None or now is None or before == now:
            continue
        where = f"loader {index} ({type(loaders[index].dataset).__name__})"
        if index in trained_on or saved.loaders[index]["consumed"]:
            refused.append(f"{where} had {before} samples when the checkpoint was saved, and has {now}")
        else:
            told.append(f"{where}: {before} -> {now} samples")
    return refused, told


def put_loaders_back(loaders: Sequence[PreparedLoader], saved: SavedRun, is_new: bool, undo: LoadRollback) -> None:
    """Let them go on from where they were saved.

    Args:
        loaders: the prepared ones.
        saved: the run.
        is_new: their data are other ones: they begin the epoch at its first batch.
        undo: learns the way back.
    """
    for index, (loader, state, seed) in enumerate(zip(loaders, saved.loaders, saved.seeds)):
        undo.add(f"loader {index}", partial(_put_back, loader, loader.seed, loader.state_dict()))
        _put_back(loader, seed, {"epoch": state["epoch"], "consumed": 0} if is_new else state)


def _put_back(loader: PreparedLoader, seed: int, state: dict[str, Any]) -> None:
    loader.seed = seed
    loader.load_state_dict(state)


def _num_samples(loader: PreparedLoader) -> int | None:
    """Of an epoch, by torch's own samplers or the data; None where it has no length, or each epoch may have another one."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    counted: Any = sampler if type(sampler).__module__ == samplers.__name__ else loader.dataset
    if callable(getattr(loader.dataset, "set_epoch", None)):
        return None
    try:
        return len(counted)
    except (TypeError, NotImplementedError):
        return None


class TrainingPasses:
    """Counts passes in which something was trained, in the loop's epoch.

    Only what was over before the pass in progress began counts: a loader inside another one's loop is read again for each of its
    batches, and one beside it (`zip`) is in progress too.

    Args:
        accumulation: counts windows, and knows the loaders in iteration.
        loaders: the prepared ones; the list grows.
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

    def note(self, loader: PreparedLoader) -> None:
        """The loader is about to be asked for a batch."""
        accumulation, seed = self._accumulation, loader.seed
        if loader.is_fresh:
            self._windows[seed] = accumulation.num_windows
            if len(accumulation.active) == 1:
                self._over = {
                    each.seed: self._count(each, loader) for each in self._loaders if each.seed in self._trained
                }
        else:
            self._note_trained(loader)

    def _note_trained(self, loader: PreparedLoader) -> None:
        if self._accumulation.num_windows > self._windows.get(loader.seed, self._accumulation.num_windows):
            self._trained.add(loader.seed)

    def _count(self, loader: PreparedLoader, begun: PreparedLoader) -> int:
        made = loader.num_passes - self._made_before.get(loader.seed, 0) - (loader.seed == begun.seed)
        return made + self._resumed.get(loader.seed, 0)

    def begin_epoch(self) -> None:
        """An epoch of the loop begins, or is entered again."""
        if not self._is_entered_again:
            self._forget()
        self._is_entered_again = False
        self._made_before = {each.seed: each.num_passes for each in self._loaders}

    def end_epoch(self) -> None:
        """It is over."""
        self._is_entered_again = False
        self._forget()

    def _forget(self) -> None:
        self._over, self._resumed = {}, {}
        self._trained.clear()

    def over(self) -> dict[int, int]:
        """How many passes over each loader a run resumed from now has behind it, by the seeds of those that were trained on."""
        for loader in self._accumulation.active:  # one in whose pass the first window has just been made
            self._note_trained(loader)
        return {seed: self._over.get(seed, 0) for seed in self._trained}

    def state(self, over: Mapping[int, int]) -> list[int | None]:
        """The same by the loaders' numbers; None for one that was not trained on."""
        return [over.get(each.seed) for each in self._loaders]

    def load(self, counts: Sequence[int | None]) -> None:
        """The run goes on from there; the loaders have their states already."""
        self._forget()
        self._resumed = {each.seed: count for each, count in zip(self._loaders, counts) if count is not None}
        for loader in self._loaders:
            loader.pass_over(self._resumed.get(loader.seed, 0))
        self._over, self._is_entered_again = dict(self._resumed), True
        self._trained.update(self._resumed)


@dataclass(frozen=True)
class EvaluationStart:
    """The moment before an evaluation.

    Attributes:
        rng_states: the RNG states.
        states: of all loaders.
        epoch: with which a resumed run begins.
        num_windows: windows begun by then; with the next one this moment is past.
        over: passes of the epoch that the resumed run does not make again, by the loaders' seeds.
    """

    rng_states: dict[str, Any]
    states: list[dict[str, Any]]
    epoch: int
    num_windows: int
    over: dict[int, int]


@dataclass
class EvaluationStarts:
    """Watches passes over loaders for those in which nothing is trained.

    Attributes:
        accumulation: counts windows, and knows the loaders in iteration.
        loaders: the prepared ones; the list grows.
        rng_states: reads the RNG states.
        epoch: the one that a resumed run would begin with.
        passes: which of the epoch's are over.
    """

    accumulation: AccumulationWindows
    loaders: Sequence[PreparedLoader]
    rng_states: Callable[[], dict[str, Any]]
    epoch: Callable[[], int]
    passes: TrainingPasses
    _begun: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict, init=False)
    _beginning: EvaluationStart | None = field(default=None, init=False)

    def note(self, loader: PreparedLoader) -> None:
        """The loader is about to be asked for a batch."""
        accumulation = self.accumulation
        if loader.is_fresh:
            self._begun[loader.seed] = accumulation.num_windows, loader.run_state(is_brief=True)
            # A pass that is resumed may have nothing left: then this is its end.
            if len(accumulation.active) > 1 or loader.num_consumed:
                self._beginning = self._now()
        elif loader.is_last and not self.is_one(loader) and not accumulation.is_unfinished:
            self._beginning = self._now()

    def is_one(self, loader: PreparedLoader) -> bool:
        """Is the pass over this loader an evaluation: has no window begun in it, nor in any before?"""
        windows, _ = self._begun.get(loader.seed, (-1, {}))
        is_trained_on = any(each.seed == loader.seed for each in self.accumulation.trained_on)
        return windows == self.accumulation.num_windows and not is_trained_on

    def beginning(self) -> EvaluationStart:
        """What a save in this evaluation takes for the loaders, the generators and the epoch."""
        known = self._beginning
        if known is not None and known.num_windows == self.accumulation.num_windows:
            return known
        return self._now()

    def forget(self) -> None:
        """The run went elsewhere: a state was loaded."""
        self._begun.clear()
        self._beginning = None

    def _now(self) -> EvaluationStart:
        states = [self._rewound(each) for each in self.loaders]
        return EvaluationStart(
            self.rng_states(), states, self.epoch(), self.accumulation.num_windows, self.passes.over()
        )

    def _rewound(self, loader: PreparedLoader) -> dict[str, Any]:
        """The loader's state; that of an evaluation in progress as it was when it began."""
        if not loader.is_running or loader.is_fresh or not self.is_one(loader):
            return loader.run_state()
        return self._begun[loader.seed][1]
