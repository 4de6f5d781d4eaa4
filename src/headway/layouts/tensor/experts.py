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
from headway.layouts.tensor.parameter_splits import ParameterSplit, place_parameter
from headway.layouts.tensor.plans import is_adapted

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
    mesh_with_tp = mesh["ep", "tp"] if "tp" in mesh.mesh_dim_names else None
    expert_modules = {name: module for name, module in model.named_modules() if _holds_experts(module)}
    _check_experts(model, expert_modules, axis.size)
    distributed, calls = [], []
    for name, module in expert_modules.items():
        if any(id(parameter) in other_stage_ids for parameter in module.parameters()):
            continue
        adapters = _list_adapters(model, name)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = _shard_experts(parameter, axis, mesh_with_tp)
        module.num_experts = int(module.num_experts) // axis.size
        for adapter in adapters:
            _distribute_adapter(adapter, axis)
        outermost = adapters[0] if adapters else module
        local_parameters = LocalParameters([*outermost.modules()], axis, keeps_parameters=bool(adapters))
        call = ExpertCall(axis, ledger, name_operation("all-to-all", name))
        outermost.register_forward_pre_hook(local_parameters.before_forward, with_kwargs=True)
        module.register_forward_pre_hook(call.before_forward, with_kwargs=True)
        module.register_forward_hook(call.after_forward, prepend=True)  # before tensor parallelism sums its terms
        outermost.register_forward_hook(local_parameters.after_forward, always_call=True)
        distributed.append(outermost)
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
    adapters: list[Any] = []
    outer_name = name
    while outer_name.endswith(".base_layer"):  # PEFT's name for the module in a wrapper
        outer_name = outer_name.removesuffix(".base_layer")
        adapters.insert(0, model.get_submodule(outer_name))
    return adapters


def _distribute_adapter(adapter: Any, axis: SplitAxis) -> None:
    """Keep only this rank's experts in a LoRA adapter of stacked parameters.

    Both matrices have `r` rows or columns per expert, where `r` is the LoRA rank. In `lora_A` the rows of one expert
    are adjacent. In `lora_B` the first columns of all experts come first, then their second columns, and so on.

    Args:
        adapter: PEFT's wrapper of one parameter.
        axis: Mesh axis of expert parallelism.
    """
    for adapter_name, lora_rank in adapter.r.items():
        lora_a, lora_b = adapter.lora_A[adapter_name], adapter.lora_B[adapter_name]
        lora_a._parameters["weight"] = place_parameter(lora_a.weight, ParameterSplit(dim=0), axis)
        lora_b._parameters["weight"] = place_parameter(lora_b.weight, ParameterSplit(dim=1, factor=lora_rank), axis)
    adapter.num_experts = adapter.num_experts // axis.size


def _shard_experts(parameter: torch.nn.Parameter, axis: SplitAxis, mesh_with_tp: Any) -> torch.nn.Parameter:
    """Return a DTensor parameter that holds only this rank's experts.

    Under tensor parallelism, it holds only this rank's shard of each of these experts.

    Args:
        parameter: Parameter of shape (experts, rows, columns), stacked experts. Under tensor parallelism, a DTensor on
            the axis "tp".
        axis: Mesh axis of expert parallelism.
        mesh_with_tp: DeviceMesh of the axes (ep, tp); None without tensor parallelism.
    """
    if mesh_with_tp is None:
        return place_parameter(parameter, ParameterSplit(dim=0), axis)
    dtensor: Any = parameter.detach()
    local = take_chunk(dtensor.to_local(), axis, 0).clone(memory_format=torch.contiguous_format)
    sharded = wrap_shard(local, mesh_with_tp, [tensor.Shard(0), *dtensor.placements], dtensor.shape)
    return torch.nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _holds_experts(module: torch.nn.Module) -> bool:
    """Whether a module has the structure of experts in transformers 5: stacked parameters, and a forward of three arguments.

    All parameters must have one entry per expert along their first dimension. Wrappers of PEFT do not count.
    """
    if is_adapted(module):
        return False
    num_experts, parameters = getattr(module, "num_experts", None), list(module.parameters())
    has_matrices = any(p.dim() == 3 for p in parameters)
    is_stacked = has_matrices and all(p.dim() > 1 and p.shape[0] == num_experts for p in parameters)
    return is_stacked and len(inspect.signature(module.forward).parameters) == 3


