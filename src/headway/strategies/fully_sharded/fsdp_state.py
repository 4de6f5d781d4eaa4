"""What torch's fully_shard keeps inside: the one file that reads its private state.

Between two backwards that do not reduce, a gradient lies whole in FSDP's own records, and `parameter.grad` is None. Autograd sees
the whole parameters, not those that the module tree shows at rest. Both are reached from here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway.common.optional import Later
from headway.errors import UnsupportedError

fsdp = Later("torch.distributed.fsdp")


def shards(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a model that are units, the model itself among them."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            yield module


def units(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """(module, its group of parameters that are gathered together), each group once."""
    seen: set[int] = set()
    for module in shards(model):
        for group in _groups_of(module):
            if id(group) not in seen:
                seen.add(id(group))
                yield module, group


def groups(model: torch.nn.Module) -> list[Any]:
    """FSDP's groups of parameters."""
    return [group for _, group in units(model)]


def _groups_of(module: torch.nn.Module) -> list[Any]:
    """The groups of one unit."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    # Older torch has one group a unit, or none.
    found = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return list(filter(None, found))


def prepare_to_gather(model: torch.nn.Module) -> None:
    """Let FSDP find its root and its streams, as the first forward does: what comes before it could gather nothing."""
    if isinstance(model, fsdp.FSDPModule):
        model._get_fsdp_state()._lazy_init()


def records(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP's record of each sharded parameter."""
    for group in groups(model):
        yield from group.fsdp_params


def whole_parameter(record: Any) -> torch.Tensor | None:
    """The parameter that autograd sees; None before it was gathered for the first time."""
    return getattr(record, "_unsharded_param", None)


def sum_unused_too(model: torch.nn.Module) -> None:
    """Whoever uses a parameter, and whoever does not: all ranks send the same. Older torch has no switch for it."""
    for module in shards(model):
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)  # type: ignore[operator]


def reshard(model: torch.nn.Module) -> None:
    """Let the module tree show shards again: nothing is gathered any more."""
    for module in shards(model):
        module.reshard()  # type: ignore[operator]


@contextmanager
def kept_whole(model: torch.nn.Module) -> Iterator[None]:
    """A backward for which all units are gathered beforehand, and whose gradients are reduced afterwards, if at all."""
    units: list[Any] = list(shards(model))
    reductions = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups(model)]
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_backward(False, recurse=False)
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
        for group, *before in reductions:
            group.reduce_grads, group.all_reduce_grads = before
            group.post_backward()
        for unit in units[:1]:  # of all units
            unit._get_fsdp_state()._root_post_backward_final_callback()
    finally:
        for group, *before in reductions:
            group.reduce_grads, group.all_reduce_grads = before
        for unit in units:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()


Waiting = tuple[Any, torch.Tensor | None, torch.Tensor | None]
"""A record, and the gradient that waits there to be reduced: in the number format of the reduction, or as autograd left it."""


def take_gradients(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> list[Waiting]:
    """Take out the gradients of these parts that have not been reduced, those of this model."""
    wanted, taken = set(map(id, parameters)), []
    for record in records(model):
        if id(record.sharded_param) in wanted:
            whole = whole_parameter(record)
            taken.append((record, record.unsharded_accumulated_grad, None if whole is None else whole.grad))
    give_gradients((record, None, None) for record, _, _ in taken)
    return taken


def give_gradients(taken: Iterable[Waiting]) -> None:
    """Put gradients that have not been reduced in the place of those that are there."""
    for record, accumulated, grad in taken:
        record.unsharded_accumulated_grad = accumulated
        whole = whole_parameter(record)
        if whole is not None:
            whole.grad = grad


def forget_gradients(model: torch.nn.Module) -> None:
    """Drop what an interrupted forward or backward has left, and gradients that have not been reduced.

    Raises:
        UnsupportedError: this torch cannot.
    """
    if isinstance(model, fsdp.FSDPModule):
        if not hasattr(model, "reset_iter_state"):
            raise UnsupportedError(
                f"continuing after a failed window with a sharded model needs torch 2.13, but this is torch {torch.__version__}: the "
                "parameters that the interrupted forward gathered cannot be freed; end the run, and resume from a checkpoint"
            )
        if model._get_fsdp_state()._is_root is not None:  # before its first forward, nothing is in flight
            model.reset_iter_state()
    for record in records(model):
        record.unsharded_accumulated_grad = None
        whole = whole_parameter(record)
        if whole is not None:
            whole.grad = None
