"""`ShardedModel`, a model that `MeshStrategy` has prepared, with the detectors and counters that watch its parameters."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from headway.core.config.parallelism import ShardingOptions
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.strategies.fully_sharded.axes import SplitModel
from headway.core.strategies.fully_sharded.lost_writes import LostWrites
from headway.core.strategies.fully_sharded.parameter_usage import ParameterUsage
from headway.core.strategies.fully_sharded.second_order import SecondOrder
from headway.core.strategies.fully_sharded.shard_writes import ShardWrites


class ShardedModel:
    """A prepared model with its helper objects. Create it after the model has been sharded.

    Args:
        model: The user's own model.
        context_parallel: Wrapper that is called in place of the model and splits its sequences; None without context
            parallelism.
        splits: Splits of the model along mesh axes other than context parallelism, such as tensor parallelism.
        lost_writes: Detector of hooks and writes that would be lost.
        everyone: Collectives over all ranks that hold the model.
        options: Options of sharding.
        is_stage: Whether the model is a stage of a pipeline.

    Attributes:
        model, context_parallel, splits, lost_writes: Arguments of the same names.
        usage: Record of the parameters that the losses of an accumulation window have used.
        second_order: Detector of backwards with `create_graph=True`.
        writes: Counter of in-place changes of shards.
        dtypes: Expected dtype of each shard and its gradient, by the shard's ID.
        scalars: Pairs of (name, parameter) for the parameters without dimensions that FSDP leaves unsharded. Empty if
            FSDP does not manage the parameters.
        units: Modules that FSDP gathers separately, including the root. Empty if FSDP does not manage the parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        context_parallel: Any,
        splits: Sequence[SplitModel],
        lost_writes: LostWrites,
        everyone: Collectives,
        options: ShardingOptions,
        is_stage: bool,
    ) -> None:
        self.model = model
        self.context_parallel = context_parallel
        self.splits = splits
        self.lost_writes = lost_writes
        self.usage = ParameterUsage(model, everyone, options.find_unused_parameters)
        self.second_order = SecondOrder(model)
        self.writes = ShardWrites(model)
        shards = [record.sharded_param for record in fsdp_state.iterate_records(model)]
        self.dtypes: dict[int, torch.dtype] = {id(shard): shard.dtype for shard in shards}
        self._num_training_forwards = 0
        self.units: list[Any] = list(fsdp_state.iterate_sharded_modules(model))
        self.scalars = [
            (name, p) for name, p in model.named_parameters() if not p.ndim and not p.is_meta and self.units
        ]
        fsdp_state.watch_outputs(model)
        # A pipeline calls the blocks of its stages itself, and keeps their parameters gathered.
        self._forward_hook = None if is_stage else model.register_forward_hook(self._end_forward)

    def _end_forward(self, module: Any, args: Any, output: Any) -> None:
        """Free gathered parameters after a forward without gradients, and check for assigned values. This is a forward hook.

        FSDP keeps the root's parameters gathered for a backward, which does not follow an evaluation. Until the next
        update, the module tree would show the gathered copies. Later forwards would use these copies even after
        values were written into the shards, such as averaged weights.

        Values that the script assigned to `parameter.data` have no effect. Forwards with gradients check for them only
        after 1, 2, 4, 8 and so on of them, because the check takes time for each parameter.

        Raises:
            StateError: If values were assigned.
        """
        if not torch.is_grad_enabled():
            self.reshard()
            self.lost_writes.check_assigned()  # otherwise assigned weights would be evaluated silently
        elif not torch.compiler.is_compiling():  # a counter would make torch.compile compile each forward anew
            self._num_training_forwards += 1
            # The check before an optimizer step misses optimizers with steps of their own, such as SAM's second_step().
            if not self._num_training_forwards & (self._num_training_forwards - 1):
                self.lost_writes.check_assigned()

    def reshard(self) -> None:
        """Free all gathered parameters, so that the module tree shows shards again."""
        for unit in self.units:
            unit.reshard()

    def release(self) -> None:
        """Remove what preparation has added to the model, such as hooks. Parameters stay split and sharded."""
        release_splits(self.splits, self.context_parallel)
        self.reshard()
        self.usage.release()
        self.second_order.release()
        if self._forward_hook is not None:
            self._forward_hook.remove()


def release_splits(splits: Iterable[SplitModel], context_parallel: Any) -> None:
    """Remove what the splits along mesh axes have added to a model, such as hooks and patched functions.

    The parameters stay split.

    Args:
        splits: Splits of the model along mesh axes other than context parallelism.
        context_parallel: Wrapper that splits the model's sequences; None without context parallelism.
    """
    for split in splits:
        split.release()
    if context_parallel is not None:
        context_parallel.release()
