"""Find out by trial updates of a copy how an optimizer of an unknown class can update sharded parameters.

The trial makes a few updates of small parameters with copies of the optimizer, in three ways: all parameters in one
call, each parameter in a separate call, and each parameter split into up to four tensors. If splitting does not change the
result, the optimizer works element by element. If separate calls do not change it, each parameter can be updated on
another rank. Otherwise the update of one parameter depends on others, and one rank has to update all of them.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from headway.core.training.prepared.objects import contains_any, find_parameter_reference, iterate_parameters
from headway.layouts.whole_updates import _torch
from headway.layouts.whole_updates.calls import CallCounters, is_number, replace_groups
from headway.layouts.whole_updates.kinds import TrialRefused, UpdateKind
from headway.log import get_logger

log = get_logger(__name__)

_NUM_UPDATES = 12
"""Number of updates in a trial. Each scale of the gradients is used four times."""
_SCALES = (0.01, 1.0, 30.0)
"""Scales of the gradients in a trial. The largest triggers clipping in optimizers that clip."""
_MAX_SIZES = (160, 136, 4, 4)
"""Largest sizes of the dimensions of a parameter in a trial.

Optimizers treat small matrices differently, often below 128.
"""
_MIN_LEARNING_RATE = 1e-3
"""Smallest learning rate in a trial. With a rate near 0, as at the start of a warm-up, all trials would look alike."""
_TOLERANCE = 1e-5
"""Largest difference at which two trials count as equal, relative to the largest change of a parameter's elements."""


def try_kind(optimizer: torch.optim.Optimizer) -> UpdateKind:
    """Find out how an optimizer can update sharded parameters, by trial updates with copies of the optimizer.

    The optimizer, its parameters and the state of the CPU random number generator do not change. If a trial update
    raises an error, a warning is logged and the kind is `TOGETHER`, which is right for every optimizer. If the
    optimizer wraps optimizers with their own state, or if its step needs a closure, the kind is `DIRECT`.

    Raises:
        TrialRefused: If the optimizer keeps its parameters, or their IDs, outside of its parameter groups and state. Also
            if the updates of a copy change no parameter.
    """
    if _holds_other_state(optimizer):
        return UpdateKind.DIRECT
    if place := find_parameter_reference(optimizer, {id(parameter) for parameter in iterate_parameters(optimizer)}):
        raise TrialRefused(f"it keeps parameters, or their IDs, in {place}")
    shapes = [_choose_shapes(group["params"]) for group in optimizer.param_groups]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            reference = _Trial(optimizer, shapes)
            reference.run(_step_together)
            reference.check_references()
            if not reference.has_changes():
                raise TrialRefused(
                    f"in a trial of {_NUM_UPDATES} updates, it changed none of the parameters in its param_groups"
                )
            trial_of_shards = _Trial(optimizer, shapes, is_cut=True)
            trial_of_shards.run(_step_separately)
            if reference.is_close_to(trial_of_shards):
                return UpdateKind.LOCAL
            trial_of_owners = _Trial(optimizer, shapes)
            trial_of_owners.run(_step_separately)
            if reference.is_close_to(trial_of_owners):
                return UpdateKind.OWNED
    except TrialRefused:
        raise
    except Exception as error:
        name = type(optimizer).__name__
        if "closure" in str(error).lower():
            log.debug("%s was not tried: it needs a closure", name)
            return UpdateKind.DIRECT
        log.warning_once(
            "%s could not be tried on small tensors (%s: %s), so it is not known whether it can update parts or single parameters. "
            "Rank 0 gathers and updates all of them. If it works element by element, pass "
            "kwargs_handlers=[ShardingOptions(whole_updates=False)]",
            name,
            type(error).__name__,
            error,
        )
    return UpdateKind.TOGETHER


