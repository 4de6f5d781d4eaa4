"""Callbacks: the events of a training run, and the handler that calls the callbacks' methods for them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headway.errors import ConfigError
from headway.trainer.arguments import TrainingArguments

_EVENT_OBJECTS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader")
"""Names of the Trainer's attributes that every event receives as keyword arguments."""


@dataclass
class TrainerState:
    """Progress of a training run, saved with each checkpoint.

    Attributes:
        epoch: Number of completed epochs, including the fraction of the current one. 0.0 before the first update.
        global_step: Number of completed updates, including those before a resume.
        max_steps: Total number of updates.
        num_train_epochs: Total number of epochs.
        train_batch_size: Samples per micro-batch on each process.
        logging_steps: Updates between two log entries.
        eval_steps: Updates between two evaluations.
        save_steps: Updates between two checkpoints.
        log_history: All logged values, each entry with its `step`.
        best_metric: Metric of the best evaluation so far. None: no evaluation had the metric for the best model yet.
        best_global_step: Number of updates that had been made at the best evaluation, or None.
        best_model_checkpoint: Path of the checkpoint that was saved after the best evaluation, or None.
        is_world_process_zero: Whether this process is rank 0.
        is_local_process_zero: Whether this process is the first one on its machine.
        owes_epoch_end: Whether an epoch has started and its `on_epoch_end` has not been called yet.
        num_input_tokens_seen: Number of tokens of all ranks' training batches, if `include_num_input_tokens_seen` is set.
            It is up to date in the events on_step_end, on_log, on_evaluate, on_save and on_train_end.
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
    num_input_tokens_seen: int = 0

    _SAVED_FIELDS = (
        "epoch",
        "global_step",
        "log_history",
        "best_metric",
        "best_global_step",
        "best_model_checkpoint",
        "owes_epoch_end",
        "num_input_tokens_seen",
    )

    def state_dict(self) -> dict[str, Any]:
        """Return the values that a checkpoint stores and that a resumed run continues from.

        The lengths and intervals of the run are left out, because a resumed run computes them from its arguments.
        """
        values = asdict(self)
        return {name: values[name] for name in self._SAVED_FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values saved by `state_dict`."""
        for name in self._SAVED_FIELDS:
            if name in state:  # earlier versions did not save all of them
                setattr(self, name, state[name])


