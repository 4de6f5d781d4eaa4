"""What a run does when it is asked to end: at the check that all ranks agree on it saves, and ends with exit code 75."""

from collections.abc import Callable
from pathlib import Path

from headway.checkpoint.resume.positions import EvaluationStart
from headway.checkpoint.resume.run import RunState
from headway.common import env
from headway.config.run import Preemption
from headway.data.loader import PreparedLoader
from headway.errors import Preempted
from headway.launch.agent.records import PreemptedRun
from headway.log import get_logger
from headway.runtime import pulse
from headway.runtime.control_plane import stopping
from headway.runtime.events import notify

log = get_logger(__name__)


class PreemptionGuard:
    """Asks at every check whether all ranks stop there, and answers.

    Args:
        settings: what asks, and what is done.
        run_state: the run that is saved.
        save: commits a checkpoint on all ranks, of the given beginning of an evaluation where one is in progress.

    Attributes:
        is_preempted: have all ranks agreed to stop?

    Raises:
        StateError: made outside the main thread.
    """

    def __init__(
        self, settings: Preemption, run_state: RunState, save: Callable[[EvaluationStart | None], Path]
    ) -> None:
        self.is_preempted = False
        self._settings = settings
        self._run = run_state
        self._save = save
        self._end = settings.end()
        self._stopping = stopping.start(settings.numbers, self._end)

    def check(self, loader: PreparedLoader | None = None) -> None:
        """A check before a loader's batch; None: elsewhere, what a loop without prepared loaders passes on every rank."""
        run = self._run
        if self._stopping.check(run.windows.num_windows, lambda: _where(run, loader)):
            is_evaluation = loader is not None and run.evaluations.is_one(loader)
            self._answer(run.evaluations.beginning() if is_evaluation else None)

    def start(self) -> None:
        """Listen again, in place of whoever has done so since; the deadline stays.

        Raises:
            StateError: called outside the main thread.
        """
        self._stopping.stop()
        self._stopping = stopping.start(self._settings.numbers, self._end)

    def stop(self) -> None:
        """Listen no more."""
        self._stopping.stop()

    def _answer(self, before: EvaluationStart | None) -> None:
        self.is_preempted = True
        reason, update = self._stopping.reason, self._run.clock.num_updates
        if not self._settings.exits:
            log.warning("asked to stop by %s after update %d: accelerator.preempted is True now", reason, update)
            return
        pulse.own().set_phase("saving, as it was asked to stop")
        folder = self._save(before)
        notify("preempted", step=update, source=self._run.clock, reason=reason, folder=str(folder))
        left = PreemptedRun(reason, update, str(folder))
        record = env.get("TORCHELASTIC_ERROR_FILE")
        if record and pulse.is_watched():
            left.leave(record)
        else:
            log.warning(left.text().removeprefix("headway: ").replace("\nheadway: ", "\n  "))
        raise Preempted(left.text(), str(folder))


def _where(run: RunState, loader: PreparedLoader | None) -> tuple[str, bool]:
    """The place in the program, in words that only a rank at the same place says; and is a window open here?"""
    place = f"update {run.clock.num_updates}"
    if loader is not None:
        number = [each.seed for each in run.loaders].index(loader.seed)
        place += f", loader {number}, epoch {loader.epoch}, {loader.num_consumed} samples"
    return place, run.windows.is_unfinished
