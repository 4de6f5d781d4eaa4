"""Restore the positions of loaders that a resumed script prepares only after the load, such as in its loop over epochs.

Such a script can prepare a new loader in each epoch, in some epochs, or only in the first epoch that runs. The resumed run
must therefore find out which saved loader a prepared loader continues, and whether it continues one at all::

    for epoch in accelerator.epochs(n):
        if loader is None or epoch % 2 == 0:
            loader = accelerator.prepare(DataLoader(...))

The lines that prepared a loader and the epoch in which they did identify it. If the interrupted run had already read a
loader in the epoch in which it was saved, the answer is certain. If not, only the epochs in which these lines have
prepared loaders so far suggest an answer. One warning then says what Headway assumed.
"""

import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import NamedTuple

from headway.common.callsite import Frame, find_user_frame, is_headway_file, walk_stack
from headway.core.checkpoint.resume.loader_positions import count_samples, set_position
from headway.core.checkpoint.resume.saved import SavedRun
from headway.core.data.loader import LoaderOrigin, PreparedLoader
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)

_SEPARATOR = " < "
_MAX_LINE = 160
"""Maximum number of characters of a source line that are kept."""
_GUESSED = (
    "epoch %d of this resumed run prepared a loader of %s, and the interrupted run had last prepared one there in epoch %d. Headway "
    "assumes %s. If that is wrong, the order of the samples differs from that of an uninterrupted run. To be certain, prepare the "
    "loader before resume(), or in every epoch"
)
_NEW = "that this is a new loader"
_CONTINUED = "that this is the same loader, and continues its order"
_NOT_CONTINUED = (
    "the checkpoint was saved in the middle of a pass over a loader that was prepared in epoch %d (%s), but this resumed run "
    "prepared no such loader in epoch %d, so the rest of that pass was not read. Prepare the loader in the epoch in which the run "
    "resumes, by the same lines, or before resume()"
)


def describe_call_path(loop: CodeType | None) -> str:
    """Return the source lines of user code that led to this call, innermost first, up to the code that runs the loop.

    Each line begins with the name of its function. Line numbers are not included, so that an edit elsewhere in the file
    does not change the result. Without the loop on the stack, only the innermost line is returned.

    Args:
        loop: Code of the function that iterates over `accelerator.epochs()`. None if unknown.
    """
    frames = _list_frames()
    codes = [each.f_code for each in frames]
    num_kept = codes.index(loop) + 1 if loop in codes else 1
    positions = [Frame.from_frame(each) for each in frames[:num_kept]]
    return _SEPARATOR.join(f"{each.function}: {each.source[:_MAX_LINE] or each.line}" for each in positions)


def _list_frames() -> list[FrameType]:
    """Return the frames of the call stack outside of Headway, innermost first."""
    return [each for each in walk_stack() if not is_headway_file(each.f_code.co_filename)]


def find_loop_code() -> CodeType | None:
    """Return the code object of the user function that iterates over `accelerator.epochs()`.

    Call it while `epochs()` begins an epoch. The innermost user function on the stack is then the one with the loop. Return
    None if no user code is on the stack.
    """
    frame = find_user_frame()
    return None if frame is None else frame.f_code


class Match(NamedTuple):
    """Saved loader that a prepared loader continues.

    Attributes:
        loader_index: Index of the saved loader; None if the prepared loader is a new one.
        guessed_from: Epoch in which the interrupted run had last prepared a loader by the same lines, if only that
            epoch suggests the answer. None if the answer is certain.
    """

    loader_index: int | None
    guessed_from: int | None = None


