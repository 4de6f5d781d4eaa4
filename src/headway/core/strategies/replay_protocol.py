"""`ReplayStrategy`, the part of a strategy that discards gradients and undoes batches that are run again."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from headway.core.runtime.collective_log import RecordedCollective
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import CollectiveError


class ReplayStrategy:
    """Protocol for discarding gradients, removing them temporarily, and undoing a batch that is then run again.

    Gradients are discarded after a non-finite loss. Automatic micro-batching runs a batch again in smaller
    micro-batches. The defaults assume a full model on each rank and compute micro-batches without communication.

    Attributes:
        name: Name of the strategy in messages.
        data_group: Collectives over which loss weights and metrics are reduced.
        everyone: Collectives over all ranks.
    """

    name: str
    data_group: Collectives
    everyone: Collectives

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """Prepare for another backward through forwards whose gradients were already reduced.

        The gradients of this backward are added to the existing ones and reduced, too.
        """

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Discard the gradients of an accumulation window that failed, including those that an engine stores."""
        for parameter in parameters:
            parameter.grad = None

    def stash_gradients(self, parameters: Iterable[torch.Tensor]) -> Any:
        """Remove the gradients of the parameters temporarily, including gradients that an engine stores.

        Returns:
            Value for `restore_gradients`.
        """
        stash = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in stash:
            parameter.grad = None
        return stash

    def restore_gradients(self, stash: Any) -> None:
        """Restore the gradients that `stash_gradients` removed, and discard those computed since.

        Args:
            stash: Return value of `stash_gradients`.
        """
        for parameter, grad in stash:
            parameter.grad = grad

    @contextmanager
    def silence_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Return a context in which backward produces zero gradients for the parameters.

        The context is used for a batch whose loss has weight 0.
        """
        with ExitStack() as stack:
            for parameter in parameters:
                if parameter.requires_grad:
                    stack.enter_context(parameter.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]
            yield

    def discard_update(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Discard the gradients of an update that is skipped."""
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def prepare_reduction(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Allocate the memory that `reduce_gradients` needs, so that the reduction itself cannot run out of memory.

        Returns:
            Number of parameters without a gradient on this rank, or 0 if the strategy does not need this number.
        """
        return 0

    def clean_up_failure(self) -> None:
        """Free temporary tensors and buffers that a failed forward or backward has left on this rank.

        Afterwards `join_collective` can be called.
        """

    def list_members(self, step: RecordedCollective) -> Sequence[int]:
        """Return the global ranks that take part in a collective of the current batch.

        Args:
            step: Collective, as recorded in the `CollectiveLog`.

        Raises:
            CollectiveError: If the collective is none of this strategy's.
        """
        return self._find_collectives(step).list_ranks()

    def join_collective(self, step: RecordedCollective) -> None:
        """Join a collective in which other ranks wait, with values that do not change its result.

        Args:
            step: Collective, as recorded in the `CollectiveLog`.

        Raises:
            CollectiveError: If any value would change the result, or if the collective is none of this strategy's.
        """
        self._find_collectives(step).join_with_neutral_values(step)

    def _find_collectives(self, step: RecordedCollective) -> Collectives:
        """Return the collectives of the group that a recorded exchange used.

        Raises:
            CollectiveError: If the group is neither `everyone` nor `data_group`.
        """
        for group in (self.everyone, self.data_group):
            if group.log_name == step.group:
                return group
        raise CollectiveError(f"{step.operation} of {step.group} is no exchange of the {self.name} strategy")

    def snapshot(self) -> Any:
        """Return the state, other than gradients and buffers, that `restore` needs to undo a batch."""

    def restore(self, snapshot: Any) -> None:
        """Restore the state from a snapshot, and discard gathered parameters and pending communication of the batch.

        A snapshot can be restored several times.
        """
