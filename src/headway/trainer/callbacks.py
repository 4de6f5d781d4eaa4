"""Callbacks: the events of a training, what they are told, and what they may ask for."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.errors import ConfigError

EVENTS = (
    "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_substep_end",
    "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log", "on_evaluate", "on_prediction_step", "on_predict",
    "on_save",
)  # fmt: skip


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

    _OF_THE_RUN = ("epoch", "global_step", "log_history", "best_metric", "best_global_step", "best_model_checkpoint")

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
        return [
            self.should_training_stop,
            self.should_epoch_stop,
            self.should_save,
            self.should_evaluate,
            self.should_log,
        ]

    def set_flags(self, flags: Sequence[bool]) -> None:
        """The reverse."""
        (self.should_training_stop, self.should_epoch_stop, self.should_save, self.should_evaluate,
         self.should_log) = flags  # fmt: skip


class TrainerCallback:
    """Base of callbacks: each method is one event and does nothing.

    Every event is given the `TrainingArguments`, the `TrainerState` and the `TrainerControl`, and by name: model,
    processing_class, optimizer, lr_scheduler, train_dataloader, eval_dataloader; `logs` with on_log, `metrics` with on_evaluate
    and on_predict. A callback with `state_dict` and `load_state_dict` is saved with each checkpoint. The Trainer's
    docstring shows where each event is.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The Trainer is built."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Everything is prepared, and resumed where that was asked."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The last update is made and saved."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An epoch begins."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """It is over."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A window begins: the micro-batches of one update."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A micro-batch that does not end its window is done."""

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Gradients are final and clipped."""

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The optimizer has stepped; gradients are still there."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The update is made and counted."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Values are logged."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An evaluation is done."""

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A batch of an evaluation is done."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A prediction is done."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A checkpoint is taken; it is written behind the loop."""


class Callbacks:
    """The callbacks of one Trainer, in the order in which they are told.

    Args:
        own: the Trainer's, as objects.
        given: the user's, as objects or classes.
        about: what every event is given by name.
    """

    def __init__(self, own: Sequence[Any], given: Sequence[Any], about: Callable[[], dict[str, Any]]) -> None:
        self.all: list[Any] = list(own)
        self._num_own = len(self.all)
        self._about = about
        self._listening: dict[str, list[Callable[..., Any]]] = {}
        for callback in given:
            self.add(callback)

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

    def tell(self, event: str, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> TrainerControl:
        """Call the event of everyone who has it; returns the control, or the one that a callback returned."""
        for method in self._methods(event):
            control = method(args, state, control, **self._about(), **more) or control
        return control

    def _methods(self, event: str) -> list[Callable[..., Any]]:
        """Those that do something: most callbacks leave most events to the base class."""
        found = self._listening.get(event)
        if found is None:
            plain = getattr(TrainerCallback, event)
            found = [
                getattr(callback, event)
                for callback in self.all
                if callable(getattr(callback, event, None))
                and getattr(getattr(callback, event), "__func__", None) is not plain
            ]
            self._listening[event] = found
        return found

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
