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
_DEEPSPEED_SETTINGS = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
"""Settings that DeepSpeed's optimizer classes have, but torch's optimizer classes do not have."""


class StandIns:
    """Factory and cache of the optimizers and schedulers that replace placeholders such as `DummyOptim`.

    Args:
        config: JSON configuration of DeepSpeed.

    Attributes:
        optimizer_values: Values for "auto" settings of the JSON's optimizer, by name. Empty until the optimizer is
            created.
        scheduler_values: Values for "auto" settings of the JSON's scheduler, by name. Empty until that scheduler is
            created.
    """

    def __init__(self, config: HfDeepSpeedConfig) -> None:
        self._config = config
        # By the placeholder's id. The placeholder is kept, too, so that no other object gets its id.
        self._replacements: dict[int, tuple[Placeholder, Any]] = {}
        self.optimizer_values: dict[str, Any] = {}
        self.scheduler_values: dict[str, Any] = {}

    def get_replacement(self, placeholder: Placeholder, update_ratio: int) -> Any:
        """Return the optimizer or scheduler that replaces a placeholder. It is created by the first call.

        Args:
            placeholder: Placeholder that the script has prepared.
            update_ratio: Number of updates that a single-process run makes on the data of one update of this run. A
                scheduler's `total_num_steps`, which is given for a single-process run, is divided by it.

        Raises:
            ConfigError: If the JSON does not define the object, or defines it with settings that do not fit.
            UnsupportedError: If the JSON's optimizer is not one of torch's that are supported.
            PrepareError: If a scheduler's `DummyOptim` is not prepared.
        """
        if id(placeholder) not in self._replacements:
            replacement: Any
            if isinstance(placeholder, DummyOptim):
                replacement = self._create_optimizer(placeholder)
            else:
                assert isinstance(placeholder, DummyScheduler)
                replacement = self._create_scheduler(placeholder, update_ratio)
            self._replacements[id(placeholder)] = placeholder, replacement
        _, replacement = self._replacements[id(placeholder)]
        return replacement

    def _create_optimizer(self, dummy: DummyOptim) -> torch.optim.Optimizer:
        """Return torch's optimizer of the JSON's type, with the JSON's settings.

        Args:
            dummy: Placeholder with the parameters and the values for "auto".

        Raises:
            ConfigError: If the JSON has no optimizer, or settings that do not fit its class.
            UnsupportedError: If the type is not supported.
        """
        kind = self._config.get_value("optimizer.type")
        if kind is None:
            raise ConfigError(
                "DummyOptim is a placeholder for the optimizer in DeepSpeed's JSON, which has none; give a real optimizer"
            )
        names = {name.lower(): name for name in _OPTIMIZERS}  # DeepSpeed ignores upper and lower case
        name = names.get(str(kind).lower())
        if name is None:
            raise UnsupportedError(
                f"optimizer.type={kind!r} in DeepSpeed's JSON; allowed: {', '.join(_OPTIMIZERS)}. Or create the optimizer yourself"
            )
        self.optimizer_values = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
        params = _replace_auto(self._config.get_value("optimizer.params") or {}, self.optimizer_values)
        # DeepSpeed's Adam uses AdamW's weight decay unless `adam_w_mode` is false.
        if name == "Adam" and params.get("adam_w_mode", True):
            name = "AdamW"
        settings = {key: value for key, value in params.items() if key not in _DEEPSPEED_SETTINGS}
        if isinstance(settings.get("betas"), list):
            settings["betas"] = tuple(settings["betas"])
        try:
            optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(dummy.params, **settings)
        except TypeError as error:
            raise ConfigError(f"optimizer.params in DeepSpeed's JSON do not fit {name}: {error}") from None
        return optimizer

    def _create_scheduler(self, dummy: DummyScheduler, update_ratio: int) -> Any:
        """Return the scheduler that the placeholder's function creates, or DeepSpeed's of the type in the JSON.

        Args:
            dummy: Placeholder with the optimizer and the values for "auto".
            update_ratio: Number of updates of a single-process run per update of this run, which divides `total_num_steps`.

        Raises:
            ConfigError: If there is no function, and the JSON has no scheduler or an unknown type.
            PrepareError: If the placeholder refers to a `DummyOptim` that is not prepared.
        """
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
        self.scheduler_values = {
            "warmup_min_lr": 0,
            "warmup_max_lr": optimizer.param_groups[0]["lr"],
            "warmup_num_steps": max(1, dummy.warmup_num_steps),
            **dummy.kwargs,
        }
        if dummy.total_num_steps is not None:
            self.scheduler_values["total_num_steps"] = math.ceil(dummy.total_num_steps / update_ratio)
        params = _replace_auto(self._config.get_value("scheduler.params") or {}, self.scheduler_values)
        return getattr(lr_schedules, kind)(optimizer, **params)

    def _find_optimizer(self, dummy: DummyScheduler) -> torch.optim.Optimizer:
        """Return the optimizer to which a scheduler's placeholder refers, directly or through a `DummyOptim`.

        Raises:
            PrepareError: If the `DummyOptim` has not been prepared.
        """
        if isinstance(dummy.optimizer, DummyOptim):
            if id(dummy.optimizer) not in self._replacements:
                raise PrepareError("DummyScheduler's optimizer is not prepared; prepare both in one call")
            _, replacement = self._replacements[id(dummy.optimizer)]
            return replacement  # type: ignore[no-any-return]
        # A prepared optimizer wraps the optimizer that the scheduler needs.
        optimizer: torch.optim.Optimizer = getattr(dummy.optimizer, "optimizer", dummy.optimizer)
        return optimizer


def _replace_auto(params: dict[str, Any], auto_values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with each "auto" replaced by its value.

    If there is no value for an "auto", the setting is removed, so that the default of the class applies.

    Args:
        params: Settings from the JSON.
        auto_values: Values for "auto", by name.
    """
    settings = {}
    for key, value in params.items():
        resolved = auto_values.get(key, AUTO) if value == AUTO else value
        if resolved != AUTO:
            settings[key] = resolved
    return settings
