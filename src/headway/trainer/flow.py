"""When to log, evaluate, save and stop: the arguments' own rules, and early stopping."""

from typing import Any

from headway.errors import ConfigError
from headway.trainer.callbacks import TrainerCallback, TrainerControl, TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Sets the control by the arguments' strategies; it is told first, so that others can overrule it."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
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
