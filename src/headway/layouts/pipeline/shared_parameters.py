"""`SharedParameters`: parameters that several pipeline ranks hold (tied weights), whose gradients these ranks sum."""

from collections.abc import Mapping

import torch

from headway.core.config.mesh import Layout
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.fully_sharded import dtensors


class SharedParameters:
    """Parameters of the prepared model that several ranks of a pipeline hold. Empty before `find_parameters`.

    The gradients are summed over the ranks at the end of an accumulation window. `grad` then contains the sum, to which
    a later backward must not add a single rank's term. So `set_summed_gradients_aside` moves the sum out of `grad`
    before a backward, and the next `sum_gradients` adds it again.

    Args:
        everyone: Collectives over all ranks of the run.
        group: Collectives over the ranks of this rank's pipeline.
        layout: Number of ranks along each axis.
    """

    def __init__(self, everyone: Collectives, group: Collectives, layout: Layout) -> None:
        self._everyone = everyone
        self._group = group
        self._layout = layout
        # Pairs of (collectives over the ranks that hold the parameters, parameters).
        self._by_group: list[tuple[Collectives, list[torch.nn.Parameter]]] = []
        self._ids_counted_elsewhere: set[int] = set()
        # By the ID of a parameter: its gradient after the last sum, and an earlier sum that was set aside.
        self._summed_grads: dict[int, torch.Tensor] = {}
        self._earlier_grads: dict[int, torch.Tensor] = {}

    def find_parameters(self, model: torch.nn.Module, holders_by_name: Mapping[str, frozenset[int]]) -> None:
        """Find the shared parameters of a model, and create the process groups that sum their gradients.

        Also choose, for each of these parameters, the rank that includes it in gradient norms. All ranks must call it.

        Args:
            model: Model that is split into stages.
            holders_by_name: Pipeline ranks that hold each parameter, by the parameter's name.
        """
        parameters_by_holders: dict[frozenset[int], list[torch.nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            holders = holders_by_name[name]
            if len(holders) > 1:
                parameters_by_holders.setdefault(holders, []).append(parameter)
                if self._group.rank != min(holders):
                    self._ids_counted_elsewhere.add(id(parameter))
        # Sorted, because all ranks must create the process groups in the same order.
        for holders, parameters in sorted(parameters_by_holders.items(), key=lambda pair: sorted(pair[0])):
            if len(holders) == self._group.world_size:
                self._by_group.append((self._group, parameters))
                continue
            # A split needs each global rank: ranks that do not hold the parameters are alone in their groups.
            rank_lists: list[list[int]] = []
            for pipeline in self._layout.list_groups("pp"):
                rank_lists.append([pipeline[rank] for rank in sorted(holders)])
                rank_lists += [[pipeline[rank]] for rank in range(len(pipeline)) if rank not in holders]
            subgroup = self._everyone.split(rank_lists)
            if self._group.rank in holders:
                self._by_group.append((subgroup, parameters))

    def is_counted_elsewhere(self, parameter: torch.Tensor) -> bool:
        """Whether another pipeline rank includes this parameter in gradient norms."""
        return id(parameter) in self._ids_counted_elsewhere

    def set_summed_gradients_aside(self) -> None:
        """Take sums of gradients out of `grad` and keep them, so that the next sum contains only later gradients."""
        for _, parameters in self._by_group:
            for parameter in parameters:
                summed = self._summed_grads.pop(id(parameter), None)
                if summed is not None and parameter.grad is summed:
                    self._earlier_grads[id(parameter)] = summed
                    parameter.grad = None

    def sum_gradients(self) -> None:
        """Sum the gradients over the ranks that hold the parameters, and add the sums that were set aside before.

        A missing gradient counts as zero. All ranks must call it.
        """
        for group, parameters in self._by_group:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.contiguous() for p in trained]
            group.sum_in_place([shard for shard in map(dtensors.get_local_shard, grads) if shard.numel()])
            for parameter, grad in zip(trained, grads):
                earlier_grad = self._earlier_grads.pop(id(parameter), None)
                parameter.grad = grad if earlier_grad is None else earlier_grad.add_(grad)
                self._summed_grads[id(parameter)] = parameter.grad

    def drop_gradients(self) -> None:
        """Forget all sums, because the gradients are discarded."""
        self._summed_grads.clear()
        self._earlier_grads.clear()

    def release(self) -> None:
        """Forget the parameters and their gradients."""
        self._by_group = []
        self._ids_counted_elsewhere = set()
        self.drop_gradients()
