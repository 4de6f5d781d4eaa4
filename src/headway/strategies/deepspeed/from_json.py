"""The optimizer and the schedule that DeepSpeed's JSON defines, made real for `DummyOptim` and `DummyScheduler`."""

import math
from typing import Any

import torch

from headway.errors import ConfigError, PrepareError, UnsupportedError
from headway.strategies.deepspeed.plugin import AUTO, DummyOptim, DummyScheduler, HfDeepSpeedConfig

_OPTIMIZERS = ("Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD")
_DEEPSPEEDS = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}


class StandIns:
    """What stands for what, of one run.

    Args:
        config: DeepSpeed's JSON.

    Attributes:
        optimizer, scheduler: what the JSON's "auto" stood for, by name.
    """

    def __init__(self, config: HfDeepSpeedConfig) -> None:
        self._config = config
        self._made: dict[int, tuple[Any, Any]] = {}
        self.optimizer: dict[str, Any] = {}
        self.scheduler: dict[str, Any] = {}

    def real(self, dummy: DummyOptim | DummyScheduler, share: int) -> Any:
        """The real object: the same one each time.

        Args:
            dummy: the stand-in.
            share: of how many processes' updates each one makes its own.

        Raises:
            ConfigError: the JSON does not define it.
        """
        known = self._made.get(id(dummy))
        if known is None:
            real = self._optimizer(dummy) if isinstance(dummy, DummyOptim) else self._scheduler(dummy, share)
            known = self._made[id(dummy)] = dummy, real
        return known[1]

    def _optimizer(self, dummy: DummyOptim) -> torch.optim.Optimizer:
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
        params = _filled(self._config.get_value("optimizer.params") or {}, self.optimizer)
        # DeepSpeed's Adam decays weights as AdamW does, unless it is told otherwise.
        if name == "Adam" and params.get("adam_w_mode", True):
            name = "AdamW"
        kept = {key: value for key, value in params.items() if key not in _DEEPSPEEDS}
        for key in ("betas",):
            if isinstance(kept.get(key), list):
                kept[key] = tuple(kept[key])
        try:
            made: torch.optim.Optimizer = getattr(torch.optim, name)(dummy.params, **kept)
        except TypeError as error:
            raise ConfigError(f"optimizer.params in DeepSpeed's JSON do not fit {name}: {error}") from None
        return made

    def _scheduler(self, dummy: DummyScheduler, share: int) -> Any:
        from deepspeed.runtime import lr_schedules

        optimizer = self._bound(dummy)
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
        params = _filled(self._config.get_value("scheduler.params") or {}, self.scheduler)
        return getattr(lr_schedules, kind)(optimizer, **params)

    def _bound(self, dummy: DummyScheduler) -> torch.optim.Optimizer:
        bound = dummy.optimizer
        if isinstance(bound, DummyOptim):
            if id(bound) not in self._made:
                raise PrepareError("DummyScheduler's optimizer is not prepared; prepare both in one call")
            return self._made[id(bound)][1]  # type: ignore[no-any-return]
        made: torch.optim.Optimizer = getattr(bound, "optimizer", bound)
        return made


def _filled(params: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    """With each "auto" filled, or left out where nobody knows: the class's own default applies."""
    filled = {key: answers.get(key, AUTO) if value == AUTO else value for key, value in params.items()}
    return {key: value for key, value in filled.items() if value != AUTO}
