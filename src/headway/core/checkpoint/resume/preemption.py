"""Preemption: if a run is asked to stop, all ranks save in the same iteration, and exit with code 75."""

from collections.abc import Callable
from pathlib import Path

from headway.common import env
from headway.core.checkpoint.resume.evaluations import EvaluationStart
from headway.core.checkpoint.resume.state import CheckpointState
from headway.core.config.preemption import Preemption
from headway.core.data.loader import PreparedLoader
from headway.core.runtime import heartbeat_file
from headway.core.runtime.control_plane import stopping
from headway.core.runtime.events import notify_listeners
from headway.core.runtime.preempted_run import PreemptedRun
from headway.errors import Preempted
from headway.log import get_logger

log = get_logger(__name__)


class PreemptionGuard:
    """Listener for signals and deadlines that ask a run to stop.

    Once all ranks agree, it saves and ends the run. If `settings.exits` is False, it only sets `is_preempted`.

    Args:
        settings: Signals and deadlines that ask the run to stop, and whether the process exits.
        state: State of the run to save.
        save: Function that commits a checkpoint on all ranks and returns its folder. Its argument is the state at the
            start of the evaluation in progress, or None if there is none.

    Attributes:
        is_preempted: Whether all ranks have agreed to stop.

    Raises:
        StateError: If it is created outside the main thread.
    """

    def __init__(
        self, settings: Preemption, state: CheckpointState, save: Callable[[EvaluationStart | None], Path]
    ) -> None:
        self.is_preempted = False
        self._settings = settings
        self._state = state
        self._save = save
        self._deadline = settings.compute_deadline()
        self._stopping = stopping.start_agreement(settings.numbers, self._deadline)

    def check(self, loader: PreparedLoader | None = None) -> None:
        """Save and end the run if all ranks have agreed to stop.

        With `Preemption(exits=False)`, only set `is_preempted` instead. Every rank must call this method at the same
        points of the training loop.

        Args:
            loader: Loader that is about to return a batch. Default: None, the loop has no prepared loaders.

        Raises:
            Preempted: After the save, unless `Preemption(exits=False)` is set. It ends the process with code 75.
            CheckpointError: If the checkpoint could not be saved.
        """
        state = self._state
        if self._stopping.check(state.run.windows.num_windows, lambda: _describe_loop_position(state, loader)):
            is_evaluation = loader is not None and state.progress.evaluations.is_evaluation(loader)
            self._handle_request(state.progress.evaluations.get_start() if is_evaluation else None)

    def start(self) -> None:
        """Listen again for requests to stop, and replace any other listener. The deadline is unchanged.

        Raises:
            StateError: If it is called outside the main thread.
        """
        self._stopping.stop()
        self._stopping = stopping.start_agreement(self._settings.numbers, self._deadline)

    def stop(self) -> None:
        """Stop listening for signals and deadlines."""
        self._stopping.stop()

    def _handle_request(self, evaluation_start: EvaluationStart | None) -> None:
        """Set `is_preempted`. Unless `settings.exits` is False, also save and end the run.

        Args:
            evaluation_start: State at the start of the evaluation in progress, or None if there is none.

        Raises:
            Preempted: After the save.
            CheckpointError: If the checkpoint could not be saved.
        """
        self.is_preempted = True
        reason, update = self._stopping.reason, self._state.run.clock.num_updates
        if not self._settings.exits:
            log.warning("asked to stop by %s after update %d: accelerator.preempted is True now", reason, update)
            return
        heartbeat_file.get_own_file().set_phase("saving, as it was asked to stop")
        folder = self._save(evaluation_start)
        notify_listeners("preempted", step=update, source=self._state.run.clock, reason=reason, folder=str(folder))
        preempted_run = PreemptedRun(reason, update, str(folder))
        error_file = env.get("TORCHELASTIC_ERROR_FILE")
        if error_file and heartbeat_file.is_watched():  # the launcher reads the file and prints the message
            preempted_run.write(error_file)
        else:
            log.warning(preempted_run.format_text().removeprefix("headway: ").replace("\nheadway: ", "\n  "))
        raise Preempted(preempted_run.format_text(), str(folder))


def _describe_loop_position(state: CheckpointState, loader: PreparedLoader | None) -> tuple[str, bool]:
    """Return a description of the current position in the training loop, for a comparison between ranks.

    Args:
        state: State of the run.
        loader: Loader that is about to return a batch, or None in a loop without prepared loaders.

    Returns:
        Pair of (text that is equal on ranks at the same position, whether an accumulation window is open).
    """
    position = f"update {state.run.clock.num_updates}"
    if loader is not None:
        number = [each.seed for each in state.objects.loaders].index(loader.seed)
        position += f", loader {number}, epoch {loader.epoch}, {loader.num_consumed} samples"
    return position, state.run.windows.is_unfinished
