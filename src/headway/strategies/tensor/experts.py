"""Expert parallelism: the experts of a mixture are distributed over the ranks of one axis, and each token travels to its experts.

Experts are found by their shape, which is that of transformers 5: a module with `num_experts`, whose own parameters are stacked,
(experts, rows, columns), and whose forward is given (hidden_states, top_k_index, top_k_weights). Ranks along the axis read data of
their own. Before the module's own forward each (token, expert) pair is sent to the expert's rank; its result comes back and is
weighted at home. The router, and all other parameters, stay as they are. Beside tensor parallelism each expert is cut as its plan
says: ranks of one group of it send the same tokens, compute terms, and sum what comes back.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from headway.common.optional import Later
from headway.common.text import listed
from headway.errors import PrepareError
from headway.runtime.collective_log import CollectiveLedger
from headway.strategies.fully_sharded.dtensors import placed
from headway.strategies.fully_sharded.fsdp_state import named
from headway.strategies.parts import holders_of
from headway.strategies.tensor.calls import LocalParameters
from headway.strategies.tensor.crossings import SplitAxis, cut, exchange, exchange_counts
from headway.strategies.tensor.tensor_parallel import place_parameter

tensor = Later("torch.distributed.tensor")


def distribute_experts(model: torch.nn.Module, mesh: Any, ledger: CollectiveLedger) -> list[torch.nn.Module]:
    """Leave each rank its part of the experts, as DTensors cut along their first dimension.

    Args:
        model: it must hold the same values on all ranks.
        mesh: the layout's DeviceMesh: the ranks along "ep", and those along "tp" that have cut matrices.
        ledger: takes the exchanges, by the names of modules.

    Returns:
        The modules that hold experts; each has become an exchange of all ranks of the axis.

    Raises:
        PrepareError: there are no experts of this kind, or they cannot be divided among so many ranks.
    """
    axis = SplitAxis.of(mesh["ep"])
    both = mesh["ep", "tp"] if "tp" in mesh.mesh_dim_names else None
    found = {name: module for name, module in model.named_modules() if _holds_experts(module)}
    _check(model, found, axis.size)
    for name, module in found.items():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = _place(parameter, axis, both)
        module.num_experts = int(module.num_experts) // axis.size
        local, call = LocalParameters([module], axis), ExpertCall(axis, ledger, named("all-to-all", name))
        module.register_forward_pre_hook(local.before, with_kwargs=True)
        module.register_forward_pre_hook(call.before, with_kwargs=True)
        module.register_forward_hook(call.after, prepend=True)  # terms of matrices that are cut are summed behind it
        module.register_forward_hook(local.after, always_call=True)
    return list(found.values())


def _place(parameter: torch.nn.Parameter, axis: SplitAxis, both: Any) -> torch.nn.Parameter:
    """This rank's experts; of each, what tensor parallelism has left here."""
    if both is None:
        return place_parameter(parameter, (0, 1), axis)
    whole: Any = parameter.detach()
    part = cut(whole.to_local(), axis, 0).clone(memory_format=torch.contiguous_format)
    found = placed(part, both, [tensor.Shard(0), *whole.placements], whole.shape)
    return torch.nn.Parameter(found, requires_grad=parameter.requires_grad)


def _holds_experts(module: torch.nn.Module) -> bool:
    number, held = getattr(module, "num_experts", None), list(module.parameters())
    is_stacked = any(p.dim() == 3 for p in held) and all(p.dim() > 1 and p.shape[0] == number for p in held)
    return is_stacked and len(inspect.signature(module.forward).parameters) == 3


