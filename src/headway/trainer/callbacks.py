"""Callbacks: the events of a training and what they may ask for; the Trainer's own: its rules, early stopping, what it shows.

A bar and lines on a terminal or in a log file, and the table at the end, are shown on rank 0 only.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.common.text import format_bytes, format_seconds
from headway.errors import ConfigError
from headway.tracking.progress import NotebookTable, in_notebook, track
from headway.trainer.arguments import TrainingArguments

_TOLD = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader")
"""What every event is given of the Trainer, by name."""


@dataclass
class TrainerState:
    """How far a training is; saved with each checkpoint.

    Attributes:
        epoch: epochs done, with the fraction of the one in progress.
        global_step: updates that happened.
        max_steps: updates that there will be.
        num_train_epochs: epochs that there will be.
        train_batch_size: samples of a micro-batch on each process.
        logging_steps, eval_steps, save_steps: updates between two.
        log_history: everything logged, each with its `step`.
        best_metric, best_global_step, best_model_checkpoint: of the best evaluation so far.
        is_world_process_zero, is_local_process_zero: is this rank 0; is it the first process of its machine?
        owes_epoch_end: has an epoch begun whose end the callbacks have not been told of?
    """

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    train_batch_size: int | None = None
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    owes_epoch_end: bool = False

    _OF_THE_RUN = (
        *("epoch", "global_step", "log_history"),
        *("best_metric", "best_global_step", "best_model_checkpoint", "owes_epoch_end"),
    )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        kept = asdict(self)
        return {name: kept[name] for name in self._OF_THE_RUN}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for name in self._OF_THE_RUN:
            setattr(self, name, state[name])


@dataclass
class TrainerControl:
    """What the loop does next; a callback changes it, or returns another one.

    Attributes:
        should_training_stop: end the training after this update.
        should_epoch_stop: go on with the next epoch.
        should_save, should_evaluate, should_log: do so after this update.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def flags(self) -> list[bool]:
        """All of them, in this order."""
        return list(asdict(self).values())

    def set_flags(self, flags: Sequence[bool]) -> None:
        """The reverse."""
        for each, flag in zip(fields(TrainerControl), flags):
            setattr(self, each.name, flag)


Answer = TrainerControl | None
"""What an event may return: another control in place of the Trainer's; None: it stays."""


class TrainerCallback:
    """Base of callbacks: each method is one event and does nothing.

    Every event is given the `TrainingArguments`, the `TrainerState` and the `TrainerControl`, and by name: model,
    processing_class, optimizer, lr_scheduler, train_dataloader, eval_dataloader; `logs` with on_log, `metrics` with on_evaluate
    and on_predict. A callback with `state_dict` and `load_state_dict` is saved with each checkpoint. The Trainer's
    docstring shows where each event is::

        on_init_end             The Trainer is built.
        on_train_begin          Everything is prepared, and resumed where that was asked.
        on_train_end            The last update is made and saved.
        on_epoch_begin          An epoch begins.
        on_epoch_end            It is over.
        on_step_begin           A window begins: the micro-batches of one update.
        on_substep_end          A micro-batch that does not end its window is done.
        on_pre_optimizer_step   Gradients are final and clipped.
        on_optimizer_step       The optimizer has stepped; gradients are still there.
        on_step_end             The update is made and counted.
        on_log                  Values are logged.
        on_evaluate             An evaluation is done.
        on_prediction_step      A batch of an evaluation is done.
        on_predict              A prediction is done.
        on_save                 A checkpoint is taken; it is written behind the loop.
    """

    def _ignore(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Answer:
        """An event that a callback has no method of its own for."""

    on_init_end = on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = _ignore
    on_step_begin = on_substep_end = on_pre_optimizer_step = on_optimizer_step = on_step_end = _ignore
    on_log = on_evaluate = on_prediction_step = on_predict = on_save = _ignore


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class Events:
    """One Trainer's events: the callbacks that are told, how far the training is, and what they have asked for.

    Args:
        args: the Trainer's.
        own: the Trainer's callbacks, as objects.
        given: the user's, as objects or classes.
        trainer: whose model, optimizer and the like every event is given by name.
        state: of a training that has not begun.

    Attributes:
        all: the callbacks, in the order in which they are told.
        state: how far the training is.
        control: what the loop does next; a callback may put another object in its place.
    """

    def __init__(
        self,
        args: TrainingArguments,
        own: Sequence[Any],
        given: Sequence[Any],
        trainer: object,
        state: TrainerState,
    ) -> None:
        self.all: list[Any] = list(own)
        self._args = args
        self._trainer = trainer
        self._listening: dict[str, list[Callable[..., Any]]] = {}
        self.start(state)
        for callback in given:
            self.add(callback)

    def start(self, state: TrainerState) -> None:
        """A training begins."""
        self.state, self.control = state, TrainerControl()

    def add(self, callback: Any) -> None:
        """Add an object, or an object of a class.

        Raises:
            ConfigError: it has none of the events.
        """
        made = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(made, event, None)) for event in EVENTS):
            raise ConfigError(f"{made!r} is not a callback: it has none of {', '.join(EVENTS[:4])}, ...")
        self.all.append(made)
        self._listening.clear()

    @property
    def callbacks(self) -> list[Any]:
        """All of them, in the order in which they are told."""
        return self.all

    def pop(self, callback: Any) -> Any:
        """Take out an object, or the first one of a class; None where there is none."""
        for known in self.all:
            if known is callback or (isinstance(callback, type) and type(known) is callback):
                self.all.remove(known)
                self._listening.clear()
                return known
        return None

    @property
    def has_foreign(self) -> bool:
        """Are there any besides the Trainer's own, so that ranks may disagree on what comes next?"""
        return any(not type(callback).__module__.startswith("headway.") for callback in self.all)

    def tell(self, event: str, **more: object) -> None:
        """Call the event of everyone who has it; they may change the control, or return another."""
        for method in self._find_methods(event):
            told = {name: getattr(self._trainer, name) for name in _TOLD}
            self.control = method(self._args, self.state, self.control, **told, **more) or self.control

    def _find_methods(self, event: str) -> list[Callable[..., Any]]:
        """Those that do something: most callbacks leave most events to the base class."""
        if event not in self._listening:
            methods = [getattr(callback, event, None) for callback in self.all]
            ignored = TrainerCallback._ignore
            self._listening[event] = [m for m in methods if callable(m) and getattr(m, "__func__", None) is not ignored]
        return self._listening[event]

    def state_dict(self) -> list[tuple[str, Any]]:
        """The states of those that have one."""
        return [(type(each).__name__, each.state_dict()) for each in self.all if _has_state(each)]

    def load_state_dict(self, states: Sequence[tuple[str, Any]]) -> None:
        """Give each its state back, by class and order."""
        waiting = [each for each in self.all if _has_state(each)]
        for name, state in states:
            for callback in waiting:
                if type(callback).__name__ == name:
                    callback.load_state_dict(state)
                    waiting.remove(callback)
                    break


