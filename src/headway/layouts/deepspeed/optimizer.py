"""The user's optimizer under DeepSpeed, and the copy of it that DeepSpeed steps.

DeepSpeed replaces an optimizer's parameters with flat partitions. The user's own optimizer keeps the model's
parameters, so that schedulers, clipping, checks and checkpoints can use it. Its settings, such as learning rates, are
copied to DeepSpeed's optimizer before each step, and changes made by the step are copied back.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from headway.errors import ConfigError, PrepareError, UnsupportedError

_ELEMENTWISE = frozenset(
    ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""torch's optimizers that update each element independently."""
_REFUSED = {
    "Adafactor": "it factors matrices",
    "LBFGS": "it recomputes the loss",
    "Lamb": "it needs norms of full tensors",
    "Muon": "it orthogonalizes matrices",
    "SparseAdam": "its gradients are sparse",
}
"""Reasons why certain optimizers cannot step on flat partitions, by the class name of the optimizer."""
_CPU_ADAM_SETTINGS = {"params", "lr", "betas", "eps", "weight_decay", "initial_lr"}
"""Settings of a parameter group that DeepSpeed's CPU Adam supports."""


class PartitionedOptimizer:
    """The user's optimizer, paired with a copy on flat partitions that DeepSpeed steps.

    Args:
        user_optimizer: User's optimizer.
        allows_untested: Whether to allow optimizers that are not known to be elementwise
            (`zero_allow_untested_optimizer`).
        uses_cpu_adam: Whether DeepSpeed's CPU kernel computes Adam. If False, the copy has the class of the user's
            optimizer.

    Attributes:
        user_optimizer: User's optimizer, which keeps the model's parameters.
        stepped_copy: Optimizer with the trainable parameters of the user's optimizer. DeepSpeed's engine replaces its
            parameters with flat partitions, and steps it.

    Raises:
        UnsupportedError: If the optimizer needs unflattened tensors, which ZeRO does not keep. Also if it is not known
            to be elementwise and `allows_untested` is False, or if it is Adagrad with several parameter groups.
        PrepareError: If none of the optimizer's parameters is trainable.
        ConfigError: If DeepSpeed's CPU kernel does not support an option of the optimizer.
    """

    def __init__(self, user_optimizer: torch.optim.Optimizer, allows_untested: bool, uses_cpu_adam: bool) -> None:
        _check_kind(user_optimizer, allows_untested)
        self.user_optimizer = user_optimizer
        # Groups with trainable parameters: DeepSpeed omits frozen parameters and empty groups.
        self._group_indices = [
            index
            for index, group in enumerate(user_optimizer.param_groups)
            if any(p.requires_grad for p in group["params"])
        ]
        if not self._group_indices:
            raise PrepareError(
                f"{type(user_optimizer).__name__} has no trainable parameter; unfreeze some before prepare()"
            )
        if type(user_optimizer).__name__ == "Adagrad" and len(self._group_indices) > 1:
            raise UnsupportedError(
                "DeepSpeed merges Adagrad's parameter groups into one; use one group, or another optimizer"
            )
        groups = [_keep_trainable(group) for group in self._get_trained_groups()]
        create_copy = _create_cpu_adam if uses_cpu_adam else _copy_optimizer
        self.stepped_copy = create_copy(user_optimizer, groups)
        # Settings of the trained groups after the last step. `push_settings` compares with them what the user has changed.
        self._last_settings = [_select_settings(group) for group in self._get_trained_groups()]

    def _get_trained_groups(self) -> list[dict[str, Any]]:
        """Return the groups of the user's optimizer that have trainable parameters, in the order of DeepSpeed's."""
        return [self.user_optimizer.param_groups[index] for index in self._group_indices]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the optimizer's trainable parameters in DeepSpeed's order: group by group."""
        return [p for group in self._get_trained_groups() for p in group["params"] if p.requires_grad]

    def push_settings(self, groups: list[dict[str, Any]]) -> None:
        """Update DeepSpeed's optimizer with the settings of the user's optimizer that have changed since the last step.

        Args:
            groups: Parameter groups of DeepSpeed's optimizer.
        """
        for user_group, last_settings, group in zip(self._get_trained_groups(), self._last_settings, groups):
            for key, value in _select_settings(user_group).items():
                if key not in last_settings or not _is_same(value, last_settings[key]):
                    group[key] = value

    def pull_settings(self, groups: list[dict[str, Any]]) -> None:
        """Update the user's optimizer with the settings of DeepSpeed's optimizer, which a step may have changed.

        Settings that only DeepSpeed's optimizer has are not copied.

        Args:
            groups: Parameter groups of DeepSpeed's optimizer.
        """
        for user_group, group in zip(self._get_trained_groups(), groups):
            user_group.update({key: value for key, value in _select_settings(group).items() if key in user_group})
        self._last_settings = [_select_settings(group) for group in self._get_trained_groups()]


def _select_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group, such as its learning rate, without the parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two settings are the same object, or equal values of the same type.

    Tensors are compared by identity, because comparing their values would wait for the device.
    """
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and bool(one == other))


