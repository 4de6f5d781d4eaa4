"""Checks of sharded parameters: hooks, writes, optimizers, second-order gradients, and unused parameters.

`prepare()` replaces parameters with DTensors, and FSDP shows gathered copies of them during and after a forward.
Hooks on a tensor that is not the real parameter, and writes to it, would be lost silently. The checks raise an error
that names the parameters.

Most optimizers work element by element and can step on shards. An optimizer is rejected if it computes means over rows
and columns of a full matrix. It is also rejected if DTensor does not support its state, or the operation of its step.
torch's own errors in the first step do not explain this. `tests/distributed/test_sharded_optimizers.py` runs the
optimizers that work.

`SecondOrder` detects a backward that is followed by another one through the same forward, as for a gradient penalty.
The first backward, `torch.autograd.grad(..., create_graph=True)`, runs FSDP's hooks, which free gathered parameters.
In the second backward, some nodes of the graph read unsharded parameters but have no hooks that gather them. Other
nodes have hooks that free a unit and reduce its gradients. On an accelerator, where autograd uses a separate thread,
these hooks run before the unit's last gradient is computed. Before the second backward, all units are therefore
gathered, and gradients are reduced only after it.

`ParameterUsage` finds the sharded parameters that took part in an update's losses on any rank. FSDP reduces zeros for a
parameter that one rank did not use, so that all ranks send messages of the same size. A parameter that no rank used
must have no gradient, as on one process. Otherwise weight decay and momentum would change it. So at the first update,
ranks exchange which parameters they used. They repeat this at each update if some rank did not use a parameter in the
first one, or if the options require it.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from headway.common.text import join_names
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies._torch import tree_leaves
from headway.core.strategies.fully_sharded import dtensors, fsdp_state
from headway.core.weights.pieces import is_dtensor
from headway.errors import PrepareError, StateError, UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)

_HOOK_ADVICE = (
    "parameter.register_post_accumulate_grad_hook(fn) after prepare(), which finds this rank's part of the reduced gradient in "
    "parameter.grad"
)

Named = tuple[str, torch.Tensor]
"""Pair of a name and a parameter, as yielded by `named_parameters()`."""


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

    def __init__(self, model: torch.nn.Module, replaced: Sequence[Named], name: str) -> None:
        self._model = model
        self._name = name
        self._replaced = [_ReplacedParameter(name, weakref.ref(p), _get_write_state(p)) for name, p in replaced]
        self._shards = [
            _Shard(name, p, _get_storage_id(p), id(dtensors.get_local_shard(p)))
            for name, p in model.named_parameters()
            if is_dtensor(p)
        ]
        # PEFT adapts stacked experts by torch's parametrizations, which count as a write of the frozen parameter.
        wrappers: list[Any] = [module for module in model.modules() if hasattr(module, "parameter_name")]
        self._parametrized = {id(wrapper.get_param()) for wrapper in wrappers if hasattr(wrapper, "get_param")}

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
            if was_written and id(record.sharded_param) not in self._parametrized:
                written.append(record)
        self._raise_if_any(
            [names.get(id(record.sharded_param), "?") for record in written],
            "were changed in place while they were gathered (in a forward, or after one under torch.no_grad()), which changes "
            "only the gathered copies. Change them after a backward or before the first forward",
        )
        changed = []
        for name, reference, write_state in self._replaced:
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


_ELEMENTWISE = "use torch.optim.AdamW(fused=True) or another optimizer that works element by element"
_NEEDS_FULL_MATRICES = f"it needs whole matrices for means over rows and columns; {_ELEMENTWISE}"
_UNSHARDED_STATE = (
    "it steps on plain tensors only, and gets DTensors under pp and with ShardingOptions(whole_updates=False). Leave out this "
    f"option, use torchao's AdamW8bit, or {_ELEMENTWISE}"
)
_ONE_PROCESS = "it is for one process; use ShardingOptions(cpu_offload=True) with torch's AdamW"
_UNSUPPORTED_OPTIMIZERS = {
    ("torch", "Adafactor"): _NEEDS_FULL_MATRICES,
    ("transformers", "Adafactor"): _NEEDS_FULL_MATRICES,
    ("torch", "Rprop"): f"it changes elements of gradients by a mask, which shards do not support; {_ELEMENTWISE}",
    ("torch", "SparseAdam"): f"it needs sparse gradients, and shards have none; {_ELEMENTWISE}",
    **dict.fromkeys((("torchao", name) for name in ("AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8")), _UNSHARDED_STATE),
    ("torchao", "CPUOffloadOptimizer"): _ONE_PROCESS,
}
_WITHOUT_FUSED_DTENSOR = ("SGD", "Adagrad")
"""Class names of optimizers whose fused step supports unsharded tensors only. Fused Adam and AdamW support DTensors."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if an optimizer cannot step on shards. Base classes of the optimizer are checked, too.

    Raises:
        UnsupportedError: If the optimizer needs full matrices, sparse gradients or plain tensors, works on one process
            only, or is set to a fused step that does not support DTensor.
    """
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    for base_class in type(optimizer).__mro__:
        package, name = base_class.__module__.partition(".")[0], base_class.__name__
        reason = _UNSUPPORTED_OPTIMIZERS.get((package, name))
        if package == "bitsandbytes":
            reason = _UNSHARDED_STATE
        elif package == "torch" and name in _WITHOUT_FUSED_DTENSOR and is_fused:
            reason = f"torch's fused step of {name} does not support DTensor; use {name}(foreach=True)"
        if reason is not None:
            raise UnsupportedError(f"{type(optimizer).__name__} cannot train a sharded model: {reason}")


def warn_of_own_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Warn if an optimizer's state dict has a custom form, in which checkpoints cannot save sharded state."""
    saved = optimizer.state_dict()
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        log.warning(
            "%s.state_dict() returns no 'state' and 'param_groups' as torch's optimizers do: it trains, but a checkpoint cannot "
            "contain its sharded tensors. Return these two from state_dict(), or train without sharding",
            type(optimizer).__name__,
        )


