"""Callbacks that display a training run: progress bars, printed lines and the summary at the end."""

import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.common.text import format_bytes, format_seconds
from headway.core.tracking.progress import track
from headway.core.tracking.progress_outputs import NotebookTable, is_in_notebook
from headway.trainer.callbacks import TrainerCallback, TrainerControl, TrainerState
from headway.trainer.data import get_length

_SUMMARY_NAMES = (
    "train_runtime",
    "train_loss",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_memory_peak",
)
"""Names of the values of the last log entry that the summary shows."""
_PERFORMANCE_SUFFIXES = ("_runtime", "_per_second", "train_loss")
"""Suffixes of the names of values that progress bars do not show."""


def format_value(name: str, value: Any) -> str:
    """Return a logged value as text for the screen, with the unit that its name implies.

    Names with "memory" are in bytes, and names that end in "runtime" are in seconds. Other numbers have no unit.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if "memory" in name:
        return format_bytes(int(value))
    if name.endswith("runtime"):
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


class PrinterCallback(TrainerCallback):
    """Callback that prints logged values on rank 0, one line per log entry.

    The Trainer uses it instead of `ProgressCallback` if `disable_tqdm` is True.
    """

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print the logged values on rank 0."""
        if state.is_world_process_zero:
            shown = " | ".join(f"{name} {format_value(name, value)}" for name, value in kwargs["logs"].items())
            print(f"update {state.global_step}: {shown}", flush=True)


class ProgressCallback(TrainerCallback):
    """Callback that shows progress bars for updates and evaluations, with the latest values, and a table at the end.

    All output is on rank 0. In a notebook, a table of all logged losses and evaluation results is shown, too. The Trainer
    adds it by default; `disable_tqdm=True` replaces it.
    """

    def __init__(self) -> None:
        # None: not shown now, or never on this rank. A progress bar advances when its iterator does.
        self._bar: track[int] | None = None  # of the training
        self._steps: Iterator[int] | None = None  # iterator of `_bar`
        self._evaluation_steps: Iterator[int] | None = None  # iterator of the evaluation's progress bar
        self._table: NotebookTable | None = None  # None outside of notebooks, too

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the progress bar. In a resumed run it starts at the number of updates that were already made."""
        if state.is_world_process_zero:
            # One more step than updates, so that the bar still exists when values are logged after the last update.
            steps = range(state.global_step, max(state.max_steps, state.global_step) + 1)
            self._bar = track(steps, description="training", total=state.max_steps, initial=state.global_step)
            self._steps = iter(self._bar)
            next(self._steps, None)
            self._table = NotebookTable() if is_in_notebook() else None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the training's progress bar by one update."""
        if self._steps is not None:
            next(self._steps, None)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the logged values next to the progress bar."""
        if self._table is not None:
            self._table.show(_collect_history(state))
        if self._bar is not None:
            values = {
                name: value
                for name, value in kwargs["logs"].items()
                if not _is_performance_name(name) and isinstance(value, int | float | str)
            }
            self._bar.show(**values)

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the evaluation's progress bar, which is created at the first batch."""
        if state.is_world_process_zero:
            if self._evaluation_steps is None:
                num_batches = get_length(kwargs["eval_dataloader"])
                steps = count() if num_batches is None else range(num_batches)  # an iterable dataset may have no length
                self._evaluation_steps = iter(track(steps, description="evaluation"))
                next(self._evaluation_steps, None)
            next(self._evaluation_steps, None)

    def _end_evaluation(self) -> None:
        """Remove the progress bar of an evaluation, if it is shown."""
        _close_bar(self._evaluation_steps)
        self._evaluation_steps = None

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the evaluation's progress bar."""
        self._end_evaluation()

    on_predict = on_evaluate

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the progress bar, and print the final table on rank 0.

        The table is left out if `log_level` is "error" or "critical".
        """
        self.close()
        if state.is_world_process_zero and args.log_level not in ("error", "critical"):
            show_summary(state)

    def close(self) -> None:
        """Remove all progress bars. This method is also called after training has failed."""
        self._end_evaluation()
        _close_bar(self._steps)
        self._steps = None
        self._bar = None


def _is_performance_name(name: str) -> bool:
    """Whether a logged name refers to a time, a speed or a memory size, such as "train_runtime"."""
    return name.endswith(_PERFORMANCE_SUFFIXES) or "_memory_peak" in name


def _collect_history(state: TrainerState) -> list[dict[str, str]]:
    """Return the logged losses and evaluation results, one row per update."""
    rows: dict[int, dict[str, str]] = {}
    for entry in state.log_history:
        step = int(entry["step"])
        shown = {
            name: value
            for name, value in entry.items()
            if name == "loss" or (name.startswith("eval_") and not _is_performance_name(name))
        }
        if shown:
            row = rows.setdefault(step, {"update": str(step)})
            row |= {name: format_value(name, value) for name, value in shown.items()}
    return list(rows.values())


def _close_bar(steps: Iterator[int] | None) -> None:
    """Close a progress bar. Other iterators and None are ignored."""
    close = getattr(steps, "close", None)
    if close is not None:
        close()


def show_summary(state: TrainerState) -> None:
    """Print a table of the training results and of the last evaluation to standard error."""
    last = state.log_history[-1] if state.log_history else {}
    table = Table(title="training", title_justify="left", title_style="", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("updates", f"{state.global_step:,}")
    table.add_row("epochs", f"{state.epoch:.4g}")
    for name in _SUMMARY_NAMES:
        if name in last:
            title = "mean loss" if name == "train_loss" else name.removeprefix("train_").replace("_", " ")
            table.add_row(title, format_value(name, last[name]))
    losses = [entry for entry in state.log_history if "loss" in entry]
    if losses:
        step = losses[-1]["step"]
        suffix = "" if step == state.global_step else f" at update {step}"
        table.add_row("last loss", format_value("loss", losses[-1]["loss"]) + suffix)
    evaluations = [entry for entry in state.log_history if any(name.startswith("eval_") for name in entry)]
    if evaluations:
        for name, value in evaluations[-1].items():
            if name.startswith("eval_") and not _is_performance_name(name):
                table.add_row(f"last {name}", format_value(name, value))
    if state.best_metric is not None:
        table.add_row("best metric", f"{state.best_metric:.4g} at update {state.best_global_step}")
    # FORCE_COLOR must not make rich treat a file as a terminal.
    Console(file=sys.stderr, force_terminal=None if sys.stderr.isatty() else False).print(table)
