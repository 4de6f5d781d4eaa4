"""Call an optimizer for some of its parameters at a time, with other tensors in place of the parameters.

Parameter groups and their lists keep their identity, because schedulers and wrappers refer to them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_PARAMETER_KEYS = {"params", "param_names"}
"""Keys of a parameter group that do not contain options."""


@contextmanager
def replace_groups(
    optimizer: torch.optim.Optimizer, tensors_by_group: Sequence[Sequence[torch.Tensor]]
) -> Iterator[None]:
    """Return a context in which each parameter group contains other tensors. On exit, the groups are restored.

    Args:
        optimizer: Optimizer whose groups are changed.
        tensors_by_group: Tensors for each group. Groups without tensors are removed in the context.
    """
    groups = list(optimizer.param_groups)
    originals = [(group, list(group["params"]), group.get("param_names")) for group in groups]
    try:
        for group, tensors in zip(groups, tensors_by_group):
            group["params"][:] = tensors
            if "param_names" in group:  # must have one name per parameter
                group["param_names"] = [f"p{index}" for index in range(len(tensors))]
        optimizer.param_groups[:] = [group for group, tensors in zip(groups, tensors_by_group) if tensors]
        yield
    finally:
        optimizer.param_groups[:] = groups
        for group, parameters, names in originals:
            group["params"][:] = parameters
            if names is not None:
                group["param_names"] = names


def is_number(value: Any) -> bool:
    """Whether a value of a group or an attribute is a number. Tensors with one element count as numbers."""
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def read_numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers in a dict, with tensors detached and on the CPU so that they can be sent to other ranks.

    Args:
        values: Parameter group, or dict of an optimizer's attributes.
    """
    return {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
        if is_number(value)
    }


def write_numbers(values: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Set the numbers in a dict to those that `read_numbers` has returned. Tensors are changed in place.

    Args:
        values: Parameter group, or dict of an optimizer's attributes.
        numbers: Return value of `read_numbers` on this or another rank.
    """
    for name, number in numbers.items():
        current = values.get(name)
        if isinstance(current, torch.Tensor):
            current.copy_(number)
        else:
            values[name] = number


class _RecordedOption(NamedTuple):
    """Option of a parameter group.

    Attributes:
        value: Value of the option.
        clone: Clone of the value if it is a tensor, because a step can change the tensor in place. None for others.
    """

    value: Any
    clone: torch.Tensor | None


class CallCounters:
    """Recorded values of the counters that an optimizer increases in each call of `step`, such as `group["step"]`.

    They are restored between the calls for one update, so that these count as one call. All options of the groups and
    all numeric attributes of the optimizer are recorded, because the names of counters are not known.

    Args:
        optimizer: Optimizer whose counters are recorded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # Pairs of (parameter group, its recorded options).
        self._groups: list[tuple[dict[str, Any], dict[str, _RecordedOption]]] = []
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name not in _PARAMETER_KEYS}
            recorded = {name: _RecordedOption(value, _clone_tensor(value)) for name, value in options.items()}
            self._groups.append((group, recorded))
        self._attributes = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)}

    def rewind(self) -> None:
        """Restore the optimizer's counters to their recorded values, before another call for the current update."""
        for group, options in self._groups:
            added_names = group.keys() - options.keys() - _PARAMETER_KEYS
            for name in added_names:
                del group[name]
            for name, (value, clone) in options.items():
                if clone is not None:
                    with torch.no_grad():
                        value.copy_(clone)
                group[name] = value
        vars(self._optimizer).update(self._attributes)


def _clone_tensor(value: Any) -> Any:
    """Return a detached clone of a tensor, or None for other values."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else None