def _check_kind(optimizer: torch.optim.Optimizer, allows_untested: bool) -> None:
    """Raise `UnsupportedError` if an optimizer is not elementwise, or if this is unknown and not allowed."""
    name = type(optimizer).__name__
    if name in _REFUSED:
        raise UnsupportedError(
            f"{name} does not work with DeepSpeed's flattened parameters: {_REFUSED[name]}. Use AdamW, or strategy='fsdp'"
        )
    module = type(optimizer).__module__
    is_known = module.startswith("deepspeed.ops") or (module.startswith("torch.optim") and name in _ELEMENTWISE)
    if not is_known and not allows_untested:
        raise UnsupportedError(
            f"{name}: DeepSpeed flattens and partitions parameters, which is correct only for an optimizer that updates each element "
            "independently. If it does, set 'zero_allow_untested_optimizer': true in the JSON; otherwise use strategy='fsdp'"
        )


def _keep_trainable(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group without frozen parameters."""
    return {**group, "params": [p for p in group["params"] if p.requires_grad]}


def _copy_optimizer(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with the same class and attributes, but with other parameter groups and no state.

    Args:
        optimizer: Optimizer to copy.
        groups: Parameter groups of the copy.
    """
    # The constructor is not called, because its arguments are not known.
    duplicate = type(optimizer).__new__(type(optimizer))
    # A scheduler created before has replaced `step` with a method bound to the user's optimizer.
    duplicate.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    duplicate.param_groups, duplicate.state = groups, defaultdict(dict)
    return duplicate


def _create_cpu_adam(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return DeepSpeed's CPU Adam with the settings of an Adam or AdamW of torch.

    Args:
        optimizer: Optimizer that CPU Adam replaces.
        groups: Parameter groups with their settings.

    Raises:
        ConfigError: If a group enables a setting that CPU Adam does not have, such as `amsgrad`.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    enabled = {key for group in groups for key, value in group.items() if value}
    # `foreach` and `fused` do not change the result, and `adamw_mode` below replaces `decoupled_weight_decay`.
    unsupported = sorted(enabled - _CPU_ADAM_SETTINGS - {"foreach", "fused", "decoupled_weight_decay"})
    if unsupported:
        raise ConfigError(
            f"DeepSpeed's CPU Adam does not support {', '.join(unsupported)}; leave that out of {type(optimizer).__name__}, or set "
            "'zero_force_ds_cpu_optimizer': false in the JSON to use torch's own"
        )
    kept_groups = [{key: value for key, value in group.items() if key in _CPU_ADAM_SETTINGS} for group in groups]
    is_decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        group.get("decoupled_weight_decay") for group in groups
    )
    cpu_adam: torch.optim.Optimizer = DeepSpeedCPUAdam(kept_groups, adamw_mode=is_decoupled)
    return cpu_adam
