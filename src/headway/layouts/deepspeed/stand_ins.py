"""Creation of the optimizer and the scheduler that DeepSpeed's JSON defines, in place of a script's placeholders."""

import math
from typing import Any

import torch

from headway.core.strategies.placeholders import Placeholder
from headway.errors import ConfigError, PrepareError, UnsupportedError
from headway.layouts.deepspeed.json_config import AUTO, HfDeepSpeedConfig
from headway.layouts.deepspeed.placeholders import DummyOptim, DummyScheduler

_OPTIMIZERS = ("Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD")
"""Names of the torch optimizers that DeepSpeed's JSON may define."""
_OWN_SETTINGS = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
"""Settings that DeepSpeed's optimizer classes have, but torch's optimizer classes do not have."""


class StandIns:
    """Factory and cache of the optimizers and schedulers that replace placeholders such as `DummyOptim`.

    Args:
        config: JSON configuration of DeepSpeed.

    Attributes:
        optimizer: Values for "auto" settings of the JSON's optimizer, by name. Empty until the optimizer is created.
        scheduler: Values for "auto" settings of the JSON's scheduler, by name. Empty until that scheduler is created.
    """

    def __init__(self, config: HfDeepSpeedConfig) -> None:
        self._config = config
        self._made: dict[int, tuple[Any, Any]] = {}
        self.optimizer: dict[str, Any] = {}
        self.scheduler: dict[str, Any] = {}

    def find_real(self, placeholder: Placeholder, share: int) -> Any:
        """Return the optimizer or scheduler that replaces a placeholder. Repeated calls return the same object.

        Args:
            placeholder: Placeholder that the script has prepared.
            share: Number of processes. It divides a scheduler's `total_num_steps`, which is given for a single-process
                run.

        Raises:
            ConfigError: If the JSON does not define the object, or defines it with settings that do not fit.
            UnsupportedError: If the JSON's optimizer is not one of torch's that are supported.
            PrepareError: If a scheduler's `DummyOptim` is not prepared.
        """
        known = self._made.get(id(placeholder))
        if known is None:
            if isinstance(placeholder, DummyOptim):
                real = self._create_optimizer(placeholder)
            else:
                assert isinstance(placeholder, DummyScheduler)
                real = self._create_scheduler(placeholder, share)
            # The placeholder is kept with the real object, so that no other object gets the placeholder's id.
            known = placeholder, real
            self._made[id(placeholder)] = known
        return known[1]

    def _create_optimizer(self, dummy: DummyOptim) -> torch.optim.Optimizer:
        kind = self._config.get_value("optimizer.type")
        if kind is None:
            raise ConfigError(
                "DummyOptim is a placeholder for the optimizer in DeepSpeed's JSON, which has none; give a real optimizer"
            )
        known = {name.lower(): name for name in _OPTIMIZERS}
        name = known.get(str(kind).lower())
        if name is None:
            raise UnsupportedError(
                f"optimizer.type={kind!r} in DeepSpeed's JSON; allowed: {', '.join(_OPTIMIZERS)}. Or create the optimizer yourself"
            )
        self.optimizer = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
        params = _fill_in(self._config.get_value("optimizer.params") or {}, self.optimizer)
        # DeepSpeed's Adam uses AdamW's weight decay unless `adam_w_mode` is false.
        if name == "Adam" and params.get("adam_w_mode", True):
            name = "AdamW"
        kept = {key: value for key, value in params.items() if key not in _OWN_SETTINGS}
        if isinstance(kept.get("betas"), list):
            kept["betas"] = tuple(kept["betas"])
        try:
            made: torch.optim.Optimizer = getattr(torch.optim, name)(dummy.params, **kept)
        except TypeError as error:
            raise ConfigError(f"optimizer.params in DeepSpeed's JSON do not fit {name}: {error}") from None
        return made

    def _create_scheduler(self, dummy: DummyScheduler, share: int) -> Any:
        from deepspeed.runtime import lr_schedules

        optimizer = self._find_optimizer(dummy)
        if dummy.lr_scheduler_callable is not None:
            return dummy.lr_scheduler_callable(optimizer)
        kind = self._config.get_value("scheduler.type")
        if kind is None:
            raise ConfigError(
                "DummyScheduler is a placeholder for the schedule in DeepSpeed's JSON, which has none; give a real one, or a callable"
            )
        if kind not in lr_schedules.VALID_LR_SCHEDULES:
            raise ConfigError(f"scheduler.type={kind!r}; DeepSpeed has {', '.join(lr_schedules.VALID_LR_SCHEDULES)}")
        self.scheduler = {
            "warmup_min_lr": 0,
            "warmup_max_lr": optimizer.param_groups[0]["lr"],
            "warmup_num_steps": max(1, dummy.warmup_num_steps),
            **dummy.kwargs,
        }
        if dummy.total_num_steps is not None:
            self.scheduler["total_num_steps"] = math.ceil(dummy.total_num_steps / share)
        params = _fill_in(self._config.get_value("scheduler.params") or {}, self.scheduler)
        return getattr(lr_schedules, kind)(optimizer, **params)

    def _find_optimizer(self, dummy: DummyScheduler) -> torch.optim.Optimizer:
        """Return the optimizer to which a scheduler's placeholder refers, directly or through a `DummyOptim`.

        Raises:
            PrepareError: If the `DummyOptim` has not been prepared.
        """
        bound = dummy.optimizer
        if isinstance(bound, DummyOptim):
            if id(bound) not in self._made:
                raise PrepareError("DummyScheduler's optimizer is not prepared; prepare both in one call")
            return self._made[id(bound)][1]  # type: ignore[no-any-return]
        made: torch.optim.Optimizer = getattr(bound, "optimizer", bound)
        return made


def _fill_in(params: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with each "auto" replaced by a given value.

    If there is no value for an "auto", the setting is removed, so that the default of the class applies.

    Args:
        params: Settings from the JSON.
        answers: Values for "auto", by name.
    """
    filled = {key: answers.get(key, AUTO) if value == AUTO else value for key, value in params.items()}
    return {key: value for key, value in filled.items() if value != AUTO}