def check_sizes(optimizer: torch.optim.Optimizer, find_current: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise an error if LBFGS or Muon cannot step on the shards, because shards differ in size or a rank has none.

    LBFGS flattens all parameters into one vector, which DTensor supports only if all ranks have shards of equal size.
    Muon multiplies matrices and needs a row on each rank. torch's errors in the first step do not name the parameter.

    Args:
        optimizer: Optimizer of a sharded model.
        find_current: Function that returns the shard that has replaced a parameter.

    Raises:
        UnsupportedError: If the shards of a parameter differ in size (LBFGS), or a rank has none (Muon).
    """
    is_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
    if not is_lbfgs and not isinstance(optimizer, torch.optim.Muon):
        return
    requirement = "be divisible by this number" if is_lbfgs else "be at least that large"
    for shard in (find_current(p) for group in optimizer.param_groups for p in group["params"]):
        for dimension, num_ranks in dtensors.count_shards(shard).items():
            size = shard.shape[dimension]
            fits = size % num_ranks == 0 if is_lbfgs else size >= num_ranks
            if not fits:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} cannot train this sharded model: dimension {dimension} of a parameter of shape "
                    f"{tuple(shard.shape)} is shared by {num_ranks} ranks; it must {requirement}. Choose such a size, "
                    "strategy='ddp', or another optimizer for this parameter"
                )


class SecondOrder:
    """Detector of a backward with `create_graph=True` through a sharded model, such as a gradient penalty needs.

    Args:
        model: Sharded model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._has_graph = False
        self._hook = model.register_forward_hook(self._watch_outputs)

    def _watch_outputs(self, module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for each in tree_leaves(output):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(self._record_graph)  # type: ignore[no-untyped-call]

    def _record_graph(self, grad: torch.Tensor) -> None:
        """Record whether the current backward through the model creates a graph."""
        self._has_graph |= torch.is_grad_enabled()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return the context of the training loop's backward.

        If an earlier backward created a graph, all FSDP units are gathered when the context begins.
        """
        if not self._has_graph:
            yield
            return
        log.info_once(
            "a backward has gone through %s before its loss's: all of it is gathered", type(self._model).__name__
        )
        try:
            with fsdp_state.keep_gathered(self._model):
                yield
        finally:
            self._has_graph = False

    def release(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()


_NUM_NAMES = 3
"""Number of unused parameters that an error names for each rank."""


class ParameterUsage:
    """Record of which parameters of a sharded model took part in the losses on this rank since the last update.

    Args:
        model: Sharded model.
        everyone: Collectives over all ranks.
        can_change: Whether the set of used parameters can change between updates, as `find_unused_parameters` declares.
    """

    def __init__(self, model: torch.nn.Module, everyone: Collectives, can_change: bool) -> None:
        self._records = list(fsdp_state.iterate_records(model))
        self._frozen: list[Any] | None = None
        self._groups = fsdp_state.list_groups(model)
        self._everyone = everyone
        self._exchanges_usage = can_change  # whether ranks exchange which parameters they used at each update
        self._has_agreed = False
        self._is_complete = True  # whether the next backward starts a new record
        self._hooks: dict[int, Any] = {}
        self._used: set[int] = set()  # IDs of FSDP's records of the used parameters
        self._was_any_used: list[int] = []  # not empty if a parameter got a gradient; a list, because hooks change it

    def watch_backward(self) -> None:
        """Before a backward, start to record which gathered parameters get a gradient in it."""
        self._frozen = fsdp_state.set_missing_gradient_dtypes(self._groups if self._frozen is None else self._frozen)
        if self._is_complete:
            # Gradients left by earlier backwards of this update show that these parameters were used.
            self._used.clear()
            self._used.update(id(r) for r in self._records if r.sharded_param.grad is not None)
            self._was_any_used.clear()
            self._is_complete = False
        if len(self._hooks) < len(self._records):
            for record in self._records:
                gathered = fsdp_state.get_gathered_parameter(record)
                if id(record) not in self._hooks and gathered is not None and gathered.requires_grad:
                    hook = partial(_record_use, self._used, self._was_any_used, id(record))
                    handle = gathered.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._hooks[id(record)] = handle

    def expect_backward(self) -> None:
        """Prepare for a further backward of the accumulation window.

        The parameters that this backward uses are added to the record.
        """
        self._is_complete = False

    def discard_window(self) -> None:
        """Discard the record of an accumulation window that failed."""
        self._is_complete = True

    def snapshot(self) -> Any:
        """Return a copy of the record, which `restore` needs to undo a batch."""
        return self._is_complete, self._exchanges_usage, self._has_agreed, set(self._used), list(self._was_any_used)

    def restore(self, snapshot: Any) -> None:
        """Restore the record of used parameters from a snapshot, which can be restored several times."""
        self._is_complete, self._exchanges_usage, self._has_agreed, used, was_any_used = snapshot
        self._used.clear()
        self._used.update(used)
        self._was_any_used[:] = was_any_used

    def remove_unused_gradients(self) -> None:
        """Remove the gradients of parameters that no rank used, after the last backward of an accumulation window.

        If every rank used every parameter at the first update, later updates must do so, too. Otherwise, or with
        `find_unused_parameters`, ranks exchange which parameters they used at each update. Do nothing if no parameter
        got a gradient on this rank.

        Raises:
            StateError: On all ranks, if a rank did not use a parameter, although every rank used every parameter at the
                first update. Never with `find_unused_parameters`.
        """
        if self._is_complete or not self._was_any_used:
            return
        self._is_complete = True
        trainable = [record for record in self._records if record.sharded_param.requires_grad]
        if self._exchanges_usage or not self._has_agreed:
            self._agree_on_usage(trainable)
            return
        unused = [record for record in trainable if id(record) not in self._used]
        # All ranks raise, because the others would wait for a failed rank in the next collective.
        counts = [int(row[0]) for row in self._everyone.gather_numbers([float(len(unused))])]
        if not any(counts):
            return
        names_by_rank = self._everyone.gather_objects([str(record._param_fqn) for record in unused[:_NUM_NAMES]])
        descriptions = "; ".join(
            f"{count} on rank {rank} ({', '.join(names)}{', ...' if count > len(names) else ''})"
            for rank, (count, names) in enumerate(zip(counts, names_by_rank))
            if count
        )
        raise StateError(
            f"parameters that took part in the first update's losses took no part in this one's: {descriptions}. "
            "If the parameters in use change, pass kwargs_handlers=[ShardingOptions(find_unused_parameters=True)]"
        )

    def _agree_on_usage(self, trainable: list[Any]) -> None:
        """Exchange which parameters each rank used, and remove the gradients of those that no rank used.

        Args:
            trainable: FSDP's records of the trainable parameters.
        """
        flags = torch.tensor([float(id(record) in self._used) for record in trainable])
        self._everyone.sum_in_place([flags])
        counts = flags.tolist()
        for record, count in zip(trainable, counts):
            if not count:
                record.sharded_param.grad = None
        # If every rank used every parameter, assume that this does not change.
        self._exchanges_usage = self._exchanges_usage or any(count < self._everyone.world_size for count in counts)
        self._has_agreed = True

    def release(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks.values():
            hook.remove()


def _record_use(used: set[int], was_any_used: list[int], key: int, parameter: torch.Tensor) -> None:
    """Record that a parameter got a gradient, which shows that the loss used it. A hook on the parameter calls this.

    It is a plain function, because hooks live as long as parameters and must not keep other objects alive.
    """
    used.add(key)
    if not was_any_used:
        was_any_used.append(key)
