"""Where a run that is saved in the middle of an evaluation goes back to: its beginning, right after the last update.

An evaluation between two epochs is run again, whole, after the resume: the loaders and random streams of the training
pass's end are kept for that. One within an epoch is not, as the loop goes on at the next batch; its loader starts over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.checkpoint.resume.passes import TrainingPasses
from headway.data.loader import PreparedLoader
from headway.training.windows import AccumulationWindows


@dataclass(frozen=True)
class EvaluationStart:
    """The moment before an evaluation.

    Attributes:
        streams: the random streams.
        states: of all loaders.
        epoch: with which a resumed run begins.
        num_windows: windows begun by then; with the next one this moment is past.
        over: passes of the epoch that the resumed run does not make again, by the loaders' seeds.
    """

    streams: dict[str, Any]
    states: list[dict[str, Any]]
    epoch: int
    num_windows: int
    over: dict[int, int]


@dataclass
class EvaluationStarts:
    """Watches passes over loaders for those in which nothing is trained.

    Attributes:
        accumulation: counts windows, and knows the loaders in iteration.
        loaders: gives all prepared ones.
        streams: reads the random streams.
        epoch: the one that a resumed run would begin with.
        passes: which of the epoch's are over.
    """

    accumulation: AccumulationWindows
    loaders: Callable[[], Sequence[PreparedLoader]]
    streams: Callable[[], dict[str, Any]]
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
                self._take()
        elif loader.is_last and not self.is_one(loader) and not accumulation.is_unfinished:
            self._take()

    def is_one(self, loader: PreparedLoader) -> bool:
        """Is the pass over this loader an evaluation: has no window begun in it, nor in any before?"""
        windows, _ = self._begun.get(loader.seed, (-1, {}))
        is_trained_on = any(each.seed == loader.seed for each in self.accumulation.trained_on)
        return windows == self.accumulation.num_windows and not is_trained_on

    def beginning(self) -> EvaluationStart:
        """What a save in this evaluation takes for the loaders, the streams and the epoch."""
        known = self._beginning
        if known is not None and known.num_windows == self.accumulation.num_windows:
            return known
        return self._now()

    def forget(self) -> None:
        """The run went elsewhere: a state was loaded."""
        self._begun.clear()
        self._beginning = None

    def _take(self) -> None:
        self._beginning = self._now()

    def _now(self) -> EvaluationStart:
        states = [self._rewound(each) for each in self.loaders()]
        return EvaluationStart(self.streams(), states, self.epoch(), self.accumulation.num_windows, self.passes.over())

    def _rewound(self, loader: PreparedLoader) -> dict[str, Any]:
        """The loader's state; that of an evaluation in progress as it was when it began."""
        if not loader.is_running or loader.is_fresh or not self.is_one(loader):
            return loader.run_state()
        return self._begun[loader.seed][1]
