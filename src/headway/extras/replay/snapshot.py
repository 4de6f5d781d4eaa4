"""Snapshot that undoes a batch: its gradients, buffers, RNG states and the states of registered objects."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from headway.core.runtime.device import Hardware
from headway.core.runtime.seed import read_rng_states, write_rng_states
from headway.core.training.prepared.objects import PreparedObjects, iterate_parameters
from headway.extras._torch import foreach_add_, foreach_copy_


class Rewindable(Protocol):
    """Interface of an object whose state can be saved and restored, to undo a batch or several updates."""

    def snapshot(self) -> Any:
        """Return a copy of the object's state, which `restore` accepts."""

    def restore(self, snapshot: Any) -> None:
        """Restore the state that `snapshot` returned. A snapshot can be restored more than once."""


class _BufferCopy(NamedTuple):
    """Copy of a buffer of a module.

    Attributes:
        module_buffers: The module's dict of buffers, which contains the buffer under `name`.
        name: Name of the buffer in its module.
        buffer: Buffer tensor, which is put back if the module has replaced it.
        values: Copy of its values.
    """

    module_buffers: dict[str, Any]
    name: str
    buffer: torch.Tensor
    values: torch.Tensor


class BatchSnapshot:
    """Snapshot of the state at the start of a batch: gradients, buffers, RNG states and registered objects.

    Gradients of earlier batches in the accumulation window are moved into the snapshot rather than copied. The
    batch's own gradients start from None, and both are added before they are reduced. So two sets of gradients exist
    during all batches of a window except the first.

    Args:
        prepared: Registry of models and optimizers.
        states: Objects with `snapshot` and `restore`, in addition to the prepared optimizers: accumulation windows,
            update clock, precision.
        hardware: Functions of the device type, whose RNG state is included.
        has_counts: Whether the update counts of the prepared optimizers are included. False if updates that were made
            since stay. Default: True.
    """

    def __init__(
        self, prepared: PreparedObjects, states: Sequence[Rewindable], hardware: Hardware, *, has_counts: bool = True
    ) -> None:
        self._prepared = prepared
        self._has_counts = has_counts
        self._rewindables = tuple(states)
        self._hardware = hardware
        self._grads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # of earlier batches in the window
        self._buffers: list[_BufferCopy] = []
        self._states: list[tuple[Rewindable, Any]] = []
        self._rng_states: dict[str, Any] = {}
        self._is_merged = False

    def save_state(self) -> None:
        """Save the current state. Existing gradients are moved into the snapshot, and `grad` becomes None."""
        self._grads, self._is_merged = [], False
        for parameter in self.parameters():
            if parameter.grad is not None:
                self._grads.append((parameter, parameter.grad))
                parameter.grad = None
        self._copy_buffers()
        self._rng_states = read_rng_states(self._hardware)
        optimizers = self._prepared.optimizers if self._has_counts else ()
        self._states = [(each, each.snapshot()) for each in (*self._rewindables, *optimizers)]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of all prepared models, each once."""
        return self._prepared.list_parameters()

    def _copy_buffers(self) -> None:
        """Copy buffers. The memory of earlier copies is reused if shapes and dtypes fit."""
        earlier_values = {id(each.buffer): each.values for each in self._buffers}
        values_by_id: dict[int, torch.Tensor] = {}  # a buffer of several modules is copied once
        copies = []
        for model in self._prepared.models:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is None:
                        continue
                    values = values_by_id.get(id(buffer), earlier_values.get(id(buffer)))
                    if values is None or values.shape != buffer.shape or values.dtype != buffer.dtype:
                        values = torch.empty_like(buffer)
                    values_by_id[id(buffer)] = values
                    copies.append(_BufferCopy(module._buffers, name, buffer, values))
        self._buffers = copies
        if copies:
            foreach_copy_([each.values for each in copies], [each.buffer.detach() for each in copies])

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients of earlier batches that the snapshot stores for an optimizer's parameters.

        Needed if `zero_grad` is called before the first backward of an accumulation window.
        """
        dropped = set(map(id, iterate_parameters(optimizer)))
        self._grads = [(p, grad) for p, grad in self._grads if id(p) not in dropped]

    def merge_gradients(self) -> None:
        """Add the stored gradients of earlier batches to those of the batch. Further calls do nothing.

        The stored gradients stay unchanged.
        """
        if self._is_merged:
            return
        self._is_merged = True
        new_grads, earlier_grads = [], []
        for parameter, earlier_grad in self._grads:
            if parameter.grad is None:
                parameter.grad = earlier_grad.clone()
            else:
                new_grads.append(parameter.grad)
                earlier_grads.append(earlier_grad)
        if new_grads:
            foreach_add_(new_grads, earlier_grads)

    def restore(self) -> None:
        """Restore the state that `save_state` saved at the start of the batch. The snapshot can be used again.

        `grad` of each parameter becomes None. `restore_gradients` puts back the gradients of earlier batches.
        """
        self._is_merged = False
        for parameter in self.parameters():
            parameter.grad = None
        with torch.no_grad():
            for copied in self._buffers:
                copied.module_buffers[copied.name] = copied.buffer
                copied.buffer.copy_(copied.values)
        write_rng_states(self._rng_states, self._hardware)
        for each, state in self._states:
            each.restore(state)

    def restore_gradients(self) -> None:
        """Set `grad` of each parameter to the stored gradients of earlier batches.

        Called after `restore` if the batch will not be run again.
        """
        for parameter, grad in self._grads:
            parameter.grad = grad
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Release the stored gradients of earlier batches."""
        self._grads = []
