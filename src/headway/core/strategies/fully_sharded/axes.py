"""Mesh axes that split a model by its structure (tensor, context and expert parallelism), in addition to FSDP.

`MeshStrategy` finds the class of an axis in `headway.core.extensions` by the axis's name: "tp" for tensor, "cp" for
context and "ep" for expert parallelism. It imports only the axes that a layout has. The classes are in
`headway.layouts`.
"""

import weakref
from collections.abc import Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.config.float8 import Float8Options
from headway.core.config.mesh import Layout
from headway.core.config.parallelism import ShardingOptions, TensorParallelOptions, TorchContextParallelConfig
from headway.core.runtime.collectives.checked import Collectives


@dataclass(frozen=True)
class AxisOptions:
    """Settings of a run that the classes of mesh axes read.

    Attributes:
        layout: Number of ranks along each axis.
        sharding: Options of sharding.
        tensor: Options of tensor parallelism.
        context: Options of context parallelism.
        number_format: Mixed precision of the run, such as "bf16".
        float8: Options of float8, for the number format "fp8". None: defaults are used.
    """

    layout: Layout
    sharding: ShardingOptions
    tensor: TensorParallelOptions
    context: TorchContextParallelConfig
    number_format: str
    float8: Float8Options | None


class SplitModel:
    """Split of one model along one mesh axis, such as tensor parallelism. By default its methods do nothing.

    Attributes:
        distributed: Modules whose parameters differ between the ranks of the axis, such as experts. They are sharded over
            the other axes only.
    """

    distributed: Sequence[torch.nn.Module] = ()

    def resume(self) -> None:
        """Enable the split again when a model that is still split is prepared a second time."""

    def release(self) -> None:
        """Undo the changes that the split has made, except to the parameters. For example, remove its hooks."""

    def backward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which backward runs."""
        return nullcontext()

    def check_gradients(self, ranks: Collectives) -> None:
        """Raise an error if gradients that must be equal on all ranks of the axis differ.

        All ranks must call this.

        Raises:
            PrepareError: On all ranks, if such gradients differ between ranks.
        """

    def silence_gradients(self) -> AbstractContextManager[Any]:
        """Return a context in which backward sends only zero gradients to other ranks of the axis."""
        return nullcontext()

    def end_forward(self) -> None:
        """Restore the modules after a pipeline stage has ended their forward early."""


class ModelAxis:
    """Mesh axis along which models are split, such as tensor parallelism.

    Args:
        options: Settings of the run.

    Attributes:
        announced: All models of the Accelerator that are known so far. The options may name parts of any of them.

    Raises:
        UnsupportedError: If the axis cannot be combined with the options.
    """

    def __init__(self, options: AxisOptions) -> None:
        self.options = options
        self.announced: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def announce_models(self, models: Iterable[torch.nn.Module]) -> None:
        """Record models that will be split. The options may name parts of any model that was announced."""
        self.announced.update(models)

    def split_model(
        self, model: torch.nn.Module, mesh: Any, ranks: Collectives, other_stage_ids: Container[int] = ()
    ) -> SplitModel:
        """Split a model in place.

        Args:
            model: Model on the meta device, or with equal values on all ranks.
            mesh: torch's device mesh, with axes named as in the layout.
            ranks: Collectives over all ranks of the run.
            other_stage_ids: IDs of parameters and buffers that only other pipeline stages hold. They are not split.

        Raises:
            ConfigError: If the options do not fit the model.
            PrepareError: If the model cannot be split.
        """
        raise NotImplementedError(f"{type(self).__name__} must define split_model(model, mesh, ranks, other_stage_ids)")