def _has_state(callback: Any) -> bool:
    return all(callable(getattr(callback, name, None)) for name in ("state_dict", "load_state_dict"))


# ---------------------------------------------------------------- when to log, evaluate, save and stop


class DefaultFlowCallback(TrainerCallback):
    """Sets the control by the arguments' strategies; it is told first, so that others can overrule it."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """By number of updates."""
        step = state.global_step
        if (step == 1 and args.logging_first_step) or _is_due(args.logging_strategy, step, state.logging_steps):
            control.should_log = True
        if _is_due(args.eval_strategy, step, state.eval_steps) and step >= args.eval_delay:
            control.should_evaluate = True
        if _is_due(args.save_strategy, step, state.save_steps):
            control.should_save = True
        if step >= state.max_steps:
            control.should_training_stop = True
            # What the last updates learned must not be lost.
            control.should_save |= args.save_strategy == "steps"

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """By epochs."""
        control.should_log |= args.logging_strategy == "epoch"
        control.should_evaluate |= args.eval_strategy == "epoch" and state.epoch >= args.eval_delay
        control.should_save |= args.save_strategy == "epoch"


def _is_due(strategy: str, step: int, every: int) -> bool:
    return strategy == "steps" and step % every == 0


class EarlyStoppingCallback(TrainerCallback):
    """Ends the training when the metric has not become better for some evaluations.

    Args:
        early_stopping_patience: evaluations in a row without a better metric.
        early_stopping_threshold: by how much a metric must be better to count.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.num_without_gain = 0
        self.best: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that there is something to go by.

        Raises:
            ConfigError: no metric, or no evaluations.
        """
        if args.eval_strategy == "no" or args.wanted_metric is None:
            raise ConfigError(
                "EarlyStoppingCallback goes by a metric of evaluations: set eval_strategy to 'steps' or 'epoch', and "
                "metric_for_best_model (such as 'loss')"
            )
        if state.global_step == 0:
            self.num_without_gain, self.best = 0, None

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Compare."""
        value = kwargs["metrics"].get(args.wanted_metric)
        if value is None:
            return
        gain = None if self.best is None else (value - self.best if args.greater_is_better else self.best - value)
        if gain is None or gain > self.early_stopping_threshold:
            self.best, self.num_without_gain = float(value), 0
        else:
            self.num_without_gain += 1
        if self.num_without_gain >= self.early_stopping_patience:
            control.should_training_stop = True

    def state_dict(self) -> dict[str, Any]:
        """The count, for a checkpoint."""
        return {"num_without_gain": self.num_without_gain, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        self.num_without_gain, self.best = state["num_without_gain"], state["best"]


# -------------------------------------------------------------------- what is shown

_OF_THE_END = ("train_runtime", "train_loss", "train_samples_per_second", "train_steps_per_second", "train_memory_peak")

_OF_SPEED = ("_runtime", "_per_second", "train_loss")


def format_value(name: str, value: Any) -> str:
    """A value as a person reads it, by what its name says of its unit."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if "memory" in name:
        return format_bytes(int(value))
    if name.endswith("runtime"):
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


class PrinterCallback(TrainerCallback):
    """Prints what is logged, one line each time."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Print."""
        if state.is_world_process_zero:
            shown = " | ".join(f"{name} {format_value(name, value)}" for name, value in kwargs["logs"].items())
            print(f"update {state.global_step}: {shown}", flush=True)


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

    on_predict = on_evaluate

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
