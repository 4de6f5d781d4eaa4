"""`ShardedModel`, a model that `MeshStrategy` has prepared, with the detectors and counters that watch its parameters."""

from dataclasses import dataclass, field
from typing import Any

import torch

from headway.core.config.parallelism import ShardingOptions
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.strategies.fully_sharded.axes import SplitModel
from headway.core.strategies.fully_sharded.checks import LostWrites, ParameterUsage, SecondOrder
from headway.core.strategies.fully_sharded.shard_writes import ShardWrites


@dataclass(eq=False)  # each object equals only itself, because a comparison of its fields would compare tensors
class ShardedModel:
    """A prepared model with its helper objects.

    Attributes:
        model: The user's own model.
        context_parallel: Wrapper that is called in place of the model and splits its sequences; None without context
            parallelism.
        splits: Splits of the model along mesh axes other than context parallelism, such as tensor parallelism.
        lost_writes: Detector of hooks and writes that would be lost.
        usage: Record of the parameters that the losses of an accumulation window have used.
        second_order: Detector of backwards with `create_graph=True`.
        writes: Counter of in-place changes of shards.
        units: Modules that FSDP gathers separately, including the root. Empty for a stage of a pipeline.
        free_hook: Handle of the hook that frees the parameters gathered for an evaluation. None for a stage of a
            pipeline.
        dtypes: Expected dtype of each shard and its gradient, by the shard's ID.
    """

    model: torch.nn.Module
    context_parallel: Any = None
    splits: list[SplitModel] = field(default_factory=list)
    lost_writes: LostWrites | None = None
    usage: ParameterUsage = field(init=False)
    second_order: SecondOrder = field(init=False)
    writes: ShardWrites = field(init=False)
    units: list[Any] = field(default_factory=list)
    free_hook: Any = None
    dtypes: dict[int, torch.dtype] = field(init=False)

    def attach_detectors(self, everyone: Collectives, options: ShardingOptions, is_stage: bool) -> None:
        """Create the detectors and counters for the parameters, after the model has been sharded.

        Args:
            everyone: Collectives over all ranks.
            options: Options of sharding.
            is_stage: Whether the model is a stage of a pipeline.
        """
        self.usage = ParameterUsage(self.model, everyone, options.find_unused_parameters)
        self.second_order = SecondOrder(self.model)
        self.writes = ShardWrites(self.model)
        if not is_stage:
            self.units = list(fsdp_state.iterate_sharded_modules(self.model))
            self.free_hook = self.model.register_forward_hook(self._end_evaluation)
        parts = [record.sharded_param for record in fsdp_state.iterate_records(self.model)]
        self.dtypes = {id(part): part.dtype for part in parts}

    def _end_evaluation(self, module: Any, args: Any, output: Any) -> None:
        """Free gathered parameters when a forward without gradients ends. This is a forward hook.

        FSDP keeps the root's parameters gathered for a backward, which does not follow an evaluation. Until the next
        update, the module tree would show the gathered copies. Later forwards would use these copies even after
        values were written into the shards, such as averaged weights.
        """
        if torch.is_grad_enabled():
            return
        for unit in self.units:
            unit.reshard()
        if self.lost_writes is not None:
            self.lost_writes.check_assigned()  # otherwise assigned weights would be evaluated silently

    def release_splits(self) -> None:
        """Remove what the splits along mesh axes have added to the model, such as hooks and patched functions.

        The parameters stay split.
        """
        for split in self.splits:
            split.release()
        if self.context_parallel is not None:
            self.context_parallel.release()
