"""Message that explains how to continue an interrupted run, printed by the launcher or by a run's only process."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from headway.common import scope
from headway.common.tracebacks import ExceptionHook
from headway.core.runtime import heartbeat_file
from headway.core.runtime.resume_advice import NO_CHECKPOINT, format_resume_advice


class ResumableRun(Protocol):
    """Interface of a run that knows its last checkpoint and how to continue from it."""

    @property
    def last_folder(self) -> Path | None:
        """Folder of the last checkpoint that this run saved or loaded, or None if there is none yet."""

    @property
    def is_automatic(self) -> bool:
        """Whether the run names its checkpoints itself, so that `resume("latest")` finds them."""

    @property
    def resume_method(self) -> str:
        """Method of the Accelerator that continues from a checkpoint: "resume" or "load_state"."""


def add_interrupt_advice(run: ResumableRun) -> None:
    """Register a hook that, after an uncaught KeyboardInterrupt, prints how to continue the run.

    Under a launcher, the launcher prints this text instead. It reads the text from the heartbeat files of its
    ranks. So this function also writes a text for a run without a checkpoint to this rank's file, if the file has
    none. The hook has only a weak reference to the run.

    Args:
        run: Run whose last checkpoint is named in the message.
    """
    scope.get_or_create(ExceptionHook).add_note(_make_note(weakref.ref(run)))
    own_file = heartbeat_file.get_own_file()
    if not own_file.read().resume_advice:  # another Accelerator of this process may have saved
        own_file.set_resume_advice(_format_advice(run, None))


def publish_resume_advice(run: ResumableRun, folder: str | Path) -> None:
    """Write to this rank's heartbeat file how to continue from a checkpoint, for the launcher's final message.

    Args:
        run: Run that has saved the checkpoint.
        folder: Folder of the checkpoint.
    """
    heartbeat_file.get_own_file().set_resume_advice(_format_advice(run, folder))


def _make_note(get_run: Callable[[], ResumableRun | None]) -> Callable[[BaseException], str]:
    """Return a function from an error to the note that a traceback gets. The note is empty unless the error is a Ctrl+C.

    Args:
        get_run: Function that returns the run, or None if the run no longer exists.
    """

    def make_note(error: BaseException) -> str:
        run = get_run()
        if run is None or not isinstance(error, KeyboardInterrupt):
            return ""
        return _format_advice(run, run.last_folder)

    return make_note


def _format_advice(run: ResumableRun, folder: str | Path | None) -> str:
    """Return advice on how to continue the run after Ctrl+C, or "" for a script that was written for Accelerate.

    Args:
        run: Run that was interrupted.
        folder: Folder of its last checkpoint, or None.
    """
    if folder is not None:
        return format_resume_advice(folder, is_automatic=run.is_automatic, method=run.resume_method)
    # A program that continues with `load_state` was written for Accelerate and might save by other means: no advice.
    return NO_CHECKPOINT if run.resume_method == "resume" else ""
