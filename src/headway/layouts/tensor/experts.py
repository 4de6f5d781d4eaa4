"""Expert parallelism: distribute the experts of mixture-of-experts layers over ranks, and send tokens to them.

Experts are recognized by the structure they have in transformers 5: a module with `num_experts` and stacked
parameters of shape (experts, rows, columns), whose forward takes (hidden_states, top_k_index, top_k_weights). Ranks
along the axis `ep` read different data. Before the module's own forward, each (token, expert) pair is sent to the
expert's rank. The result is sent back, and the rank that receives it multiplies it by the routing weight. The router
and all other parameters are replicated.

In combination with tensor parallelism, each expert is also split according to the tensor-parallel plan. All ranks of
one tensor-parallel group then send identical tokens. Each rank computes one term of the result, and the terms are
summed after they have been sent back.
"""

import inspect
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headway.common.optional import LazyModule
from headway.common.text import join_names
from headway.core.runtime.collective_ledger import CollectiveLedger
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.blocks import find_parameter_owners
from headway.core.strategies.fully_sharded.axes import ModelAxis, SplitModel
from headway.core.strategies.fully_sharded.dtensors import wrap_shard
from headway.core.strategies.fully_sharded.fsdp_collectives import name_operation
from headway.errors import PrepareError
from headway.layouts.tensor._torch import is_fake
from headway.layouts.tensor.calls import LocalParameters
from headway.layouts.tensor.crossings import SplitAxis, exchange_counts, exchange_rows, take_chunk
from headway.layouts.tensor.plans import is_adapted
from headway.layouts.tensor.tensor_parallel import place_parameter

tensor = LazyModule("torch.distributed.tensor")


class ExpertAxis(ModelAxis):
    """Mesh axis "ep" for expert parallelism.

    Each rank holds some experts of every mixture-of-experts layer.
    """

    def split_model(
        self, model: torch.nn.Module, mesh: Any, ranks: Collectives, other_stage_ids: Container[int] = ()
    ) -> "SplitExperts":
        """Keep only this rank's experts of each mixture-of-experts layer, in place.

        Return a handle of the changed modules.

        Args:
            model: Model with mixture-of-experts layers.
            mesh: DeviceMesh of the run, with an axis "ep".
            ranks: Collectives over all ranks of the run.
            other_stage_ids: IDs of parameters and buffers that only other pipeline stages hold. They are not split.

        Raises:
            PrepareError: If the model has no experts that can be distributed, or if they cannot be divided evenly among
                the ranks.
        """
        return distribute_experts(model, mesh, ranks.ledger, other_stage_ids)


class SplitExperts(SplitModel):
    """Handle to a model whose experts are distributed over ranks.

    Args:
        distributed: Modules that hold experts.
        calls: Hooks on these modules. The hooks exchange tokens between ranks.
    """

    def __init__(self, distributed: Sequence[torch.nn.Module], calls: "Sequence[ExpertCall]") -> None:
        self.distributed = distributed
        self._calls = calls

    @contextmanager
    def silence_gradients(self) -> Iterator[None]:
        """Return a context in which backward sends only zero gradients to the experts that processed this rank's tokens.

        If no item of a batch counts in the loss (such as when all labels are ignored), the loss is 0/0. Its NaN gradients
        would otherwise reach the experts on all ranks.
        """
        for call in self._calls:
            call.is_silent = True
        try:
            yield
        finally:
            for call in self._calls:
                call.is_silent = False


def distribute_experts(
    model: torch.nn.Module, mesh: Any, ledger: CollectiveLedger, other_stage_ids: Container[int] = ()
) -> SplitExperts:
    """Keep only this rank's experts in each mixture-of-experts layer, as DTensors sharded along the first dimension.

    Args:
        model: Model with equal values on all ranks.
        mesh: DeviceMesh of the run, with the axis "ep" and, under tensor parallelism, the axis "tp".
        ledger: Ledger of collectives, in which the all-to-alls of tokens are recorded with module names.
        other_stage_ids: IDs of parameters that only other pipeline stages hold. Experts with such parameters do not change.

    Returns:
        Handle to the modules that hold this rank's experts. Calling such a module is now a collective along the "ep" axis.

    Raises:
        PrepareError: If the model has no experts with stacked parameters, or if their number cannot be divided evenly. Also
            if experts share parameters with other modules, or if their adapters cannot be distributed.
    """
    axis = SplitAxis.from_mesh(mesh["ep"])
    both = mesh["ep", "tp"] if "tp" in mesh.mesh_dim_names else None
    found = {name: module for name, module in model.named_modules() if _holds_experts(module)}
    _check_experts(model, found, axis.size)
    distributed, calls = [], []
    for name, module in found.items():
        if any(id(parameter) in other_stage_ids for parameter in module.parameters()):
            continue
        adapters = _list_adapters(model, name)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = _shard_experts(parameter, axis, both)
        module.num_experts = int(module.num_experts) // axis.size
        for adapter in adapters:
            _distribute_adapter(adapter, axis)
        outer = adapters[0] if adapters else module
        local = LocalParameters([*outer.modules()], axis, keeps_parameters=bool(adapters))
        call = ExpertCall(axis, ledger, name_operation("all-to-all", name))
        outer.register_forward_pre_hook(local.before_forward, with_kwargs=True)
        module.register_forward_pre_hook(call.before_forward, with_kwargs=True)
        module.register_forward_hook(call.after_forward, prepend=True)  # before tensor parallelism sums its terms
        outer.register_forward_hook(local.after_forward, always_call=True)
        distributed.append(outer)
        calls.append(call)
    return SplitExperts(distributed, calls)


