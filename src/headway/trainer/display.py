"""What a training shows: a bar and lines on a terminal or in a log file, and the table at its end; on rank 0 only."""

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.tracking.progress import NotebookTable, in_notebook, track
from headway.trainer.callbacks import TrainerCallback, TrainerControl, TrainerState
from headway.trainer.results import format_line, format_value

_OF_THE_END = ("train_runtime", "train_loss", "train_samples_per_second", "train_steps_per_second", "train_memory_peak")

_OF_SPEED = ("_runtime", "_per_second", "train_loss")


class PrinterCallback(TrainerCallback):
    """Prints what is logged, one line each time."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print."""
        if state.is_world_process_zero:
            print(f"update {state.global_step}: {format_line(kwargs['logs'])}", flush=True)


class ProgressCallback(TrainerCallback):
    """A bar over updates with one over evaluations below it, the values last logged, and a table at the end."""

    def __init__(self) -> None:
        self._bar: track[int] | None = None
        self._steps: Iterator[int] | None = None
        self._evaluation: Iterator[int] | None = None
        self._table: NotebookTable | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the bar; a resumed run's goes on from where it was."""
        if state.is_world_process_zero:
            # One more than there are, so that the bar is still there for what is logged after the last update.
            steps = range(state.global_step, max(state.max_steps, state.global_step) + 1)
            self._bar = track(steps, description="training", total=state.max_steps, initial=state.global_step)
            self._steps = iter(self._bar)
            next(self._steps, None)
            self._table = NotebookTable() if in_notebook() else None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move it."""
        if self._steps is not None:
            next(self._steps, None)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put the values behind the bar."""
        if self._table is not None:
            self._table.show(_history(state))
        if self._bar is not None:
            shown = {name: value for name, value in kwargs["logs"].items() if not _is_of_speed(name)}
            self._bar.show(**{name: value for name, value in shown.items() if isinstance(value, int | float | str)})

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar of the evaluation."""
        if state.is_world_process_zero:
            if self._evaluation is None:
                loader = kwargs["eval_dataloader"]
                total = range(len(loader)) if hasattr(loader, "__len__") else range(sys.maxsize)
                self._evaluation = iter(track(total, description="evaluation"))
                next(self._evaluation, None)
            next(self._evaluation, None)

    def _end_evaluation(self) -> None:
        _close(self._evaluation)
        self._evaluation = None

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """It is over."""
        self._end_evaluation()

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """It is over."""
        self._end_evaluation()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the bar off and show the table."""
        self.close()
        if state.is_world_process_zero and args.log_level not in ("error", "critical"):
            show_summary(state)

    def close(self) -> None:
        """Take all bars off; also where the training broke off."""
        self._end_evaluation()
        _close(self._steps)
        self._steps = self._bar = None


def _is_of_speed(name: str) -> bool:
    """Is it time, or memory, of the whole or of a phase?"""
    return name.endswith(_OF_SPEED) or "_memory_peak" in name


def _history(state: TrainerState) -> list[dict[str, str]]:
    """What was logged, a row for each update: losses, and what evaluations found."""
    rows: dict[int, dict[str, str]] = {}
    for entry in state.log_history:
        step = int(entry["step"])
        kept = {
            name: value
            for name, value in entry.items()
            if name == "loss" or (name.startswith("eval_") and not _is_of_speed(name))
        }
        if kept:
            row = rows.setdefault(step, {"update": str(step)})
            row |= {name: format_value(name, value) for name, value in kept.items()}
    return list(rows.values())


def _close(steps: Iterator[int] | None) -> None:
    close = getattr(steps, "close", None)
    if close is not None:
        close()


def show_summary(state: TrainerState) -> None:
    """Print how the training went, and its evaluations, to standard error."""
    last = state.log_history[-1] if state.log_history else {}
    table = Table(title="training", title_justify="left", title_style="", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("updates", f"{state.global_step:,}")
    table.add_row("epochs", f"{state.epoch:.4g}")
    for name in _OF_THE_END:
        if name in last:
            words = "mean loss" if name == "train_loss" else name.removeprefix("train_").replace("_", " ")
            table.add_row(words, format_value(name, last[name]))
    losses = [entry for entry in state.log_history if "loss" in entry]
    if losses:
        where = "" if losses[-1]["step"] == state.global_step else f" at update {losses[-1]['step']}"
        table.add_row("last loss", format_value("loss", losses[-1]["loss"]) + where)
    evaluations = [entry for entry in state.log_history if any(name.startswith("eval_") for name in entry)]
    if evaluations:
        for name, value in evaluations[-1].items():
            if name.startswith("eval_") and not _is_of_speed(name):
                table.add_row(f"last {name}", format_value(name, value))
    if state.best_metric is not None:
        table.add_row("best metric", f"{state.best_metric:.4g} at update {state.best_global_step}")
    # FORCE_COLOR makes no terminal of a file.
    Console(file=sys.stderr, force_terminal=None if sys.stderr.isatty() else False).print(table)
