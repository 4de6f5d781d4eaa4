"""Detection of updates by an optimizer's own step methods, such as SAM's `first_step()` and `second_step()`.

A prepared optimizer forwards these methods to the user's optimizer. They change the parameters without Headway's step().
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from headway.common.callsite import find_call_site
from headway.core.training._torch import is_fake
from headway.core.training.checksums import has_bits, try_checksums
from headway.core.training.prepared.objects import iterate_parameters
from headway.core.weights.pieces import is_dtensor
from headway.log import get_logger

log = get_logger(__name__)

_WORDS = {"step", "update"}
_NUM_CALLS_WITH_CHECKSUMS = 2
"""Number of calls of each method in which the parameters' values are compared, too.

Writes to `parameter.data` do not change torch's version counters. A few calls find them, and keep later calls fast.
"""
_BYPASS = (
    "%s.%s() at %s changed parameters. Only step() of a prepared optimizer waits for the end of an accumulation window, divides "
    "fp16's loss scale out of the gradients, skips updates that are not finite, and counts the update, which schedules, weight "
    "averages and checkpoints follow. Call step(closure) if the optimizer supports it, with a closure that calls "
    "accelerator.backward() again (docs/optimizers.md#optimizers-with-step-methods-of-their-own)"
)


class StepMethodWatch:
    """Watch over the step methods of an optimizer's own, which warns once if such a method changes parameters.

    Args:
        optimizer: The user's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._has_warned = False
        self._num_calls: Counter[str] = Counter()  # by the name of the method

    def wrap_method(self, name: str, value: Any) -> Any:
        """Return a method of the optimizer so that its calls are watched, and any other value unchanged.

        Only public methods are watched that torch's optimizers do not have, and whose name contains the word "step" or
        "update". Other methods may change parameters for good reasons, such as swapping them with averages.

        Args:
            name: Name of the attribute.
            value: Value of the attribute.
        """
        is_own = not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
        if is_own and inspect.ismethod(value) and not _WORDS.isdisjoint(name.split("_")):
            return functools.wraps(value)(functools.partial(self._call_method, name, value))
        return value

    def _call_method(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method, and return its result. Warn once if it has changed parameters."""
        if self._has_warned:
            return method(*args, **kwargs)
        self._num_calls[name] += 1
        read_checksums = self._num_calls[name] <= _NUM_CALLS_WITH_CHECKSUMS
        versions = _read_versions(self._optimizer)
        checksums = _read_checksums(self._optimizer) if read_checksums else None
        result = method(*args, **kwargs)
        has_changed = _read_versions(self._optimizer) != versions
        if not has_changed and checksums is not None:
            new_checksums = _read_checksums(self._optimizer)
            has_changed = new_checksums not in (checksums, None)
        if has_changed:
            self._has_warned = True
            log.warning(_BYPASS, type(self._optimizer).__name__, name, find_call_site())
        return result


def _list_local_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters. A DTensor is followed by this rank's shard of it."""
    tensors: list[torch.Tensor] = []
    for parameter in iterate_parameters(optimizer):
        tensors.append(parameter)
        if is_dtensor(parameter):
            tensors.append(parameter._local_tensor)
    return tensors


def _read_versions(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return torch's version counters of an optimizer's parameters, which change if parameters are changed in place."""
    return [tensor._version for tensor in _list_local_parameters(optimizer)]


def _read_checksums(optimizer: torch.optim.Optimizer) -> list[int] | None:
    """Return checksums of an optimizer's parameters, or None if memory runs out."""
    return try_checksums([each for each in _list_local_parameters(optimizer) if has_bits(each) and not is_fake(each)])
