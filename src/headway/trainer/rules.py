"""Callbacks that decide when to log, evaluate, save and stop."""

from typing import Any

from headway.errors import ConfigError
from headway.extras.early_stopping import EarlyStopping
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import TrainerCallback, TrainerControl, TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Callback that requests logging, evaluation and saving according to the strategies in the arguments.

    It is called first, so that other callbacks can change its requests.
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Request the logging, evaluation and saving that are due after this number of updates.

        After the last update, request the end of training, and with the strategy "steps" also an evaluation and a
        checkpoint.
        """
        step = state.global_step
        is_last = step >= state.max_steps
        if (step == 1 and args.logging_first_step) or _is_due(args.logging_strategy, step, state.logging_steps):
            control.should_log = True
        # The result of the last updates must not be lost, and must be able to be the best one.
        if step >= args.eval_delay and _is_due(args.eval_strategy, step, state.eval_steps, is_last):
            control.should_evaluate = True
        if _is_due(args.save_strategy, step, state.save_steps, is_last):
            control.should_save = True
        if is_last:
            control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Request the logging, evaluation and saving that are due after each epoch."""
        control.should_log |= args.logging_strategy == "epoch"
        control.should_evaluate |= args.eval_strategy == "epoch" and state.epoch >= args.eval_delay
        control.should_save |= args.save_strategy == "epoch"


def _is_due(strategy: str, step: int, every: int, is_last: bool = False) -> bool:
    """Whether an action is due after an update, by the strategy "steps".

    Args:
        strategy: "steps", or a strategy with which the action is never due after an update.
        step: Number of completed updates.
        every: Number of updates from one action to the next.
        is_last: Whether the action is due in any case, because this is the last update. Default: False.
    """
    return strategy == "steps" and (is_last or step % every == 0)


class _LocalEarlyStopping(EarlyStopping):
    """Criterion that does not communicate, because the Trainer's metrics are equal on all ranks.

    A script may add the callback on some ranks only. The other ranks would then not take part in a collective.
    """

    def _agree_on(self, number: float) -> float:
        return number


class EarlyStoppingCallback(TrainerCallback):
    """Callback that ends training when the metric for the best model has not improved for several evaluations.

    The metric is `TrainingArguments.metric_for_best_model`, and `greater_is_better` is its direction. It ends training on
    all ranks, even if only some ranks have it. Checkpoints contain the state of rank 0's callbacks.

    Args:
        early_stopping_patience: Number of consecutive evaluations without an improvement after which to stop, at least
            1. Default: 1.
        early_stopping_threshold: Amount that the improvement of the metric must exceed to count, at least 0. Default: 0.

    Raises:
        ConfigError: If the patience is less than 1, or the threshold is negative. When training begins, also if no
            metric or no evaluations are configured.

    Example::

        args = TrainingArguments("runs/first", eval_strategy="epoch", metric_for_best_model="loss")
        trainer = Trainer(model, args, train_dataset=train_data, eval_dataset=eval_data, callbacks=[EarlyStoppingCallback(3)])
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self._stopping = _LocalEarlyStopping(early_stopping_patience, early_stopping_threshold)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise an error unless evaluations report the metric for the best model.

        If training starts from scratch, reset the best value and the number of evaluations without improvement. If it
        resumes, keep both.

        Raises:
            ConfigError: If no metric or no evaluations are configured.
        """
        if args.eval_strategy == "no" or args.wanted_metric is None:
            raise ConfigError(
                "EarlyStoppingCallback needs a metric of evaluations: set eval_strategy to 'steps' or 'epoch', and "
                "metric_for_best_model (such as 'loss')"
            )
        self._stopping.mode = "max" if args.greater_is_better else "min"
        if state.global_step == 0:
            self._stopping.reset()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Compare the metric with the best one, and end training after too many evaluations without an improvement.

        An evaluation that does not report the metric is ignored.
        """
        value = kwargs["metrics"].get(args.wanted_metric)
        if value is not None and self._stopping.update(value):
            control.should_training_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the best metric and the number of evaluations since then, for a checkpoint."""
        return self._stopping.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best metric and the number of evaluations since then."""
        self._stopping.load_state_dict(state)