def _list_adapters(model: torch.nn.Module, name: str) -> list[Any]:
    """Return PEFT's adapters around a module of experts, outermost first.

    For each adapted parameter of a module, PEFT adds a wrapper (`ParamWrapper`). The wrappers are nested. During a
    forward, each of them adds the product of its two matrices to its parameter.

    Args:
        model: Model that contains the module.
        name: Name of the module of experts.
    """
    found: list[Any] = []
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
        found.insert(0, model.get_submodule(name))
    return found


def _distribute_adapter(adapter: Any, axis: SplitAxis) -> None:
    """Keep only this rank's experts in a LoRA adapter of stacked parameters.

    Both matrices have `r` rows or columns per expert, where `r` is the LoRA rank. In `lora_A` the rows of one expert
    are adjacent. In `lora_B` the first columns of all experts come first, then their second columns, and so on.

    Args:
        adapter: PEFT's wrapper of one parameter.
        axis: Mesh axis of expert parallelism.
    """
    for key, rank in adapter.r.items():
        rows, columns = adapter.lora_A[key], adapter.lora_B[key]
        rows._parameters["weight"] = place_parameter(rows.weight, (0, 1), axis)
        columns._parameters["weight"] = place_parameter(columns.weight, (1, rank), axis)
    adapter.num_experts = adapter.num_experts // axis.size


def _shard_experts(parameter: torch.nn.Parameter, axis: SplitAxis, both: Any) -> torch.nn.Parameter:
    """Return a DTensor parameter that holds only this rank's experts.

    Under tensor parallelism, it holds only this rank's shard of each of these experts.

    Args:
        parameter: Parameter of shape (experts, rows, columns).
        axis: Mesh axis of expert parallelism.
        both: DeviceMesh of the axes (ep, tp); None without tensor parallelism.
    """
    if both is None:
        return place_parameter(parameter, (0, 1), axis)
    whole: Any = parameter.detach()
    part = take_chunk(whole.to_local(), axis, 0).clone(memory_format=torch.contiguous_format)
    found = wrap_shard(part, both, [tensor.Shard(0), *whole.placements], whole.shape)
    return torch.nn.Parameter(found, requires_grad=parameter.requires_grad)


def _holds_experts(module: torch.nn.Module) -> bool:
    if is_adapted(module):
        return False
    number, held = getattr(module, "num_experts", None), list(module.parameters())
    is_stacked = any(p.dim() == 3 for p in held) and all(p.dim() > 1 and p.shape[0] == number for p in held)
    return is_stacked and len(inspect.signature(module.forward).parameters) == 3


def _check_experts(model: torch.nn.Module, found: dict[str, torch.nn.Module], size: int) -> None:
    kind = type(model).__name__
    if not found:
        raise PrepareError(
            f"{kind} has no experts that ep={size} could distribute: no module has stacked parameters (experts, rows, columns), "
            "the attribute num_experts and forward(hidden_states, top_k_index, top_k_weights), as transformers' models have since "
            "version 5. Leave ep out (strategy='fsdp'), or stack the experts in this form. A ModuleList of experts is not "
            "supported"
        )
    uneven = {name: module.num_experts for name, module in found.items() if int(module.num_experts) % size}  # type: ignore[arg-type]
    if uneven:
        name, number = next(iter(uneven.items()))
        raise PrepareError(
            f"{name!r} of {kind} has {number} experts, which cannot be divided among {size} ranks; give ep a divisor of {number}"
        )
    for name, module in found.items():
        _check_adapters(kind, name, module, _list_adapters(model, name), size)
    shared = [
        name for parameter, holders in find_parameter_owners(model).values() if len(holders) > 1 for name, *_ in holders
    ]
    if tied := [name for name in found if name in shared]:
        raise PrepareError(f"experts of {kind} share parameters with other modules ({join_names(tied)}); leave ep out")


def _check_adapters(kind: str, name: str, module: Any, adapters: Sequence[Any], size: int) -> None:
    """Raise an error if the adapters around a module of experts cannot be distributed with the module.

    Args:
        kind: Class name of the model, for the error message.
        name: Name of the module of experts, for the error message.
        module: Module of experts.
        adapters: PEFT's adapters around the module.
        size: Number of ranks of expert parallelism.

    Raises:
        PrepareError: If an adapter is not LoRA, or if the experts are trained together with their adapters. Also if
            each rank would get a single expert and PEFT does not transpose the adapter's matrices.
    """
    reason = None
    if any(not hasattr(each, "parameter_name") for each in adapters):
        reason = "has adapters of another kind than LoRA (target_parameters)"
    elif adapters and any(parameter.requires_grad for parameter in module.parameters()):
        reason = "is trained together with its adapters; freeze it"
    elif any(each.num_experts == size and not each._did_swap_in_out_features for each in adapters):
        reason = "would have one expert on each rank, for which PEFT does not transpose its matrices"
    if reason is not None:
        raise PrepareError(f"{name!r} of {kind} {reason}. Leave ep out (strategy='fsdp'), or adapt other modules only")