@dataclass
class TrainerControl:
    """Flags that determine the next actions of the training loop.

    A callback changes these flags, or returns another control. Flags that are set before or during an update take
    effect after the update, and those set in `on_train_begin` or `on_epoch_end` right after that event. If ranks differ,
    a flag that is set on any rank applies to all ranks. The Trainer resets `should_epoch_stop` when an epoch begins. It
    resets `should_save`, `should_evaluate` and `should_log` when it acts on them. All flags are False by default.

    Attributes:
        should_training_stop: Whether to end training after this update.
        should_epoch_stop: Whether to end the current epoch after this update and continue with the next one.
        should_save: Whether to save a checkpoint after this update.
        should_evaluate: Whether to evaluate after this update.
        should_log: Whether to log after this update.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def flags(self) -> list[bool]:
        """Return the values of all flags in the order in which the flags are defined."""
        return list(asdict(self).values())

    def set_flags(self, flags: Sequence[bool]) -> None:
        """Set all flags to the given values, which are in the order in which the flags are defined."""
        for each, flag in zip(fields(TrainerControl), flags):
            setattr(self, each.name, flag)


ControlOrNone = TrainerControl | None
"""Return type of a callback's methods: a control that replaces the Trainer's, or None to keep the current one."""


class TrainerCallback:
    """Base class of callbacks. For each event of a training run, it has a method that does nothing.

    Every method receives the `TrainingArguments`, the `TrainerState` and the `TrainerControl`, and as keyword
    arguments: model, processing_class, optimizer, lr_scheduler and train_dataloader. In addition, on_log receives
    `logs`, on_evaluate and on_predict receive `metrics`, and on_prediction_step receives `eval_dataloader`. A callback
    with `state_dict` and `load_state_dict` is saved with each checkpoint. Methods are called on every rank. A method may
    change flags of the control, or return another control. An error that it raises ends the training.

    For example, stop when the loss is low enough::

        class StopAtLoss(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                if logs.get("loss", 1.0) < 0.1:
                    control.should_training_stop = True

        trainer = Trainer(model, args, train_dataset=data, callbacks=[StopAtLoss])

    The events, in an order that the Trainer's docstring shows::

        on_init_end             The Trainer has been created.
        on_train_begin          Everything is prepared, and resumed if requested.
        on_train_end            The last update has been made and saved.
        on_epoch_begin          An epoch begins.
        on_epoch_end            An epoch has ended.
        on_step_begin           An accumulation window (the micro-batches of one update) begins.
        on_substep_end          A micro-batch that does not end its accumulation window is done.
        on_pre_optimizer_step   Gradients are final and clipped.
        on_optimizer_step       The optimizer has stepped; gradients still exist.
        on_step_end             The update has been made and counted.
        on_log                  Values are logged.
        on_evaluate             An evaluation is done.
        on_prediction_step      A batch of an evaluation is done.
        on_predict              A prediction is done.
        on_save                 A checkpoint has been taken and is being written in the background.
    """

    def _ignore(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> ControlOrNone:
        """Do nothing. This is the default implementation of every event."""

    on_init_end = on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = _ignore
    on_step_begin = on_substep_end = on_pre_optimizer_step = on_optimizer_step = on_step_end = _ignore
    on_log = on_evaluate = on_prediction_step = on_predict = on_save = _ignore


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
"""Names of all events, which are those of the methods of `TrainerCallback`."""


class CallbackHandler:
    """Handler that calls the callbacks of one Trainer, and holds the state and control that they receive.

    Args:
        args: Arguments of the Trainer.
        first_callbacks: Callbacks that are called first, as objects.
        callbacks: Other callbacks, as objects or classes.
        trainer: Trainer whose model, optimizer and other objects every event receives as keyword arguments.
        state: Initial state of the training run.

    Attributes:
        callbacks: Callbacks in the order in which they are called.
        state: Progress of the training run.
        control: Flags that determine the next actions of the training loop. A callback may replace this object.

    Raises:
        ConfigError: If one of `callbacks` implements no event.
    """

    def __init__(
        self,
        args: TrainingArguments,
        first_callbacks: Sequence[Any],
        callbacks: Sequence[Any],
        trainer: object,
        state: TrainerState,
    ) -> None:
        self.callbacks: list[Any] = list(first_callbacks)
        self._args = args
        self._trainer = trainer
        self._methods_by_event: dict[str, list[Callable[..., Any]]] = {}
        self.start_run(state)
        for callback in callbacks:
            self.add(callback)

    def start_run(self, state: TrainerState) -> None:
        """Start a new training run with the given state, and with all control flags off."""
        self.state = state
        self.control = TrainerControl()

    def add(self, callback: Any) -> None:
        """Add a callback, given as an object or as a class to instantiate.

        Raises:
            ConfigError: If the callback implements no event.
        """
        instance = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(instance, event, None)) for event in EVENTS):
            raise ConfigError(f"{instance!r} is not a callback: it has none of {', '.join(EVENTS[:4])}, ...")
        self.callbacks.append(instance)
        self._methods_by_event.clear()

    def pop(self, callback: Any) -> Any:
        """Remove a callback and return it. Return None if there is no such callback.

        Args:
            callback: Callback object, or a class, whose first instance is removed. Instances of its subclasses do not
                count.
        """
        for index, each in enumerate(self.callbacks):
            is_instance = isinstance(callback, type) and type(each) is callback
            if each is callback or is_instance:
                self._methods_by_event.clear()
                return self.callbacks.pop(index)  # not `remove`, which would compare the callbacks with `==`
        return None

    @property
    def has_user_callbacks(self) -> bool:
        """Whether there are callbacks of classes that are not Headway's own.

        Their requests may differ between ranks, so the flags in `control` must be combined over all ranks.
        """
        return any(not type(callback).__module__.startswith("headway.") for callback in self.callbacks)

    def call_event(self, event: str, **event_arguments: object) -> None:
        """Call an event's method on every callback that implements it.

        A callback may change the flags of `control`, or return another `TrainerControl`, which replaces it.

        Args:
            event: Name of the event, such as "on_step_end".
            event_arguments: Keyword arguments of this event, in addition to those that every event receives.
        """
        for method in self._find_methods(event):
            objects = {name: getattr(self._trainer, name) for name in _EVENT_OBJECTS}
            new_control = method(self._args, self.state, self.control, **objects, **event_arguments)
            self.control = new_control or self.control

    def _find_methods(self, event: str) -> list[Callable[..., Any]]:
        """Return the callbacks' implementations of an event, without those inherited from `TrainerCallback`."""
        if event not in self._methods_by_event:
            methods = [getattr(callback, event, None) for callback in self.callbacks]
            default = TrainerCallback._ignore
            self._methods_by_event[event] = [
                method for method in methods if callable(method) and getattr(method, "__func__", None) is not default
            ]
        return self._methods_by_event[event]

    def state_dict(self) -> list[tuple[str, Any]]:
        """Return the states of all callbacks that have one, each with the name of its class."""
        return [(type(each).__name__, each.state_dict()) for each in self.callbacks if _has_state(each)]

    def load_state_dict(self, states: Sequence[tuple[str, Any]]) -> None:
        """Restore the states of the callbacks.

        States and callbacks are matched by class name, and by order if several callbacks have the same class. A state
        without such a callback is ignored.
        """
        remaining = [each for each in self.callbacks if _has_state(each)]
        for name, state in states:
            callback = next((each for each in remaining if type(each).__name__ == name), None)
            if callback is not None:
                callback.load_state_dict(state)
                # Not `remove`, which would compare the callbacks with `==`.
                remaining = [each for each in remaining if each is not callback]


def _has_state(callback: Any) -> bool:
    """Whether a callback has the methods with which checkpoints save and restore its state."""
    return all(callable(getattr(callback, name, None)) for name in ("state_dict", "load_state_dict"))
