"""Decide how an optimizer updates sharded parameters: by its class if that is known, else by trial updates of a copy.

The trial makes a few updates of small parameters with copies of the optimizer, in three ways: all parameters in one
call, each parameter in a separate call, and each parameter cut into up to four tensors. If cutting does not change the
result, the optimizer works element by element. If separate calls do not change it, each parameter can be updated on
another rank. Otherwise the update of one parameter depends on others, and one rank has to update all of them.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch

from headway.core.training.prepared.objects import contains_any, find_parameter_reference, iterate_parameters
from headway.layouts.low_bit import bitsandbytes
from headway.layouts.low_bit.states import keeps_low_bit_state
from headway.layouts.whole_updates import _torch
from headway.layouts.whole_updates.calls import CallCounters, is_number, replace_groups
from headway.log import get_logger

log = get_logger(__name__)


class UpdateKind(Enum):
    """Ways in which an optimizer can update sharded parameters."""

    DIRECT = "on DTensors"
    """The optimizer's step receives DTensors directly, as in plain torch."""
    LOCAL = "on local shards"
    """The optimizer works element by element and receives this rank's shards as plain tensors."""
    OWNED = "by owners"
    """The optimizer receives whole parameters. Each is updated on one rank, its owner."""
    TOGETHER = "by one rank"
    """The optimizer receives all whole parameters on one rank, because their updates depend on each other."""


_PLAIN = (
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop SGD LBFGS SparseAdam AdamWScheduleFree SGDScheduleFree "
    "RAdamScheduleFree"
)
_KNOWN = {
    **{(package, name): UpdateKind.DIRECT for package in ("torch", "schedulefree") for name in _PLAIN.split()},
    ("torch", "Adafactor"): UpdateKind.OWNED,
    ("torch", "Muon"): UpdateKind.OWNED,
    ("torch", "Rprop"): UpdateKind.LOCAL,
    ("transformers", "Adafactor"): UpdateKind.OWNED,
    ("headway", "MatrixOptimizer"): UpdateKind.OWNED,
}
"""Kinds by package and class name. Other classes, including subclasses of these, are tested by a trial."""
_LEFT_ALONE = ("torchao", "bitsandbytes", "deepspeed")
"""Packages whose optimizers manage the storage of parameters themselves.

Those that do not keep low-bit states are called directly, or rejected by other checks.
"""
_NEVER_FUSED = ("SGD", "Adagrad")
"""Optimizers whose fused step supports plain tensors only."""


def find_known_kind(optimizer: torch.optim.Optimizer) -> UpdateKind | None:
    """Return the kind of updates that an optimizer of a known class makes, or None if a trial is necessary.

    Low-bit optimizers count as known. They work element by element, except that the values of a block share a scale. A
    trial that cuts parameters changes the blocks, so it would find small differences.

    Raises:
        TrialRefused: If the optimizer keeps low-bit states and needs norms of whole parameters.
    """
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    if keeps_low_bit_state(optimizer):
        if bitsandbytes.needs_whole_norms(optimizer):
            raise TrialRefused("it computes norms of whole parameters, and each rank has shards")
        return UpdateKind.LOCAL
    if any(each.__module__.partition(".")[0] in _LEFT_ALONE for each in kind.__mro__):
        return UpdateKind.DIRECT
    if package == "torch" and kind.__name__ in _NEVER_FUSED and any(g.get("fused") for g in optimizer.param_groups):
        return UpdateKind.LOCAL
    return find_known_class(kind)


def find_known_class(kind: type) -> UpdateKind | None:
    """Return the kind of updates that a class of optimizers makes, or None if a trial is necessary."""
    return _KNOWN.get((kind.__module__.partition(".")[0], kind.__name__))


class TrialRefused(Exception):
    """Raised if an optimizer cannot update other tensors, such as shards, in place of its own parameters."""


_NUM_UPDATES = 12
_SCALES = (0.01, 1.0, 30.0)
"""Scales of the gradients in a trial. The largest triggers clipping in optimizers that clip."""
_SIZES = (160, 136, 4, 4)
"""Largest sizes of the dimensions of a parameter in a trial.

Optimizers treat small matrices differently, often below 128.
"""
_LEAST_RATE = 1e-3
"""Smallest learning rate in a trial. With a rate near 0, as at the start of a warm-up, all trials would look alike."""
_TOLERANCE = 1e-5
"""Largest difference at which two trials count as equal, relative to the largest change of a parameter's elements."""


