"""The optimizer that DeepSpeed steps: a second one of the user's type, over flat partitions of the parameters.

DeepSpeed puts flat pieces in the place of an optimizer's parameters. The user's own optimizer keeps the model's parameters, so
that schedules, clipping, checks and checkpoints find what they know; its settings (learning rates, above all) go to the other one
before each step, and what its step changes comes back.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from headway.errors import ConfigError, PrepareError, UnsupportedError

_ELEMENTWISE = frozenset(
    ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
_BY_SHAPE = {
    "Adafactor": "it factors matrices",
    "LBFGS": "it runs the loss again",
    "Lamb": "it needs norms of whole tensors",
    "Muon": "it orthogonalises matrices",
    "SparseAdam": "its gradients are sparse",
}
_CPU_ADAM_TAKES = {"params", "lr", "betas", "eps", "weight_decay", "initial_lr"}


class PartitionedOptimizer:
    """The user's optimizer beside the one that DeepSpeed gets.

    Args:
        given: the user's.
        untested: optimizers that nobody knows may be taken (`zero_allow_untested_optimizer`).
        uses_cpu_adam: let DeepSpeed compute Adam on the host, by its own kernel; else in the optimizer's own class.

    Attributes:
        given: as above.
        inner: what DeepSpeed gets.

    Raises:
        UnsupportedError: an optimizer that needs whole tensors, which ZeRO flattens.
        PrepareError: none of its parameters learns.
    """

    def __init__(self, given: torch.optim.Optimizer, untested: bool, uses_cpu_adam: bool) -> None:
        _check_kind(given, untested)
        self.given = given
        # DeepSpeed leaves frozen parameters and empty groups out.
        self._numbers = [
            n for n, group in enumerate(given.param_groups) if any(p.requires_grad for p in group["params"])
        ]
        if not self._numbers:
            raise PrepareError(f"{type(given).__name__} has no trainable parameter; unfreeze some before prepare()")
        if type(given).__name__ == "Adagrad" and len(self._numbers) > 1:
            raise UnsupportedError(
                "DeepSpeed merges Adagrad's parameter groups into one; use one group, or another optimizer"
            )
        groups = [_learning(given.param_groups[n]) for n in self._numbers]
        self.inner = _cpu_adam(given, groups) if uses_cpu_adam else _copy_kind(given, groups)
        self._last = [self._settings(given.param_groups[n]) for n in self._numbers]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that learn, in DeepSpeed's order."""
        groups = (self.given.param_groups[n] for n in self._numbers)
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def push(self, groups: list[dict[str, Any]]) -> None:
        """Settings that were changed since the last step go to the groups that DeepSpeed steps."""
        for n, last, group in zip(self._numbers, self._last, groups):
            for key, value in self._settings(self.given.param_groups[n]).items():
                if key not in last or not _is_same(value, last[key]):
                    group[key] = value

    def pull(self, groups: list[dict[str, Any]]) -> None:
        """What the step changed of its settings comes back."""
        for n, group in zip(self._numbers, groups):
            mine = self.given.param_groups[n]
            mine.update({key: value for key, value in self._settings(group).items() if key in mine})
        self._last = [self._settings(self.given.param_groups[n]) for n in self._numbers]

    @staticmethod
    def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key != "params"}


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and bool(one == other))


def _check_kind(given: torch.optim.Optimizer, untested: bool) -> None:
    name = type(given).__name__
    if name in _BY_SHAPE:
        raise UnsupportedError(
            f"{name} does not work with DeepSpeed, which flattens and partitions parameters: {_BY_SHAPE[name]}. Use AdamW, or "
            "strategy='fsdp'"
        )
    home = type(given).__module__
    is_known = home.startswith("deepspeed.ops") or (home.startswith("torch.optim") and name in _ELEMENTWISE)
    if not is_known and not untested:
        raise UnsupportedError(
            f"{name}: DeepSpeed flattens and partitions parameters, which is correct only for an optimizer that updates each element "
            "independently. If it does, set 'zero_allow_untested_optimizer': true in the JSON; otherwise use strategy='fsdp'"
        )


def _learning(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, "params": [p for p in group["params"] if p.requires_grad]}


def _copy_kind(given: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The same class with the same attributes, but with groups and state of its own."""
    made = type(given).__new__(type(given))
    # A schedule that was made before has put a bound `step` of the user's optimizer there.
    made.__dict__.update({key: value for key, value in vars(given).items() if key != "step"})
    made.param_groups, made.state = groups, defaultdict(dict)
    return made


def _cpu_adam(given: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    odd = sorted({key for group in groups for key, value in group.items() if key not in _CPU_ADAM_TAKES and value})
    odd = [key for key in odd if key not in ("foreach", "fused", "decoupled_weight_decay")]
    if odd:
        raise ConfigError(
            f"DeepSpeed's CPU Adam does not support {', '.join(odd)}; leave that out of {type(given).__name__}, or set "
            "'zero_force_ds_cpu_optimizer': false in the JSON to use torch's own"
        )
    kept = [{key: value for key, value in group.items() if key in _CPU_ADAM_TAKES} for group in groups]
    is_decoupled = isinstance(given, torch.optim.AdamW) or any(group.get("decoupled_weight_decay") for group in groups)
    made: torch.optim.Optimizer = DeepSpeedCPUAdam(kept, adamw_mode=is_decoupled)
    return made


def takes_cpu_adam(given: torch.optim.Optimizer) -> bool:
    """Is it an Adam of torch's, for which DeepSpeed has a kernel of its own on the host?"""
    return type(given) in (torch.optim.Adam, torch.optim.AdamW)
