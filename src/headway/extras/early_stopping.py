"""Early stopping: end a training loop when a metric stops improving, with one decision for all ranks."""

import math
from typing import Any

from headway.core.config.values import report_unknown_keywords
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.process import current
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_TOLERANCE = 1e-6
"""Relative difference up to which the ranks' values count as equal. Different devices can round a value differently."""


@report_unknown_keywords
class EarlyStopping:
    """Criterion that stops training after several evaluations in a row without an improvement.

    Register it with `accelerator.register_for_checkpointing`, and a resumed run continues its count.

    Args:
        patience: Number of consecutive evaluations without an improvement after which to stop, at least 1. Default: 1.
        min_delta: Amount that an improvement must exceed to count. Default: 0, so any improvement counts.
        mode: "min" if lower values are better (the default), "max" if higher values are better.

    Attributes:
        best: Best value so far. None before the first finite value.
        num_without_gain: Number of evaluations since the best one. 0 if the last value is the best one.

    Raises:
        CallError: If an unknown argument is passed.
        ConfigError: If the value of an argument is not allowed.

    Example::

        stopping = EarlyStopping(patience=3)
        accelerator.register_for_checkpointing(stopping)
        accelerator.resume()
        for epoch in accelerator.epochs(100):
            if stopping.should_stop:
                break
            ...
            stopping.update(loss)
            accelerator.save_state(metric=loss)
        accelerator.resume("best")
    """

    def __init__(self, patience: int = 1, min_delta: float = 0.0, mode: str = "min") -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"patience={patience!r}; give a number of evaluations, 1 or more")
        if not min_delta >= 0 or math.isinf(min_delta):
            raise ConfigError(f"min_delta={min_delta!r}; give the amount that an improvement must exceed, 0 or more")
        if mode not in ("min", "max"):
            raise ConfigError(f"mode={mode!r}; allowed: 'min' if lower values are better, 'max' if higher ones are")
        self.patience = patience
        self.min_delta = float(min_delta)
        self.mode = mode
        self.best: float | None = None
        self.num_without_gain = 0
        self._has_warned = False

    def __repr__(self) -> str:
        return f"EarlyStopping(patience={self.patience}, min_delta={self.min_delta:g}, mode={self.mode!r})"

    @property
    def should_stop(self) -> bool:
        """Whether to stop, because `patience` evaluations in a row had no improvement.

        The value is also correct right after a resume.
        """
        return self.num_without_gain >= self.patience

    def update(self, value: Any) -> bool:
        """Count one evaluation, and return whether to stop. Call it on every rank, before `save_state`.

        If ranks pass different values, their mean is used, with a warning. A value that is not finite counts as an
        evaluation without an improvement.

        Args:
            value: Metric of the evaluation over all ranks: a number or a tensor with one element.

        Returns:
            Whether to stop (`should_stop`), equal on all ranks.

        Raises:
            ConfigError: If `value` is not a number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"EarlyStopping.update({value!r}): give the metric of an evaluation, a number") from None
        number = self._agree_on(number)
        sign = 1 if self.mode == "max" else -1
        if math.isfinite(number) and (self.best is None or sign * (number - self.best) > self.min_delta):
            self.best = number
            self.num_without_gain = 0
        else:
            self.num_without_gain += 1
        return self.should_stop

    def reset(self) -> None:
        """Forget all evaluations, so that the object can be used for another training run."""
        self.best = None
        self.num_without_gain = 0

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict with the best value and the number of evaluations without an improvement since then."""
        return {"best": self.best, "num_without_gain": self.num_without_gain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value and the number of evaluations without an improvement since then."""
        self.best = state["best"]
        self.num_without_gain = state["num_without_gain"]

    def _agree_on(self, number: float) -> float:
        """Return a value that is equal on all ranks: the ranks' common value, or the mean if their values differ.

        If the values differ and any of them is not finite, the result is NaN.
        """
        runtime = current()
        if runtime.world_size == 1:
            return number
        numbers = [row[0] for row in Collectives(runtime).gather_numbers([number])]
        first_number = numbers[0]
        # NaN is not close to itself, so the texts are compared, too.
        if all(
            math.isclose(each, first_number, rel_tol=_TOLERANCE) or str(each) == str(first_number) for each in numbers
        ):
            return first_number
        mean = math.fsum(numbers) / len(numbers) if all(map(math.isfinite, numbers)) else math.nan
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "EarlyStopping.update got different values on the ranks (%s) and uses their mean; pass the metric over all "
                "samples, from accelerator.reduce_mean(total, count) or gather_for_metrics",
                ", ".join(f"{each:.6g}" for each in numbers),
            )
        return mean