def _holds_other_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer wraps one or more optimizers that keep their own state.

    Whole-parameter updates use temporary full tensors. The inner state would be keyed by the tensors of one update and
    lost at the next. Such wrappers step on DTensors instead.
    """
    inner: list[Any] = []
    for value in vars(optimizer).values():
        inner += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return any(isinstance(each, torch.optim.Optimizer) and each.state is not optimizer.state for each in inner)


def try_kind(optimizer: torch.optim.Optimizer) -> UpdateKind:
    """Find out how an optimizer can update sharded parameters, by trial updates with copies of the optimizer.

    The optimizer, its parameters and the state of the CPU random number generator do not change. If the trial fails,
    the kind is `TOGETHER`, which is right for every optimizer. If the optimizer wraps optimizers with their own state,
    or if its step needs a closure, the kind is `DIRECT`.

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
            whole = _Trial(optimizer, shapes)
            whole.run(_step_together)
            whole.check_references()
            if not whole.has_changes():
                raise TrialRefused(
                    f"in a trial of {_NUM_UPDATES} updates, it changed none of the parameters in its param_groups"
                )
            cut, apart = _Trial(optimizer, shapes, is_cut=True), _Trial(optimizer, shapes)
            cut.run(_step_apart)
            if whole.is_close_to(cut):
                return UpdateKind.LOCAL
            apart.run(_step_apart)
            if whole.is_close_to(apart):
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