@dataclass
class LaterLoaders:
    """Saved positions of loaders that the script prepares only after the load.

    Attributes:
        saved_run: Counters and positions of the saved run.
        is_data_replaced: Whether the loaders' data was replaced. Each loader then starts the epoch at its first batch.
        continued: Indices of the saved loaders that loaders of this run continue. At first, those prepared before the load.
        is_epoch_over: Whether the epoch in which the run was saved is over. Default: False.
    """

    saved_run: SavedRun
    is_data_replaced: bool
    continued: set[int]
    is_epoch_over: bool = False
    _preparations: list[tuple[int, str]] = field(default_factory=list)
    """Epoch and lines of each loader that was prepared in an epoch since the load."""

    def continue_position(self, loaders: Sequence[PreparedLoader], collectives: Collectives) -> int | None:
        """Restore the position of the last prepared loader, which was prepared after the load. Every rank must call it.

        Args:
            loaders: All prepared loaders.
            collectives: Collectives over all ranks.

        Returns:
            Index of the saved loader that it continues, or None if it is a new loader.

        Raises:
            CheckpointError: If `is_data_replaced` is False, and the number of samples of a loader that was used for training or
                saved in the middle of a pass has changed.
        """
        loader = loaders[-1]
        origin = loader.origin
        found = self._match_outside_epochs() if origin is None else self._match_in_epoch(origin)
        found = Match(*collectives.broadcast_object(tuple(found)))  # source files can differ between machines
        if origin is not None:
            self._preparations.append((origin.epoch, origin.lines))
            # The number of a loader also determines the seeds of those that are prepared after it.
            if found.guessed_from is not None and any(each.depends_on_epoch_number for each in loaders):
                assumption = _NEW if found.loader_index is None else _CONTINUED
                log.warning(_GUESSED, origin.epoch, type(loader.dataset).__name__, found.guessed_from, assumption)
        if found.loader_index is None:
            return None
        self.continued.add(found.loader_index)
        self._restore_position(loader, found.loader_index, collectives)
        return found.loader_index

    def warn_of_lost_positions(self) -> None:
        """Warn of training loaders that were saved in mid-pass, and that the epoch which now ends has not prepared again."""
        saved_run = self.saved_run
        if self.is_data_replaced:
            return
        for index in set(saved_run.trained_on) - self.continued:
            if saved_run.loaders[index]["consumed"] and not saved_run.loaders[index].get("is_over"):
                log.warning_once(
                    _NOT_CONTINUED, saved_run.prepared_in[index], saved_run.prepared_by[index], saved_run.epoch
                )

    # ---------------------------------------------------------------- which saved loader it is

    def _match_outside_epochs(self) -> Match:
        """Return the saved loader that a loader continues that was prepared outside of the loop over epochs.

        These are matched in their order.
        """
        rest = [index for index in range(len(self.saved_run.loaders)) if index not in self.continued]
        outside = [
            index for index in rest if not self.saved_run.prepared_in or self.saved_run.prepared_in[index] is None
        ]
        return Match(next(iter(outside or rest), None))

    def _match_in_epoch(self, origin: LoaderOrigin) -> Match:
        """Return the saved loader that a loader continues that was prepared in an epoch."""
        saved_run = self.saved_run
        if not saved_run.prepared_by:
            return self._match_outside_epochs()
        epochs = {
            index: epoch
            for index, epoch in enumerate(saved_run.prepared_in)
            if epoch is not None and saved_run.prepared_by[index] == origin.lines
        } or self._find_edited_loaders(origin)
        # Several loaders that the same lines prepare in one epoch are matched in their order.
        number = self._preparations.count((origin.epoch, origin.lines))
        in_same_epoch = [index for index, epoch in epochs.items() if epoch == origin.epoch]
        if in_same_epoch:
            return Match(_get_item(in_same_epoch, number))
        was_prepared = any(lines == origin.lines and epoch < origin.epoch for epoch, lines in self._preparations)
        if not epochs or was_prepared:
            return Match(None)
        epochs = {index: epoch for index, epoch in epochs.items() if index not in saved_run.dropped}
        last_epoch = max(epochs.values(), default=None)
        index = _get_item([index for index, epoch in epochs.items() if epoch == last_epoch], number)
        if index is None or index in self.continued:
            return Match(None)
        was_read = bool(saved_run.loaders[index]["consumed"]) or saved_run.passes_over[index] is not None
        if was_read and origin.epoch == saved_run.epoch:
            return Match(index)
        return self._guess_match(index, origin.epoch)

    def _guess_match(self, index: int, epoch: int) -> Match:
        """Guess whether a loader prepared in `epoch` continues a saved loader.

        Used if the interrupted run had not read the saved loader in `epoch`, so that the answer is not certain. New loaders
        are assumed to be prepared at equal intervals. If only one preparation is known, the loader is assumed to be reused
        if it was read in several epochs.

        Args:
            index: Index of the saved loader.
            epoch: Epoch in which the loader is prepared.

        Returns:
            Match with `index`, or with None for a new loader. `guessed_from` is set, except if the last two preparations
            and this one are in successive epochs.
        """
        saved_run = self.saved_run
        last_epoch, previous_epoch = saved_run.prepared_in[index], saved_run.prepared_before[index]
        assert last_epoch is not None
        if previous_epoch is not None:
            next_epoch = 2 * last_epoch - previous_epoch  # if new loaders are prepared at equal intervals
            if next_epoch == epoch == last_epoch + 1:
                return Match(None)  # a new loader in each of the successive epochs: clear enough to need no warning
            # A new loader was due between the resume and now, so the uninterrupted run would have prepared one.
            is_new = saved_run.epoch <= next_epoch <= epoch
            return Match(None if is_new else index, last_epoch)
        # A loader that was read in several epochs is usually prepared only once.
        was_reused = saved_run.loaders[index]["epoch"] > 1
        return Match(index if was_reused else None, last_epoch)

    def _find_edited_loaders(self, origin: LoaderOrigin) -> dict[int, int]:
        """Return the loaders in mid-pass whose lines are no longer in the script, as a dict of their epochs by index.

        Someone may have edited the line that prepares a loader, such as its `num_workers`.
        """
        saved_run = self.saved_run
        files = {each.f_code.co_filename for each in _list_frames()[: len(_list_functions(origin.lines))]}
        present = {line.strip()[:_MAX_LINE] for file in files for line in linecache.getlines(file)}
        functions = _list_functions(origin.lines)
        edited = {}
        for index, epoch in enumerate(saved_run.prepared_in):
            lines = saved_run.prepared_by[index]
            is_in_progress = saved_run.loaders[index]["consumed"] or saved_run.passes_over[index] is not None
            if epoch is None or index in self.continued or not is_in_progress or _list_functions(lines) != functions:
                continue
            sources = [each.partition(": ")[2] for each in lines.split(_SEPARATOR)]
            if not present.issuperset(sources):
                edited[index] = epoch
        return edited

    def _restore_position(self, loader: PreparedLoader, index: int, collectives: Collectives) -> None:
        """Restore the position, seed and origin of a saved loader. Every rank must call it.

        Raises:
            CheckpointError: If `is_data_replaced` is False, and the number of samples of a loader that was used for training or
                saved in the middle of a pass has changed.
        """
        saved_run = self.saved_run
        state = saved_run.loaders[index]
        before, now = saved_run.lengths[index], collectives.broadcast_object(count_samples(loader))
        has_changed = before is not None and now is not None and before != now
        if has_changed and not self.is_data_replaced and (index in saved_run.trained_on or state["consumed"]):
            raise CheckpointError(
                f"loader {index} ({type(loader.dataset).__name__}), prepared after the checkpoint was loaded, had {before} samples "
                f"when that was saved, and has {now}. If this change is intended, load with changed='data'"
            )
        if self.is_data_replaced:
            state = {"epoch": state["epoch"], "consumed": 0}
        set_position(loader, saved_run.seeds[index], state)
        saved_epoch = saved_run.prepared_in[index] if saved_run.prepared_in else None
        if loader.origin is not None and saved_epoch is not None and saved_run.prepared_before:
            loader.origin = LoaderOrigin(saved_epoch, loader.origin.lines, saved_run.prepared_before[index])


def _list_functions(call_path: str) -> list[str]:
    """Return the function names in a text that `describe_call_path` returned, innermost first."""
    return [each.partition(": ")[0] for each in call_path.split(_SEPARATOR)]


def _get_item(indices: Sequence[int], number: int) -> int | None:
    """Return the item with this number, or None if there are fewer."""
    return indices[number] if number < len(indices) else None
