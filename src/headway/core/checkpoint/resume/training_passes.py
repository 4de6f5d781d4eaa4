"""Count the finished training passes over loaders, so that a resumed run does not repeat them.

A loop can read several loaders one after the other. In this example, a run that resumes from the save enters the epoch
again, and its pass over `first` is empty::

    for epoch in accelerator.epochs(n):
        for batch in first: ...
        for batch in second: ...     # saved here
"""

from collections.abc import Mapping, Sequence

from headway.core.data.loader import PreparedLoader
from headway.core.training.windows import AccumulationWindows


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
        self._trained_seeds: set[int] = set()
        """Loaders that were used for training in the current epoch."""
        self._finished_passes: dict[int, int] = {}
        """Number of training passes in the epoch that ended before the current outermost pass began."""
        self._passes_before_epoch: dict[int, int] = {}
        """Value of `PreparedLoader.num_passes` when the epoch began."""
        self._resumed_passes: dict[int, int] = {}
        """Number of passes in the epoch that the saved run had finished."""
        self._reenters_epoch = False
        """Whether a state was loaded, and the loop has not begun an epoch since."""

    def record_request(self, loader: PreparedLoader) -> None:
        """Record that the loop is about to request a batch from a loader."""
        accumulation, seed = self._accumulation, loader.seed
        if loader.has_no_batch_yet:
            self._num_windows_at_start[seed] = accumulation.num_windows
            is_outermost = len(accumulation.reads.active_loaders) == 1  # no other pass is in progress
            if is_outermost:
                self._finished_passes = {
                    each.seed: self._count_passes(each, loader)
                    for each in self._loaders
                    if each.seed in self._trained_seeds
                }
        else:
            self._note_trained(loader)

    def _note_trained(self, loader: PreparedLoader) -> None:
        """Record that a loader is used for training if an accumulation window has begun during its current pass."""
        num_windows = self._accumulation.num_windows
        if num_windows > self._num_windows_at_start.get(loader.seed, num_windows):
            self._trained_seeds.add(loader.seed)

    def _count_passes(self, loader: PreparedLoader, current: PreparedLoader) -> int:
        """Return the number of finished passes over a loader in the current epoch.

        Args:
            loader: Loader whose passes are counted.
            current: Loader over which a pass has just begun. `num_passes` already includes this pass.
        """
        num_passes = loader.num_passes - self._passes_before_epoch.get(loader.seed, 0)
        if loader.seed == current.seed:
            num_passes -= 1  # the pass that has just begun
        return num_passes + self._resumed_passes.get(loader.seed, 0)

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
        """Forget the passes of the epoch that has ended."""
        self._finished_passes, self._resumed_passes = {}, {}
        self._trained_seeds.clear()

    def restore_loader(self, loader: PreparedLoader, count: int | None) -> None:
        """Restore the number of finished passes of a loader that is prepared after the load.

        Args:
            loader: Loader that was prepared.
            count: Number of finished training passes over it in the epoch. None: it was not used for training.
        """
        if count is None:
            return
        self._resumed_passes[loader.seed] = count
        loader.skip_passes(count)
        self._finished_passes[loader.seed] = count
        self._trained_seeds.add(loader.seed)

    def count_finished(self) -> dict[int, int]:
        """Return, for each training loader, the number of finished passes in the current epoch.

        A run that is resumed from a save at this point skips these passes.

        Returns:
            Mapping from a loader's seed to the number of passes.
        """
        # Active loaders include one whose first window has just begun in this pass.
        for loader in self._accumulation.reads.active_loaders:
            self._note_trained(loader)
        return {seed: self._finished_passes.get(seed, 0) for seed in self._trained_seeds}

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
        self._resumed_passes = {each.seed: count for each, count in zip(self._loaders, counts) if count is not None}
        for loader in self._loaders:
            loader.skip_passes(self._resumed_passes.get(loader.seed, 0))
        self._finished_passes = dict(self._resumed_passes)
        self._reenters_epoch = True
        self._trained_seeds.update(self._resumed_passes)
