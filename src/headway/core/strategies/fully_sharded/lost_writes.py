"""Detection of gradient hooks and writes that would have no effect, because their target is no real parameter.

`prepare()` replaces parameters with DTensors, and FSDP shows gathered copies of them during and after a forward. Hooks on
a tensor that is not the real parameter, and writes to it, would be lost silently. The checks raise an error that names
the parameters. `shard_writes.py` observes the opposite case: writes that do change shards, but not on all ranks.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from headway.common.text import join_names
from headway.core.strategies.fully_sharded import dtensors, fsdp_state
from headway.core.weights.pieces import is_dtensor
from headway.errors import PrepareError, StateError

_HOOK_ADVICE = (
    "parameter.register_post_accumulate_grad_hook(fn) after prepare(), which finds this rank's part of the reduced gradient in "
    "parameter.grad"
)


def check_hooks(model: torch.nn.Module) -> None:
    """Raise an error if a parameter has a gradient hook.

    Sharding would replace the parameter and lose the hook.

    Raises:
        PrepareError: If a parameter has a gradient hook.
    """
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise PrepareError(
            f"{_count_names(hooked)} of {type(model).__name__} have hooks on their gradients, made before prepare(). Sharding "
            f"replaces these parameters, and the hooks would never run. Use {_HOOK_ADVICE}"
        )


class _Shard(NamedTuple):
    """Sharded parameter, with IDs that show whether values were assigned to its `data`.

    Attributes:
        name: Name of the parameter.
        parameter: The DTensor.
        storage_id: ID of its storage at the start.
        local_shard_id: ID of its local tensor at the start.
    """

    name: str
    parameter: torch.Tensor
    storage_id: int
    local_shard_id: int


class _ReplacedParameter(NamedTuple):
    """Parameter that sharding has replaced.

    Attributes:
        name: Name of the parameter.
        reference: Weak reference to the parameter.
        write_state: Values that change when the script uses or changes the parameter (`_get_write_state`).
    """

    name: str
    reference: "weakref.ref[torch.Tensor]"
    write_state: tuple[int, int, bool]


class LostWrites:
    """Detector of hooks and writes that scripts apply to tensors other than the real parameters of a sharded model.

    Such hooks and writes would be lost without an error.

    Args:
        model: Sharded model, whose parameters are not gathered at the moment.
        replaced: Parameters that sharding has replaced, as pairs of (name, parameter).
        name: Name of the model in messages.
    """

    def __init__(self, model: torch.nn.Module, replaced: Sequence[tuple[str, torch.Tensor]], name: str) -> None:
        self._model = model
        self._name = name
        self._replaced_parameters = [
            _ReplacedParameter(name, weakref.ref(p), _get_write_state(p)) for name, p in replaced
        ]
        self._shards = [
            _Shard(name, p, _get_storage_id(p), id(dtensors.get_local_shard(p)))
            for name, p in model.named_parameters()
            if is_dtensor(p)
        ]
        # PEFT adapts stacked experts by torch's parametrizations, which count as a write of the frozen parameter.
        wrappers: list[Any] = [module for module in model.modules() if hasattr(module, "parameter_name")]
        self._parametrized_ids = {id(wrapper.get_param()) for wrapper in wrappers if hasattr(wrapper, "get_param")}

    def check(self) -> None:
        """Raise an error if the script registered a hook or wrote values that have no effect on the sharded parameters.

        Called before optimizer steps.

        Raises:
            StateError: If a sharded parameter has a hook from `Tensor.register_hook`, was changed in place while it was
                gathered, or was given other values by `parameter.data = tensor`. Also if the script used or changed a
                parameter that `prepare()` has replaced.
        """
        self.check_assigned()
        records = list(fsdp_state.iterate_records(self._model))
        names = {id(shard.parameter): shard.name for shard in self._shards}
        hooked = [record for record in records if record.sharded_param._backward_hooks]
        self._raise_if_any(
            [names.get(id(record.sharded_param), "?") for record in hooked],
            "have hooks made by Tensor.register_hook, which never run, because autograd uses gathered copies of the parameters. "
            f"Use {_HOOK_ADVICE}",
        )
        written = []
        for record in records:
            # FSDP's all-gather does not increase the version counter of a gathered parameter.
            was_written = getattr(fsdp_state.get_gathered_parameter(record), "_version", 0) > 0
            if was_written and id(record.sharded_param) not in self._parametrized_ids:
                written.append(record)
        self._raise_if_any(
            [names.get(id(record.sharded_param), "?") for record in written],
            "were changed in place while they were gathered (in a forward, or after one under torch.no_grad()), which changes "
            "only the gathered copies. Change them after a backward or before the first forward",
        )
        changed = []
        for name, reference, write_state in self._replaced_parameters:
            parameter = reference()
            if parameter is not None and _get_write_state(parameter) != write_state:
                changed.append(name)
        self._raise_if_any(
            changed,
            "were used or changed through tensors from before prepare(), which prepare() has replaced. Take the parameters from "
            "the prepared model: model.parameters(), model.layer.weight",
        )

    def check_assigned(self) -> None:
        """Raise an error if the script assigned values to `parameter.data`, which does not change a sharded parameter.

        Raises:
            StateError: If values were assigned.
        """
        assigned = [
            shard.name
            for shard in self._shards
            # Code that replaces the local tensor, too, has changed the sharded parameter itself.
            if _get_storage_id(shard.parameter) != shard.storage_id
            and id(dtensors.get_local_shard(shard.parameter)) == shard.local_shard_id
        ]
        self._raise_if_any(
            assigned,
            "were given other values by `parameter.data = tensor` after prepare(), which changes nothing in a sharded "
            "parameter. Change them in place (parameter.data.copy_(tensor), torch.nn.init ...), or assign before prepare()",
        )

    def _raise_if_any(self, names: list[str], problem: str) -> None:
        """Raise `StateError` if there are parameters with a problem.

        Args:
            names: Names of these parameters.
            problem: Description of the problem, as the end of a sentence.
        """
        if names:
            raise StateError(f"{_count_names(names)} of {self._name}, which is sharded, {problem}")


def _get_storage_id(tensor: torch.Tensor) -> int:
    """Return an identifier of the tensor's storage, which changes when `.data` is assigned.

    Supports DTensors and fake tensors.
    """
    found: int = tensor.untyped_storage()._cdata
    return found


def _get_write_state(tensor: torch.Tensor) -> tuple[int, int, bool]:
    """Return values that change when the tensor is written to, or when it gets a gradient because a loss used it."""
    return _get_storage_id(tensor), tensor._version, tensor.grad is None


def _count_names(names: list[str]) -> str:
    count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    return f"{count} ({join_names(names)})"
