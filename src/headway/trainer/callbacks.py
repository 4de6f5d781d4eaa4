"""Callbacks: the events of a training, what they are told, what they may ask for; the rules of the arguments, and early stopping."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headway.errors import ConfigError
from headway.trainer.arguments import TrainingArguments

EVENTS = tuple(
    """
    on_init_end on_train_begin on_train_end on_epoch_begin on_epoch_end on_step_begin on_substep_end
    on_pre_optimizer_step on_optimizer_step on_step_end on_log on_evaluate on_prediction_step on_predict on_save
    """.split()  # noqa: SIM905
)

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
        "epoch",
        "global_step",
        "log_history",
        "best_metric",
        "best_global_step",
        "best_model_checkpoint",
        "owes_epoch_end",
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
