"""Where a run's loaders stand: what a checkpoint keeps of them, and whether what they read is still what it was."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.utils.data import sampler as samplers

from headway.checkpoint.loading.rollback import LoadRollback
from headway.checkpoint.resume.marks import WindowSnapshot
from headway.checkpoint.resume.saved import SavedRun
from headway.data.loader import PreparedLoader
from headway.runtime.collectives.checked import Collectives


class LoaderPositions:
    """The loaders of a run.

    Args:
        loaders: the prepared loaders; the list grows.
        collectives: among all ranks.
    """

    def __init__(self, loaders: Sequence[PreparedLoader], collectives: Collectives) -> None:
        self._loaders = loaders
        self._collectives = collectives

    def __len__(self) -> int:
        return len(self._loaders)

    def states(self, mark: WindowSnapshot | None) -> list[dict[str, Any]]:
        """Each loader's state; one that has moved since the mark goes back to it."""
        states = [each.run_state() for each in self._loaders]
        if mark is None:
            return states
        return [
            state if (state["epoch"], state["consumed"]) == (began["epoch"], began["consumed"]) else began
            for state, began in zip(states, mark.loaders)
        ]

    def lengths(self) -> list[int | None]:
        """For each loader, the samples of its data; None where nobody knows."""
        return [_num_samples(each) for each in self._loaders]

    def changed(self, saved: SavedRun) -> tuple[list[str], list[str]]:
        """(what a run cannot go on with, what is only not as it was) of loaders whose data have another length now; a line each.

        The ranks read the same; where one reads for all, it is rank 0. Every rank calls it.
        """
        trained_on, refused, told = saved.trained_on, [], []
        for index, (before, now) in enumerate(zip(saved.lengths, self._collectives.broadcast_object(self.lengths()))):
            if before is None or now is None or before == now:
                continue
            where = f"loader {index} ({type(self._loaders[index].dataset).__name__})"
            if index in trained_on or saved.loaders[index]["consumed"]:
                refused.append(f"{where} had {before} samples when the checkpoint was saved, and has {now}")
            else:
                told.append(f"{where}: {before} -> {now} samples")
        return refused, told

    def put_back(self, saved: SavedRun, is_new: bool, undo: LoadRollback) -> None:
        """Let them go on from where they were saved.

        Args:
            saved: the run.
            is_new: their data are other ones: they begin the epoch at its first batch.
            undo: learns the way back.
        """
        for index, (loader, state, seed) in enumerate(zip(self._loaders, saved.loaders, saved.seeds)):
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