def _check_experts(model: torch.nn.Module, expert_modules: dict[str, torch.nn.Module], size: int) -> None:
    """Raise an error if a model's experts cannot be distributed.

    Args:
        model: Model, for its name and its shared parameters.
        expert_modules: Modules of experts, by name.
        size: Number of ranks of expert parallelism.

    Raises:
        PrepareError: If there are no experts, if their number is not a multiple of `size`, or if they share parameters
            with other modules. Also if their adapters cannot be distributed.
    """
    kind = type(model).__name__
    if not expert_modules:
        raise PrepareError(
            f"{kind} has no experts that ep={size} could distribute: no module has stacked parameters (experts, rows, columns), "
            "the attribute num_experts and forward(hidden_states, top_k_index, top_k_weights), as transformers' models have since "
            "version 5. Leave ep out (strategy='fsdp'), or stack the experts in this form. A ModuleList of experts is not "
            "supported"
        )
    for name, module in expert_modules.items():
        number = int(module.num_experts)  # type: ignore[arg-type]
        if number % size:
            raise PrepareError(
                f"{name!r} of {kind} has {number} experts, which cannot be divided among {size} ranks; give ep a divisor of {number}"
            )
    for name, module in expert_modules.items():
        _check_adapters(kind, name, module, _list_adapters(model, name), size)
    shared = [
        name for parameter, holders in find_parameter_owners(model).values() if len(holders) > 1 for name, *_ in holders
    ]
    if tied := [name for name in expert_modules if name in shared]:
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
        weights: Routing weight of each (token, expert) pair, of shape (tokens, experts per token).
        order: Indices that sort the pairs by expert.
        num_sent: Number of rows sent to each rank, by rank. A row is the hidden state of one pair.
        num_received: Number of rows received from each rank, by rank.
        is_idle: Whether no rows were received, so that the forward ran on a row of zeros.
    """

    dtype: torch.dtype
    weights: torch.Tensor
    order: torch.Tensor
    num_sent: list[int]
    num_received: list[int]
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
        self._sent_tokens: SentTokens | None = None  # of the current call
        self.is_silent = False

    @contextmanager
    def _record_exchange(self) -> Iterator[None]:
        """Return a context in which the ledger contains a running all-to-all of tokens. It stays there after an error."""
        entry = self._ledger.record_entry(self._operation)
        # No `finally`: after an error, it is unknown whether all ranks have entered, which `record_exit` records.
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
        hidden, expert_indices, weights = inspect.signature(module.forward).bind(*args, **kwargs).args
        shapes = [tuple(each.shape) for each in (hidden, expert_indices, weights)]
        if (
            expert_indices.is_floating_point()
            or hidden.dim() != 2
            or expert_indices.dim() != 2
            or shapes[1] != shapes[2]
        ):
            raise PrepareError(
                f"{type(module).__name__} was called with tensors of the shapes {shapes}; expert parallelism needs hidden states "
                "(tokens, width), numbers of experts (tokens, k) and their weights (tokens, k), in this order. Leave ep out"
            )
        axis, num_local = self._axis, int(module.num_experts)  # type: ignore[arg-type]
        expert_of_pair = expert_indices.reshape(-1)
        order = expert_of_pair.argsort(stable=True)
        local_experts, num_sent, num_received = self._count_rows(expert_of_pair, num_local)
        # FSDP divides experts' gradients only by the number of ranks that share the experts. So `after_forward` divides
        # gradients by the size of "ep". Gradients of the tokens must not be divided, so this exchange multiplies them
        # by that size again.
        rows = hidden.index_select(0, order // expert_indices.shape[-1])
        rows = exchange_rows(rows, axis, num_sent, num_received, axis.size, self._record_exchange)
        is_idle = not rows.shape[0]
        if is_idle:  # a row of zeros, so that this rank runs the same forward and backward as the others
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            local_experts = local_experts.new_zeros(1)
        self._sent_tokens = SentTokens(
            dtype=hidden.dtype,
            weights=weights,
            order=order,
            num_sent=num_sent,
            num_received=num_received,
            is_idle=is_idle,
        )
        return (rows, local_experts.unsqueeze(1), weights.new_ones(rows.shape[0], 1)), {}

    def _count_rows(self, expert_of_pair: torch.Tensor, num_local: int) -> tuple[torch.Tensor, list[int], list[int]]:
        """Return how many rows this rank exchanges with each rank in one call, and the experts of the received rows.

        Args:
            expert_of_pair: Index of the expert among all experts, for each (token, expert) pair on this rank, in any
                order.
            num_local: Number of experts on this rank.

        Returns:
            Tuple of (local expert index for each received row, number of rows sent to each rank, number of rows
            received from each rank).
        """
        size, num_pairs = self._axis.size, expert_of_pair.numel()
        if is_fake(expert_of_pair):  # a forecast on fake tensors assumes that tokens are spread evenly
            even = [num_pairs // size + (rank < num_pairs % size) for rank in range(size)]
            return torch.zeros_like(expert_of_pair), even, even
        # Both counts have the shape (ranks, experts of one rank).
        sent_counts = torch.bincount(expert_of_pair, minlength=size * num_local).view(size, num_local)
        with self._record_exchange():
            received_counts = exchange_counts(sent_counts.flatten(), self._axis).view(size, num_local)
        # One copy to the host for both lists.
        num_sent, num_received = torch.stack([sent_counts.sum(1), received_counts.sum(1)]).tolist()
        local_experts = torch.arange(num_local, device=expert_of_pair.device).repeat(size)
        return local_experts.repeat_interleave(received_counts.flatten()), num_sent, num_received

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(self, module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Send the experts' results back to the ranks that sent the tokens.

        Return the sum of the results for each of this rank's tokens, weighted by the routing weights.
        """
        sent_tokens = self._sent_tokens
        assert sent_tokens is not None
        self._sent_tokens = None  # it would keep the call's tensors alive
        results = output[:0] if sent_tokens.is_idle else output
        num_received, num_sent = sent_tokens.num_received, sent_tokens.num_sent
        rows = exchange_rows(results, self._axis, num_received, num_sent, 1 / self._axis.size, self._record_exchange)
        if rows.requires_grad:
            rows.register_hook(self._silence_gradient)  # type: ignore[no-untyped-call]
        by_token = rows.index_select(0, sent_tokens.order.argsort()).view(*sent_tokens.weights.shape, -1)
        total: torch.Tensor = (by_token * sent_tokens.weights.unsqueeze(-1)).sum(1)
        return total.to(sent_tokens.dtype)

    def _silence_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient, or zeros if gradients are silenced when backward runs."""
        return torch.zeros_like(gradient) if self.is_silent else gradient