def _holds_other_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer wraps one or more optimizers that keep their own state.

    Whole-parameter updates use temporary full tensors. The inner state would be keyed by the tensors of one update and
    lost at the next. Such wrappers step on DTensors instead.
    """
    candidates: list[Any] = []
    for value in vars(optimizer).values():
        if isinstance(value, dict):
            candidates += value.values()
        elif isinstance(value, list | tuple):
            candidates += value
        else:
            candidates.append(value)
    return any(isinstance(each, torch.optim.Optimizer) and each.state is not optimizer.state for each in candidates)


def _choose_shapes(parameters: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return small shapes that represent a group's parameters: at most two for each number of dimensions."""
    shapes_by_ndim: dict[int, list[tuple[int, ...]]] = {}
    for parameter in parameters:
        shapes = shapes_by_ndim.setdefault(parameter.ndim, [])
        if len(shapes) < 2:
            max_sizes = (*_MAX_SIZES, *(2 for _ in parameter.shape))  # at most 2 in the fifth and further dimensions
            shapes.append(tuple(max(1, min(size, max_size)) for size, max_size in zip(parameter.shape, max_sizes)))
    return [shape for shapes in shapes_by_ndim.values() for shape in shapes]


class _Trial:
    """Copy of an optimizer with small parameters, for trial updates with generated gradients.

    Args:
        optimizer: Optimizer to copy.
        shapes: Shapes of the small parameters in each group.
        is_cut: Whether each parameter is split into up to four parts. The copy then gets the parts as its parameters.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, shapes: Sequence[Sequence[tuple[int, ...]]], is_cut: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        device = next(p for group in optimizer.param_groups for p in group["params"]).device
        self._is_cut = is_cut
        # Initial value, parts and total change of each small parameter. The changes are recorded after the updates.
        self._values: list[torch.Tensor] = []
        self._parts: list[list[torch.nn.Parameter]] = []
        self._changes: list[torch.Tensor] = []
        groups: list[list[torch.nn.Parameter]] = []
        for group_shapes in shapes:
            groups.append([])
            for shape in group_shapes:
                value = (torch.randn(shape, generator=generator) * 0.5).to(device, torch.float32)
                self._values.append(value)
                self._parts.append([torch.nn.Parameter(part.clone()) for part in self._split_value(value)])
                groups[-1] += self._parts[-1]
        self.optimizer = copy_optimizer(optimizer, groups)
        for group in self.optimizer.param_groups:
            rate = group.get("lr")
            if is_number(rate) and rate < _MIN_LEARNING_RATE:
                is_tensor = isinstance(rate, torch.Tensor)
                group["lr"] = torch.full_like(rate, _MIN_LEARNING_RATE) if is_tensor else _MIN_LEARNING_RATE
        self.parameters = [p for group_parameters in groups for p in group_parameters]

    def _split_value(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return a list of the parts into which the trial splits a tensor: halves along each of the first two dimensions.

        If the trial does not split parameters, the list contains only the tensor.
        """
        if not self._is_cut:
            return [value]
        parts = [value]
        for dim in range(min(2, value.ndim)):
            parts = [half for part in parts for half in part.chunk(2, dim)]
        return parts

    def run(self, step: Callable[[torch.optim.Optimizer], None]) -> None:
        """Make all trial updates, and record the changes of the parameters.

        Gradients have a constant part, because some optimizers adapt to the distance moved in one direction.

        Args:
            step: Function that steps the optimizer.
        """
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(0)
        constant_grads = [torch.randn(value.shape, generator=generator) for value in self._values]
        for index in range(_NUM_UPDATES):
            scale = _SCALES[index % len(_SCALES)]
            for value, parts, constant_grad in zip(self._values, self._parts, constant_grads):
                noise = torch.randn(value.shape, generator=generator)
                grad = ((constant_grad + 0.3 * noise) * scale).to(value.device)
                for part, part_grad in zip(parts, self._split_value(grad)):
                    part.grad = part_grad.clone()
            with torch.enable_grad():
                step(self.optimizer)
        for value, parts in zip(self._values, self._parts):
            changes = [part.detach() - before for part, before in zip(parts, self._split_value(value))]
            self._changes.append(self._join_parts(value, changes))

    def has_changes(self) -> bool:
        """Whether the trial updates changed any parameter."""
        return any(bool((change != 0).any()) for change in self._changes)

    def is_close_to(self, other: "_Trial") -> bool:
        """Whether another trial made nearly equal changes to the parameters and to the numbers in parameter groups."""
        for change, other_change in zip(self._changes, other._changes):
            if change.numel() and not bool((change - other_change).abs().max() <= _TOLERANCE * change.abs().max()):
                return False
        for numbers, other_numbers in zip(self._list_numbers(), other._list_numbers()):
            for name, number in numbers.items():
                if not math.isclose(number, other_numbers.get(name, math.inf), rel_tol=_TOLERANCE, abs_tol=1e-12):
                    return False
        return True

    def _list_numbers(self) -> list[dict[str, float]]:
        """Return the finite numbers in each parameter group, and in the last dict those in the optimizer's attributes."""
        return [
            {name: float(value) for name, value in values.items() if is_number(value) and math.isfinite(value)}
            for values in [*self.optimizer.param_groups, vars(self.optimizer)]
        ]

    def _join_parts(self, value: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the parts into which the trial splits a tensor as one new tensor.

        Args:
            value: Tensor with the shape of the result.
            parts: Values of the parts, in the order of `_split_value`.
        """
        joined = torch.empty_like(value)
        for target, part in zip(self._split_value(joined), parts):
            target.copy_(part)
        return joined

    def check_references(self) -> None:
        """Raise an error unless the optimizer refers to its parameters only in its groups and as keys of its state.

        Raises:
            TrialRefused: If an attribute or a state contains parameters, their IDs or their data pointers.
        """
        ids = {id(p) for p in self.parameters} | {p.data_ptr() for p in self.parameters}
        if place := find_parameter_reference(self.optimizer, ids):
            raise TrialRefused(f"it keeps parameters, or their IDs, in {place}")
        for state in self.optimizer.state.values():
            if contains_any(state, ids):
                raise TrialRefused("its state refers to parameters, or to their IDs")


def copy_optimizer(optimizer: Any, groups: Sequence[Sequence[torch.nn.Parameter]]) -> Any:
    """Return a copy of an optimizer, without state and with other parameters in its groups.

    `copy.deepcopy` cannot be used, because deep copies of torch's optimizers have only groups, defaults and state.
    Attributes that subclasses have set would be lost.

    Args:
        optimizer: Optimizer to copy. Optimizers in its attributes are copied, too.
        groups: Parameters for each group of the copy.
    """
    duplicate = object.__new__(type(optimizer))
    duplicate_groups: list[dict[str, Any]] = []
    # Attributes that refer to the optimizer, its groups or their list shall refer to the copies of these.
    memo: dict[int, Any] = {id(optimizer): duplicate, id(optimizer.param_groups): duplicate_groups}
    for group, parameters in zip(optimizer.param_groups, groups):
        duplicate_group = {
            name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")
        }
        if "param_names" in group:
            duplicate_group["param_names"] = [f"p{index}" for index in range(len(parameters))]
        duplicate_group["params"] = list(parameters)
        memo[id(group)] = duplicate_group
        duplicate_groups.append(duplicate_group)
    _copy_attributes(optimizer, duplicate, memo)
    return duplicate


def _copy_attributes(optimizer: Any, duplicate: Any, memo: dict[int, Any]) -> None:
    """Copy an optimizer's attributes, without hooks and state.

    Args:
        optimizer: Optimizer to copy.
        duplicate: Copy to which the attributes are added.
        memo: Copies that exist already, by the ID of the original, as for `copy.deepcopy`.
    """
    attributes = vars(duplicate)
    for name, value in vars(optimizer).items():
        if name in _torch.STEP_AND_SAVE_HOOKS or name in _torch.LOAD_HOOKS:
            attributes[name] = OrderedDict()
        elif name == "state":
            attributes[name] = copy.copy(value)
            attributes[name].clear()
        elif isinstance(value, torch.optim.Optimizer):
            if id(value) not in memo:
                memo[id(value)] = object.__new__(type(value))
                _copy_attributes(value, memo[id(value)], memo)
            attributes[name] = memo[id(value)]
        elif name != "step":  # a scheduler's wrapper around the original optimizer's step
            attributes[name] = copy.deepcopy(value, memo)


def _step_together(optimizer: torch.optim.Optimizer) -> None:
    """Make a step of the optimizer with all parameters at once."""
    optimizer.step()


def _step_separately(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's step once for each parameter, as if each parameter were updated on another rank."""
    counters = CallCounters(optimizer)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for group_index, parameters in enumerate(groups):
        for parameter in parameters:
            counters.rewind()
            tensors_by_group = [[parameter] if index == group_index else [] for index in range(len(groups))]
            with replace_groups(optimizer, tensors_by_group):
                optimizer.step()