@dataclass(frozen=True)
class SentTokens:
    """Record of the tokens that one call of an experts module has sent. It is used to send the results back.

    Attributes:
        dtype: Dtype of the hidden states.
        weights: Routing weight of each (token, expert) pair.
        order: Indices that sort the pairs by expert.
        sent: Number of rows sent to each rank.
        received: Number of rows received from each rank.
        is_idle: Whether no rows were received, so that the forward ran on a row of zeros.
    """

    dtype: torch.dtype
    weights: torch.Tensor
    order: torch.Tensor
    sent: list[int]
    received: list[int]
    is_idle: bool


class ExpertCall:
    """Forward hooks of an experts module: send tokens to the ranks of their experts, and send the results back.

    Args:
        axis: Mesh axis of expert parallelism.
        ledger: Ledger of collectives, in which the all-to-alls of tokens are recorded.
        operation: Name of these all-to-alls in the ledger.

    Attributes:
        is_silent: Whether backward replaces the gradients that this rank sends with zeros.
    """

    def __init__(self, axis: SplitAxis, ledger: CollectiveLedger, operation: str) -> None:
        self._axis = axis
        self._ledger = ledger
        self._operation = operation
        self._call: SentTokens | None = None
        self.is_silent = False

    @contextmanager
    def _record_exchange(self) -> Iterator[None]:
        entry = self._ledger.record_entry(self._operation)
        yield
        self._ledger.record_exit(entry)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send each (token, expert) pair to the expert's rank.

        Returns:
            Arguments for the module's forward: received rows in place of this rank's tokens, with one expert per row
                and weights of 1.

        Raises:
            PrepareError: If the module was not called with hidden states, expert indices and weights of matching
                shapes.
        """
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
        owners, sent, received = self._count_rows(chosen, num_local)
        # FSDP divides experts' gradients only by the number of ranks that share the experts. So `after_forward` divides
        # gradients by the size of "ep". Gradients of the tokens must not be divided, so this exchange multiplies them
        # by that size again.
        rows = hidden.index_select(0, order // index.shape[-1])
        rows = exchange_rows(rows, axis, sent, received, axis.size, self._record_exchange)
        is_idle = not rows.shape[0]
        if is_idle:  # a row of zeros, so that this rank runs the same forward and backward as the others
            rows, owners = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), owners.new_zeros(1)
        self._call = SentTokens(
            dtype=hidden.dtype, weights=weights, order=order, sent=sent, received=received, is_idle=is_idle
        )
        return (rows, owners.unsqueeze(1), weights.new_ones(rows.shape[0], 1)), {}

    def _count_rows(self, chosen: torch.Tensor, num_local: int) -> tuple[torch.Tensor, list[int], list[int]]:
        """Return how many rows this rank exchanges with each rank in one call, and the experts of the received rows.

        Args:
            chosen: Index of the expert of each (token, expert) pair on this rank, in any order.
            num_local: Number of experts on this rank.

        Returns:
            Tuple of (local expert index for each received row, number of rows sent to each rank, number of rows
            received from each rank).
        """
        size, num_pairs = self._axis.size, chosen.numel()
        if is_fake(chosen):  # a forecast on fake tensors assumes that tokens are spread evenly
            even = [num_pairs // size + (place < num_pairs % size) for place in range(size)]
            return torch.zeros_like(chosen), even, even
        counts = torch.bincount(chosen, minlength=size * num_local)
        with self._record_exchange():
            coming = exchange_counts(counts, self._axis).view(size, num_local)
        sent, received = torch.stack([counts.view(size, num_local).sum(1), coming.sum(1)]).tolist()
        local = torch.arange(num_local, device=chosen.device).repeat(size)
        return local.repeat_interleave(coming.flatten()), sent, received

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Send the experts' results back to the ranks that sent the tokens.

        Return the sum of the results for each of this rank's tokens, weighted by the routing weights.
        """
        call = self._call
        assert call is not None
        self._call = None  # it would keep the call's tensors alive
        output = output[:0] if call.is_idle else output
        rows = exchange_rows(output, self._axis, call.received, call.sent, 1 / self._axis.size, self._record_exchange)
        if rows.requires_grad:
            rows.register_hook(self._silence_gradient)  # type: ignore[no-untyped-call]
        home = rows.index_select(0, call.order.argsort()).view(*call.weights.shape, -1)
        total: torch.Tensor = (home * call.weights.unsqueeze(-1)).sum(1)
        return total.to(call.dtype)

    def _silence_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient) if self.is_silent else gradient
