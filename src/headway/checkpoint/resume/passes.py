"""Which passes of the loop's epoch are over: a run that resumes in the middle of the epoch does not make them again.

A loop may read several loaders one after the other::

    for epoch in accelerator.epochs(n):
        for batch in first: ...
        for batch in second: ...     # saved here, the resumed run enters the epoch again: its pass over `first` is empty
"""

from collections.abc import Callable, Mapping, Sequence

from headway.data.loader import PreparedLoader
from headway.training.windows import AccumulationWindows


class TrainingPasses:
    """Counts passes in which something was trained, in the loop's epoch.

    Only what was over before the pass in progress began counts: a loader inside another one's loop is read again for each of its
    batches, and one beside it (`zip`) is in progress too.

    Args:
        accumulation: counts windows, and knows the loaders in iteration.
        loaders: gives all prepared ones.
    """

    def __init__(self, accumulation: AccumulationWindows, loaders: Callable[[], Sequence[PreparedLoader]]) -> None:
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
                    each.seed: self._count(each, loader) for each in self._loaders() if each.seed in self._trained
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
        self._made_before = {each.seed: each.num_passes for each in self._loaders()}

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
        return [over.get(each.seed) for each in self._loaders()]

    def load(self, counts: Sequence[int | None]) -> None:
        """The run goes on from there; the loaders have their states already."""
        self._forget()
        self._resumed = {each.seed: count for each, count in zip(self._loaders(), counts) if count is not None}
        for loader in self._loaders():
            loader.pass_over(self._resumed.get(loader.seed, 0))
        self._over, self._is_entered_again = dict(self._resumed), True
        self._trained.update(self._resumed)
