"""Save and restore the positions of the prepared loaders, and check that their data still has the same length."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import sampler as samplers

from headway.core.checkpoint.loading.rollback import LoadRollback
from headway.core.checkpoint.resume.saved import SavedRun
from headway.core.checkpoint.resume.window_snapshot import WindowSnapshot
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.checked import Collectives


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
    return [count_samples(each) for each in loaders]


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
        rollback.add(f"loader {index}", partial(set_position, loader, loader.seed, loader.state_dict()))
        set_position(loader, seed, {"epoch": state["epoch"], "consumed": 0} if is_data_replaced else state)


def set_position(loader: PreparedLoader, seed: int, state: dict[str, Any]) -> None:
    """Give a loader the seed and the position of a saved loader."""
    loader.seed = seed
    loader.load_state_dict(state)


def count_samples(loader: PreparedLoader) -> int | None:
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