def _choose_shapes(parameters: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return small shapes that represent a group's parameters: at most two for each number of dimensions."""
    chosen: dict[int, list[tuple[int, ...]]] = {}
    for parameter in parameters:
        few = chosen.setdefault(parameter.ndim, [])
        if len(few) < 2:
            sizes = (*_SIZES, *(2 for _ in parameter.shape))
            few.append(tuple(max(1, min(size, most)) for size, most in zip(parameter.shape, sizes)))
    return [shape for few in chosen.values() for shape in few]


class _Trial:
    """Copy of an optimizer with small parameters, for trial updates with generated gradients.

    Args:
        optimizer: Optimizer to copy.
        shapes: Shapes of the small parameters in each group.
        is_cut: Whether each parameter is cut into up to four parts. The copy then gets the parts as its parameters.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, shapes: Sequence[Sequence[tuple[int, ...]]], is_cut: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        first = next(p for group in optimizer.param_groups for p in group["params"])
        device, dtype = first.device, torch.float32
        self._values: list[torch.Tensor] = []
        self._changes: list[torch.Tensor] = []
        self._parts: list[list[torch.nn.Parameter]] = []
        self._is_cut = is_cut
        groups: list[list[torch.nn.Parameter]] = []
        for each in shapes:
            own: list[torch.nn.Parameter] = []
            for shape in each:
                value = (torch.randn(shape, generator=generator) * 0.5).to(device, dtype)
                self._values.append(value)
                self._parts.append([torch.nn.Parameter(part.clone()) for part in self._split_value(value)])
                own += self._parts[-1]
            groups.append(own)
        self.optimizer = copy_optimizer(optimizer, groups)
        for group in self.optimizer.param_groups:
            rate = group.get("lr")
            if is_number(rate) and rate < _LEAST_RATE:
                group["lr"] = torch.full_like(rate, _LEAST_RATE) if isinstance(rate, torch.Tensor) else _LEAST_RATE
        self.parameters = [p for own in groups for p in own]

    def _split_value(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return a list of the parts into which the trial cuts a tensor: halves along each of the first two dimensions.

        If the trial does not cut parameters, the list contains only the tensor.
        """
        if not self._is_cut:
            return [value]
        parts = [value]
        for dim in range(min(2, value.ndim)):
            parts = [piece for part in parts for piece in part.chunk(2, dim)]
        return parts

    def run(self, step: Callable[[torch.optim.Optimizer], None]) -> None:
        """Make all trial updates, and record the changes of the parameters.

        Gradients have a constant part, because some optimizers adapt to the distance moved in one direction.

        Args:
            step: Function that steps the optimizer.
        """
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(0)
        constant = [torch.randn(value.shape, generator=generator) for value in self._values]
        for number in range(_NUM_UPDATES):
            scale = _SCALES[number % len(_SCALES)]
            for value, parts, always in zip(self._values, self._parts, constant):
                noise = torch.randn(value.shape, generator=generator)
                grad = ((always + 0.3 * noise) * scale).to(value.device)
                for part, piece in zip(parts, self._split_value(grad)):
                    part.grad = piece.clone()
            with torch.enable_grad():
                step(self.optimizer)
        for value, parts in zip(self._values, self._parts):
            change = [part.detach() - piece for part, piece in zip(parts, self._split_value(value))]
            self._changes.append(self._join_parts(value, change))

    def has_changes(self) -> bool:
        """Whether the trial updates changed any parameter."""
        return any(bool((change != 0).any()) for change in self._changes)

    def is_close_to(self, other: "_Trial") -> bool:
        """Whether another trial made nearly equal changes to the parameters and to the numbers in parameter groups."""
        is_alike = all(
            not change.numel() or bool((change - theirs).abs().max() <= _TOLERANCE * change.abs().max())
            for change, theirs in zip(self._changes, other._changes)
        )
        return is_alike and all(
            math.isclose(value, found.get(name, math.inf), rel_tol=_TOLERANCE, abs_tol=1e-12)
            for group, found in zip(self._list_numbers(), other._list_numbers())
            for name, value in group.items()
        )

    def _list_numbers(self) -> list[dict[str, float]]:
        """Return the numbers in each parameter group, and those in the optimizer's attributes."""
        every = [*self.optimizer.param_groups, vars(self.optimizer)]
        return [
            {name: float(value) for name, value in each.items() if is_number(value) and math.isfinite(value)}
            for each in every
        ]

    def _join_parts(self, value: torch.Tensor, change: list[torch.Tensor]) -> torch.Tensor:
        """Return the changes of a parameter's parts as one tensor of the parameter's shape."""
        whole = torch.empty_like(value)
        for part, piece in zip(change, self._split_value(whole)):
            piece.copy_(part)
        return whole

    def check_references(self) -> None:
        """Raise an error unless the optimizer refers to its parameters only in its groups and as keys of its state.

        Raises:
            TrialRefused: If an attribute or a state contains parameters, their IDs or their data pointers.
        """
        keys = {id(p) for p in self.parameters}
        keys |= {p.data_ptr() for p in self.parameters}
        if place := find_parameter_reference(self.optimizer, keys):
            raise TrialRefused(f"it keeps parameters, or their IDs, in {place}")
        for state in self.optimizer.state.values():
            if contains_any(state, keys):
                raise TrialRefused("its state refers to parameters, or to their IDs")


def copy_optimizer(optimizer: Any, groups: Sequence[Sequence[torch.nn.Parameter]]) -> Any:
    """Return a copy of an optimizer, without state and with other parameters in its groups.

    `copy.deepcopy` cannot be used, because deep copies of torch's optimizers have only groups, defaults and state.
    Attributes that subclasses have set would be lost.

    Args:
        optimizer: Optimizer to copy. Optimizers in its attributes are copied, too.
        groups: Parameters for each group of the copy.
    """
    made = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): made}
    memo[id(optimizer.param_groups)] = made_groups = []
    for group, own in zip(optimizer.param_groups, groups):
        options = {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
        names = {"param_names": [f"p{n}" for n in range(len(own))]} if "param_names" in group else {}
        memo[id(group)] = {**options, **names, "params": list(own)}
        made_groups.append(memo[id(group)])
    _copy_attributes(optimizer, made, memo)
    return made


def _copy_attributes(optimizer: Any, made: Any, memo: dict[int, Any]) -> None:
    """Copy an optimizer's attributes, without hooks and state.

    Args:
        optimizer: Optimizer to copy.
        made: Copy to which the attributes are added.
        memo: Copies that exist already, by the ID of the original, as for `copy.deepcopy`.
    """
    attributes = vars(made)
    for name, value in vars(optimizer).items():
        if name in _torch.EXCLUDED or name in _torch.EXCLUDED_LOADS:
            attributes[name] = OrderedDict()
        elif name == "state":
            attributes[name] = copy.copy(value)
            attributes[name].clear()
        elif isinstance(value, torch.optim.Optimizer):
            inner = memo.get(id(value)) or object.__new__(type(value))
            if id(value) not in memo:
                memo[id(value)] = inner
                _copy_attributes(value, inner, memo)
            attributes[name] = inner
        elif name != "step":  # a scheduler's wrapper around the original optimizer's step
            attributes[name] = copy.deepcopy(value, memo)


def _step_together(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _step_apart(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's step once for each parameter, as if each parameter were updated on another rank."""
    counters = CallCounters(optimizer)
    every = [list(group["params"]) for group in optimizer.param_groups]
    for number, own in enumerate(every):
        for parameter in own:
            counters.rewind()
            chosen = [[parameter] if at == number else [] for at in range(len(every))]
            with replace_groups(optimizer, chosen):
                optimizer.step()