def _check(model: torch.nn.Module, found: dict[str, torch.nn.Module], size: int) -> None:
    kind = type(model).__name__
    if not found:
        raise PrepareError(
            f"{kind} has no experts that ep={size} could distribute: no module has stacked parameters (experts, rows, columns), the "
            "attribute num_experts and forward(hidden_states, top_k_index, top_k_weights), as transformers' models have since "
            "version 5. Leave ep out (strategy='fsdp'), or stack the experts so; a ModuleList of experts is not supported"
        )
    uneven = {name: module.num_experts for name, module in found.items() if int(module.num_experts) % size}  # type: ignore[arg-type]
    if uneven:
        name, number = next(iter(uneven.items()))
        raise PrepareError(
            f"{name!r} of {kind} has {number} experts, which cannot be divided among {size} ranks; give ep a divisor of {number}"
        )
    shared = [name for parameter, holders in holders_of(model).values() if len(holders) > 1 for name, *_ in holders]
    if tied := [name for name in found if name in shared]:
        raise PrepareError(f"experts of {kind} share parameters with other modules ({listed(tied)}); leave ep out")


class ExpertCall:
    """The exchanges around a call of one module of experts.

    Args:
        axis: the ranks.
        ledger: takes them.
        operation: what it calls them.
    """

    def __init__(self, axis: SplitAxis, ledger: CollectiveLedger, operation: str) -> None:
        self._axis, self._ledger, self._operation = axis, ledger, operation
        self._held: tuple[Any, ...] = ()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        entry = self._ledger.record(self._operation)
        yield
        self._ledger.leave(entry)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Each (token, expert) pair to the expert's rank: rows of one expert each, in place of this rank's tokens."""
        hidden, index, weights = inspect.signature(module.forward).bind(*args, **kwargs).args
        shapes = [tuple(each.shape) for each in (hidden, index, weights)]
        if index.is_floating_point() or hidden.dim() != 2 or index.dim() != 2 or shapes[1] != shapes[2]:
            raise PrepareError(
                f"{type(module).__name__} was called with tensors of the shapes {shapes}; expert parallelism needs hidden states "
                "(tokens, width), numbers of experts (tokens, k) and their weights (tokens, k), in this order. Leave ep out"
            )
        axis, num_local = self._axis, int(module.num_experts)  # type: ignore[arg-type]
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)
        owners, sent, received = self._count(chosen, num_local)
        # All ranks' losses are summed, and FSDP divides experts by the ranks that share them alone: the rest is divided here.
        rows = hidden.index_select(0, order // index.shape[-1])
        rows = exchange(rows, axis, sent, received, axis.size, self._noted)
        is_idle = not rows.shape[0]
        if is_idle:  # a row of zeros, so that its forward and backward are as long as those of the other ranks
            rows, owners = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), owners.new_zeros(1)
        self._held = hidden.dtype, weights, order, sent, received, is_idle
        return (rows, owners.unsqueeze(1), weights.new_ones(rows.shape[0], 1)), {}

    def _count(self, chosen: torch.Tensor, num_local: int) -> tuple[torch.Tensor, list[int], list[int]]:
        """The local expert of each row that comes, and how many rows go to and come from each rank."""
        size, num_pairs = self._axis.size, chosen.numel()
        if is_fake(chosen):  # in a plan tokens spread evenly
            even = [num_pairs // size + (place < num_pairs % size) for place in range(size)]
            return torch.zeros_like(chosen), even, even
        counts = torch.bincount(chosen, minlength=size * num_local)
        with self._noted():
            coming = exchange_counts(counts, self._axis).view(size, num_local)
        sent, received = torch.stack([counts.view(size, num_local).sum(1), coming.sum(1)]).tolist()
        local = torch.arange(num_local, device=chosen.device).repeat(size)
        return local.repeat_interleave(coming.flatten()), sent, received

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Results back to their tokens, weighted and summed."""
        (dtype, weights, order, sent, received, is_idle), self._held = self._held, ()
        output = output[:0] if is_idle else output
        rows = exchange(output, self._axis, received, sent, 1 / self._axis.size, self._noted)
        home = rows.index_select(0, order.argsort()).view(*weights.shape, -1)
        total: torch.Tensor = (home * weights.unsqueeze(-1)).sum(1)
        return total.to(dtype)
