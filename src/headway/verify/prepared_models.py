"""`PreparedModels`: names and values of the tensors of a run's prepared models and optimizers."""

from collections.abc import Iterator
from typing import Any, Literal

import torch

from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training.run import Run
from headway.verify.calls import ModelNames
from headway.verify.fingerprints import hash_tensor, sample_values
from headway.verify.record_types import OptimizerFacts
from headway.verify.sharded_tensors import gather_full_tensor, get_address
from headway.verify.sources import get_source_watch

_WRAPPER_NAMES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")
"""Names that wrappers (DDP, torch.compile, activation checkpointing) insert into the names of tensors."""
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)

Kind = Literal["named_parameters", "named_buffers"]
"""Method of a module that lists its tensors."""


class PreparedModels(ModelNames):
    """Prepared models and optimizers of a run.

    Args:
        run: Run of the Accelerator.

    Attributes:
        is_partial: Whether this rank has only some of the models' tensors, as under pipeline parallelism. Known after
            tensors have been listed.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._prepared = run.prepared
        self.is_partial = False

    # ---------------------------------------------------------------- names for torch calls

    def map_tensors(self) -> tuple[dict[int, str], dict[int, str]]:
        """Return two dicts with the names of parameters and buffers: by the tensor's `id`, and by its memory address.

        Sharded parameters are not gathered, because this method is called during a forward pass. The second dict has
        the addresses of this rank's shards.
        """
        kinds: tuple[Kind, ...] = ("named_parameters", "named_buffers")
        named = [pair for model in self._prepared.models for kind in kinds for pair in getattr(model, kind)()]
        by_id = {id(tensor): name for name, tensor in named}
        # A shard without elements has no memory of its own.
        by_address = {get_address(tensor): name for name, tensor in named if get_local_shard(tensor).numel()}
        return by_id, by_address

    def map_modules(self) -> dict[int, str]:
        """Return the name of each module of the prepared models, by its `id`."""
        return {id(module): name for model in self._prepared.models for name, module in model.named_modules()}

    def map_gradients(self) -> dict[int, str]:
        """Return the name of each parameter with a gradient, by the memory address of the gradient (local shard)."""
        named = [pair for model in self._prepared.models for pair in model.named_parameters()]
        return {get_address(p.grad): name for name, p in named if p.grad is not None and p.grad.numel()}

    # ---------------------------------------------------------------- tensors

    def list_tensors(self, kind: Kind) -> Iterator[tuple[str, Any]]:
        """Yield the name and the tensor of each parameter or buffer of which this rank has values.

        Names of wrappers are left out. With several models, the name begins with the class and the index of the model.
        Parameters that are sharded during the forward are in their form between forwards.

        Args:
            kind: "named_parameters" or "named_buffers".
        """
        has_several_models = len(self._prepared.models) > 1
        for index, model in enumerate(self._prepared.reshard_models()):
            class_name = type(model).__name__.removeprefix("Prepared")
            for name, tensor in getattr(model, kind)():
                if tensor.is_meta:  # a parameter of another pipeline stage
                    self.is_partial = True
                    continue
                for wrapper in _WRAPPER_NAMES:
                    name = name.replace(wrapper, "")
                yield (f"{class_name} {index}: {name}" if has_several_models else name), tensor

    def sample_parameters(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Return a hash and a sample of the full values of each parameter, as two dicts by parameter name."""
        hashes, samples = {}, {}
        for name, tensor in self.list_tensors("named_parameters"):
            full = gather_full_tensor(tensor.detach())
            hashes[name] = hash_tensor(full)
            samples[name] = sample_values(full)
        return hashes, samples

    def hash_buffers(self) -> dict[str, str]:
        """Return a hash of the full values of each buffer, by buffer name."""
        buffers = self.list_tensors("named_buffers")
        return {name: hash_tensor(gather_full_tensor(tensor.detach())) for name, tensor in buffers}

    def list_stale_gradients(self) -> list[str]:
        """Return the names of the parameters that have a gradient, but do not require one."""
        named = self.list_tensors("named_parameters")
        return [name for name, parameter in named if parameter.grad is not None and not parameter.requires_grad]

    # ---------------------------------------------------------------- descriptions

    def list_trainable(self) -> list[str]:
        """Return the names of the parameters that require gradients."""
        return [name for name, parameter in self.list_tensors("named_parameters") if parameter.requires_grad]

    def list_frozen(self) -> list[str]:
        """Return the names of the parameters that do not require gradients.

        Those of bitsandbytes are left out, because bitsandbytes replaces their values by packed ones at the first use.
        """
        return [
            name
            for name, parameter in self.list_tensors("named_parameters")
            if not parameter.requires_grad and not type(parameter).__module__.startswith("bitsandbytes")
        ]

    def list_trainable_dtypes(self) -> list[str]:
        """Return the names of the dtypes of all trainable parameters, such as "float32", sorted."""
        named = self.list_tensors("named_parameters")
        return sorted({str(p.dtype).removeprefix("torch.") for _, p in named if p.requires_grad})

    def list_batch_norms(self) -> list[str]:
        """Return the names of the BatchNorm modules that are not synchronized between ranks."""
        return [
            name
            for model in self._prepared.models
            for name, module in model.named_modules()
            if isinstance(module, _BATCH_NORMS) and not isinstance(module, torch.nn.SyncBatchNorm)
        ]

    def list_optimized(self) -> list[str]:
        """Return the names of the parameters that belong to a prepared optimizer."""
        optimized = {
            id(parameter)
            for each in self._prepared.optimizers
            for group in each.optimizer.param_groups
            for parameter in group["params"]
        }
        return [name for name, parameter in self.list_tensors("named_parameters") if id(parameter) in optimized]

    def describe_optimizers(self) -> list[OptimizerFacts]:
        """Return the type of each prepared optimizer, and the script line that created it."""
        return [
            {"type": type(each.optimizer).__name__, "line": get_source_watch().get_creation_line(each.optimizer)}
            for each in self._prepared.optimizers
        ]

    def count_states(self) -> int:
        """Return the number of parameters for which prepared optimizers have a state."""
        return sum(len(each.optimizer.state) for each in self._prepared.optimizers)

    def count_dropout_rates(self, *, sets_to_zero: bool) -> int:
        """Return the number of nonzero dropout rates among the attributes of all modules.

        Args:
            sets_to_zero: Whether to set the rates to 0, too.
        """
        num_rates = 0
        for model in self._prepared.models:
            for module in model.modules():
                for name, value in list(vars(module).items()):
                    is_rate = "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
                    if is_rate and isinstance(value, float) and 0 < value < 1:
                        num_rates += 1
                        if sets_to_zero:
                            setattr(module, name, 0.0)
        return num_rates

    def find_model(self, model: torch.nn.Module) -> int:
        """Return the index of a model among the prepared models, or -1 if it is not one of them."""
        return next((index for index, each in enumerate(self._prepared.models) if each is model), -1)
