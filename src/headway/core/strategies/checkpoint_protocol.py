"""`CheckpointStrategy`, the part of a strategy that initializes, loads and exports values of models and optimizers."""

from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.fully_sharded.values import check_initializers, fill_model
from headway.core.weights.pieces import split_wrappers
from headway.core.weights.quantization_data import add_quantization_data
from headway.errors import PrepareError


class CheckpointStrategy:
    """Protocol for initializing, saving and loading the values of models and optimizers.

    The defaults assume a full model on each rank, whose state dict contains all values.

    Attributes:
        everyone: Collectives over all ranks.
    """

    everyone: Collectives
    _expected_names: Set[str] = frozenset()

    def expect_values(self, names: Set[str]) -> None:
        """Record which tensors of the next model to be prepared will be filled from files or from rank 0.

        The tensors are filled during or after `setup_model`.

        Args:
            names: Names of the tensors.
        """
        self._expected_names = names

    def materialize_model(self, model: torch.nn.Module) -> None:
        """Initialize a model that is on the meta device, with equal values on all ranks.

        Called before `move_model`. A subclass may defer the initialization to `setup_model`. Tensors recorded by
        `expect_values` are only allocated.

        Raises:
            PrepareError: If a parameter is on the meta device and no values are expected for it, or if a module cannot
                initialize its buffers.
        """
        lazy = [name for name, p in model.named_parameters() if p.is_meta and name not in self._expected_names]
        if lazy:
            raise PrepareError(
                f"{len(lazy)} parameters of {type(model).__name__} are on the meta device (as {lazy[0]!r}); before prepare(), name "
                "the checkpoint that has their values: accelerator.load_weights(model, folder)"
            )
        check_initializers(model, self._expected_names)
        fill_model(model, (), self.everyone.runtime.device, self.everyone, self._expected_names)

    def unwrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module that the user passed to `prepare()`."""
        return model

    def free_gathered(self, model: torch.nn.Module) -> None:
        """Free gathered parameters, so that the model's parameters are the sharded ones until the next forward."""

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield pairs of (name, value) for the entries of the model's state dict, one at a time.

        Names are those of the unwrapped module. Values are tensors, except for other objects that `get_extra_state()`
        returns. Sharded tensors are yielded as DTensors or shards, and are never gathered. A quantized weight of torchao is
        split into plain tensors. A 4-bit weight of bitsandbytes is followed by its quantization data.
        """
        module = self.unwrap_model(model)
        yield from split_wrappers(add_quantization_data(module, module.state_dict().items()))

    def get_part(self, parameter: torch.Tensor) -> Any:
        """Return a parameter as `export_state` yields it: the parameter itself, or this rank's shard."""
        return parameter

    def expose_state(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Return a context in which a prepared optimizer contains its state.

        The context is needed for engines that keep the state elsewhere.
        """
        return nullcontext()

    def apply_loaded_values(self) -> None:
        """Apply the values that a load has written into exported tensors and optimizer states.

        All ranks must call this.
        """

    def get_reduction_order(self, model: torch.nn.Module) -> list[int]:
        """Return the indices of parameters in the order in which their gradients are reduced. All ranks must call this.

        The order affects the rounding of sums. The list is empty if the order is unknown or has no effect.
        """
        return []

    def set_reduction_order(self, model: torch.nn.Module, order: Sequence[int]) -> None:
        """Restore the order of gradient reductions of the run that is resumed. All ranks must call this.

        Args:
            model: Prepared model.
            order: Return value of `get_reduction_order` in the earlier run.
        """
