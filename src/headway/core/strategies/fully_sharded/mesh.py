"""Sharded layouts on torch's FSDP2 and DTensor: a device mesh with named axes along which parameters are DTensors.

FSDP2 (`fully_shard`) shards each parameter along its first dimension over the axis "shard". It gathers a unit's
parameters before its forward and its backward, and reduces gradients to shards again. Parameters without dimensions
(scalars) stay unsharded on each rank, and their gradients are averaged once per window. HSDP adds the axis "replicate".
Sharding has consequences: optimizers step on the parameters that `find_current` returns, norms need a collective
(`gradient_norm.py`), and all ranks of the mesh must run a model together.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headway.common import scope, tracebacks
from headway.common.optional import LazyModule
from headway.core import extensions
from headway.core.config.float8 import Float8Options
from headway.core.config.mesh import Layout, format_sizes
from headway.core.config.parallelism import ShardingOptions, TensorParallelOptions, TorchContextParallelConfig
from headway.core.data.sampling.shard import ShardIndex
from headway.core.precision.mixed import Precision
from headway.core.runtime import process
from headway.core.runtime.collective_log import RecordedCollective
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.base import Capabilities, Engine, Strategy, Transform
from headway.core.strategies.device_mesh import build_mesh, describe_ended_groups
from headway.core.strategies.fully_sharded import dtensors, fsdp_collectives, fsdp_state
from headway.core.strategies.fully_sharded.axes import AxisOptions
from headway.core.strategies.fully_sharded.dtensor_errors import explain_error
from headway.core.strategies.fully_sharded.float8_weights import compute_float8_scales
from headway.core.strategies.fully_sharded.formats import check_formats
from headway.core.strategies.fully_sharded.full_parameter_updates import FullParameterUpdates
from headway.core.strategies.fully_sharded.full_scalars import FullScalars
from headway.core.strategies.fully_sharded.gradient_norm import compute_total_norm, count_copies
from headway.core.strategies.fully_sharded.model_sharder import ModelSharder, load_axes
from headway.core.strategies.fully_sharded.optimizer_checks import check_optimizer, check_sizes, warn_of_own_state_dict
from headway.core.strategies.fully_sharded.parameter_usage import ParameterUsage
from headway.core.strategies.fully_sharded.sharded_model import ShardedModel
from headway.core.strategies.fully_sharded.values import check_initializers
from headway.core.strategies.replica import average_gradients
from headway.core.strategies.sharding_records import ReplacedParameters
from headway.core.weights.pieces import is_dtensor
from headway.errors import StateError

fsdp = LazyModule("torch.distributed.fsdp")


@dataclass(frozen=True)
class StashedGradients:
    """Gradients that `MeshStrategy.stash_gradients` has removed, with the record of used parameters.

    Attributes:
        reduced: Pairs of (parameter, gradient), for the gradients in `grad`.
        unreduced: Unsharded gradients that FSDP stores, from `fsdp_state.remove_unreduced_gradients`.
        usage: Pairs of (record of a model's used parameters, copy of its contents).
    """

    reduced: Any
    unreduced: list[fsdp_state.UnreducedGradients]
    usage: list[tuple[ParameterUsage, Any]]


class MeshStrategy(Strategy):
    """Strategy that shards parameters along the axes of a device mesh.

    Args:
        collectives: Collectives over all ranks.
        layout: Number of ranks along each axis.
        options: Options of sharding.
        number_format: Mixed precision of the run: "no", "bf16", "fp16" or "fp8". Default: "no".
        tensor: Options of tensor parallelism. If None, models' own plans are used.
        context: Options of context parallelism. If None, defaults are used.
        float8: Options of float8, for the number format "fp8". If None, defaults are used.
        device_type: Device type for which number formats are chosen. If None, this process's device type.

    Attributes:
        everyone: Collectives over all ranks. In a pipeline, only over the ranks that hold the same stages as this rank.
        mesh: torch's device mesh, with axes named as in the layout.
        sharder: Part of the strategy that shards models.

    Raises:
        ConfigError: If the options of sharding do not fit the number of shards.
        UnsupportedError: If an axis of the layout cannot be combined with the options.
    """

    name = "fsdp"
    capabilities = Capabilities(
        lone_forward=False, whole_gradients=False, copies=False, lone_pieces=False, local_training=False
    )

    def __init__(
        self,
        collectives: Collectives,
        layout: Layout,
        options: ShardingOptions,
        number_format: str = "no",
        tensor: TensorParallelOptions | None = None,
        context: TorchContextParallelConfig | None = None,
        float8: Float8Options | None = None,
        device_type: str | None = None,
    ) -> None:
        super().__init__(collectives)
        options.check(layout.num_shards)
        self.layout = layout
        # Models are then stages of a pipeline, which sets values and calls the model's blocks itself.
        self._is_pipeline_stage = layout.pp > 1
        self.name = format_sizes(dict.fromkeys(layout.sizes)) if layout.sizes else self.name
        self._options = options
        self._number_format = number_format
        axis_options = AxisOptions(
            layout=layout,
            sharding=options,
            tensor=tensor or TensorParallelOptions(),
            context=context or TorchContextParallelConfig(),
            number_format=number_format,
            float8=float8,
        )
        axes = load_axes(axis_options)
        meshes = build_mesh(collectives.runtime.device.type, layout)
        self.mesh = meshes.mesh
        self._all_ranks = collectives
        if self._is_pipeline_stage:
            self.everyone = collectives.split(layout.stages)
        elif layout.num_data_shards < layout.num_ranks:
            self.data_group = collectives.split(layout.data_groups)
        self.data_shard = ShardIndex(layout.find_data_index(collectives.rank), layout.num_data_shards)
        # Along cp each rank has one term of the gradient, as along the data-parallel axes.
        self.gradient_divisor = layout.num_data_shards * layout.cp
        self._prepared: list[ShardedModel] = []
        self._replaced = ReplacedParameters(lambda: self._models)
        self.sharder = ModelSharder(
            axis_options,
            axes,
            meshes,
            all_ranks=collectives,
            everyone=self.everyone,
            replaced=self._replaced,
            strategy_name=self.name,
            compute_device_type=device_type or collectives.runtime.device.type,
        )
        self._comm_hooks = fsdp_collectives.CommHooks(collectives)
        # Updates of optimizers that need full matrices. None before the first of them is prepared.
        self._updates: FullParameterUpdates | None = None
        self._num_steps = 0  # calls of `step_optimizer`
        self._has_ended = False  # whether the process group has ended
        collectives.runtime.scope.get_or_create(FullScalars).register_handler(collectives.runtime)
        process.release_at_end(self._end_group, ends_with_group=True)
        scope.get_or_create(tracebacks.ExceptionHook).add_note(explain_error)

    def _end_group(self) -> None:
        """Release all models when the process group ends, because the device mesh becomes invalid with it."""
        self.release_model()
        self._has_ended = True

    @property
    def _models(self) -> list[torch.nn.Module]:
        return [each.model for each in self._prepared]

    # ---------------------------------------------------------------- setting up

    def materialize_model(self, model: torch.nn.Module) -> None:
        """Raise an error if a module on the meta device cannot initialize its parameters and buffers.

        `setup_model` initializes them later, one unit at a time. Tensors recorded by `expect_values` are not checked.

        Raises:
            PrepareError: If a module cannot initialize its tensors. The message names all such modules.
        """
        check_initializers(model, self._expected_names)

    def announce_models(self, models: Iterable[torch.nn.Module]) -> None:
        """Note models that will be prepared. Sharding options may name modules and methods of any of them."""
        self.sharder.announce_models(models)

    def move_model(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing, because `setup_model` moves the model to the device, one unit at a time."""

    def setup_model(
        self,
        model: torch.nn.Module,
        transforms: Iterable[Transform] = (),
        other_stage_ids: Container[int] = (),
        context_parallel: Any = None,
    ) -> Engine | None:
        """Broadcast rank 0's values, apply the transforms, and shard the model. Parameter names do not change.

        A model that was sharded in this way before, and then released, is registered again without these steps.

        Args:
            model: The user's own model.
            transforms: Functions to apply to the model before it is sharded.
            other_stage_ids: IDs of parameters and buffers that are empty because they belong to other stages of a pipeline.
            context_parallel: Return value of `ModelSharder.split_sequences` for the model. If None, and the layout has context
                parallelism, it is called here.

        Returns:
            The context-parallel wrapper that is called in place of the model, or None without context parallelism.

        Raises:
            PrepareError: If the model cannot be sharded, or was sharded in another way.
            ConfigError: If the options name modules that the model does not contain.
            StateError: If the process group of the mesh has ended.
        """
        if self._has_ended:
            raise StateError(describe_ended_groups(self.layout))
        sharded_model = self.sharder.shard_model(
            model, transforms, self._expected_names, other_stage_ids, context_parallel
        )
        self._prepared.append(sharded_model)
        self._replaced.forget_gathered()
        self._comm_hooks.install_hooks(model)
        engine: Engine | None = sharded_model.context_parallel
        return engine

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an error if an optimizer cannot step on shards, unless full parameters can be gathered for its steps.

        Raises:
            UnsupportedError: If the optimizer cannot train the sharded model.
        """
        warn_of_own_state_dict(optimizer)
        if not self._is_pipeline_stage and self._options.whole_updates is not False:
            updates = self._updates
            if updates is None:
                create_updates = extensions.load("feature", "whole_updates")
                updates = self._updates = create_updates(self.everyone, bool(self._options.whole_updates))
            if updates.take_over(optimizer):
                return
        check_optimizer(optimizer)
        check_sizes(optimizer, self.find_current)

    def call_optimizer(self, optimizer: torch.optim.Optimizer, method: str) -> None:
        """Call an optimizer method, such as "train" or "eval", that changes parameters.

        If the optimizer needs full parameters, they are gathered for the call.
        """
        updates = self._updates
        if updates is not None and updates.keeps_whole_state(optimizer) and hasattr(optimizer, method):
            updates.call_optimizer(optimizer, method)
        else:
            super().call_optimizer(optimizer, method)

    def keeps_whole_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer keeps unsharded states.

        The state of each parameter is then on the one rank that updates the parameter.
        """
        return self._updates is not None and self._updates.keeps_whole_state(optimizer)

    def expose_state(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Return a context in which an optimizer has the states of all parameters.

        This includes states that only other ranks keep.
        """
        return nullcontext() if self._updates is None else self._updates.expose_state(optimizer)

    def find_current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the shard that has replaced a parameter, or the parameter itself if it was not replaced."""
        return self._replaced.get_current(parameter)

    def shard_like(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a full tensor, as a DTensor that is sharded like the parameter.

        The tensor is returned unchanged if it is a DTensor already, or if the parameter is not sharded.
        """
        return dtensors.shard_like(tensor, parameter)

    def free_gathered(self, model: torch.nn.Module) -> None:
        """Free gathered parameters, so that the model's parameters are the shards.

        FSDP keeps the root's parameters gathered after a forward until its backward, but not every forward has one.
        """
        fsdp_state.reshard_units(model)

    # ---------------------------------------------------------------- micro-batches

    def micro_batch_context(self, model: torch.nn.Module, sync: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch.

        If `sync` is False, each rank keeps its gradients unsharded and unreduced.
        """
        return nullcontext() if sync or not isinstance(model, fsdp.FSDPModule) else fsdp_state.defer_reduction(model)

    def unshard_loss(self, loss: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
        """Return a loss that is computed from parameters alone as a plain tensor, with a factor equal on all ranks.

        Any other loss is returned unchanged, with its factor.

        Raises:
            LossError: If the loss adds plain tensors to sharded parameters.
        """
        if not dtensors.is_from_parameters(loss):
            return loss, factor
        full_loss: torch.Tensor = loss.full_tensor()  # type: ignore[attr-defined]
        return full_loss, self.data_group.reduce_numbers([factor])[0] / self.gradient_divisor

    def must_join_backward(self) -> bool:
        """Whether the backward of other ranks waits for this rank's backward.

        True if ranks train on different data, because they gather parameters and reduce gradients together in backward.
        """
        return self.data_shard.count > 1 and bool(self._models)

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Accumulate the gradient of `loss * factor`, and record which parameters the loss used.

        Args:
            loss: Loss of the micro-batch.
            factor: Factor for the gradient.
            precision: Precision of the run, which scales the loss if it has a gradient scaler.
            **kwargs: Further arguments of `torch.autograd.backward`.

        Raises:
            LossError: If the loss is a constant while other ranks wait for this rank's gradients.
        """
        with ExitStack() as stack:
            for each in self._prepared:
                each.usage.watch_backward()
                if each.context_parallel is not None:
                    stack.enter_context(each.context_parallel.backward_context())
                if each.second_order.has_graph:
                    stack.enter_context(each.second_order.keep_gathered())
            super().backward(loss, factor, precision, **kwargs)

    def expect_backward(self, models: Iterable[torch.nn.Module]) -> None:
        """Prepare for another backward in the accumulation window.

        The parameters that this backward uses are added to the record of used parameters.
        """
        for each in self._prepared:
            each.usage.expect_backward()

    @contextmanager
    def silence_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Return a context in which backward produces zero gradients for `parameters`.

        The context puts hooks on the gathered parameters that autograd sees, because hooks on FSDP's shards would
        never run. Distributed experts get no hook, because their gradients also include contributions of other
        ranks' tokens. Instead, this rank sends zero gradients to the experts that have processed its tokens.
        """
        with ExitStack() as stack:
            stack.enter_context(super().silence_gradients(parameters))
            for each in self._prepared:
                for split in each.splits:
                    stack.enter_context(split.silence_gradients())
                for record in fsdp_state.iterate_records(each.model):
                    gathered = fsdp_state.get_gathered_parameter(record)
                    is_distributed = "ep" in record.sharded_param.device_mesh.mesh_dim_names
                    if gathered is not None and gathered.requires_grad and not is_distributed:
                        stack.callback(gathered.register_hook(torch.zeros_like).remove)  # type: ignore[no-untyped-call]
            yield

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Discard the gradients of `parameters`, and free parameters that a failed forward has left gathered.

        Unsharded gradients that wait for the end of the accumulation window are discarded, too.

        Raises:
            UnsupportedError: If this version of torch cannot free the gathered parameters.
        """
        super().drop_gradients([self.find_current(p) for p in parameters])  # type: ignore[misc]
        for each in self._prepared:
            fsdp_state.discard_gradients(each.model)
            each.usage.discard_window()

    def stash_gradients(self, parameters: Iterable[torch.Tensor]) -> StashedGradients:
        """Remove the gradients of `parameters`, so that `restore_gradients` can restore them later.

        Unsharded gradients that wait for the end of the accumulation window are removed, too.

        Returns:
            Value for `restore_gradients`: the gradients, and a copy of the record of used parameters.
        """
        parameters = list(parameters)
        unreduced: list[fsdp_state.UnreducedGradients] = []
        usage: list[tuple[ParameterUsage, Any]] = []
        for each in self._prepared:
            removed = fsdp_state.remove_unreduced_gradients(each.model, parameters)
            if removed:
                unreduced += removed
                usage.append((each.usage, each.usage.snapshot()))
        return StashedGradients(super().stash_gradients(parameters), unreduced, usage)

    def restore_gradients(self, stash: StashedGradients) -> None:
        """Restore the gradients that `stash_gradients` removed, including the unsharded ones that FSDP stores."""
        super().restore_gradients(stash.reduced)
        fsdp_state.restore_unreduced_gradients(stash.unreduced)
        for usage, state in stash.usage:
            usage.restore(state)

    # ---------------------------------------------------------------- a batch that is run again

    def clean_up_failure(self) -> None:
        """Free gathered parameters, communication buffers and unsharded gradients of a failed forward or backward.

        Raises:
            UnsupportedError: If this version of torch cannot free the gathered parameters.
        """
        for model in self._models:
            fsdp_state.prepare_to_gather(model)
            fsdp_state.discard_gradients(model)

    def list_members(self, step: RecordedCollective) -> Sequence[int]:
        """Return the ranks that take part in a collective of an FSDP unit or of a process group.

        Args:
            step: Collective, as recorded in the `CollectiveLog`.
        """
        if step.group != fsdp_collectives.LOG_NAME:
            return super().list_members(step)
        return self._comm_hooks.get_unit(step).list_ranks(step.operation)

    def join_collective(self, step: RecordedCollective) -> None:
        """Join a collective of other ranks with this rank's shards, or with zeros as gradients.

        Args:
            step: Collective, as recorded in the `CollectiveLog`.

        Raises:
            CollectiveError: If any value would change the result, or if the collective is none of this strategy's.
        """
        if step.group != fsdp_collectives.LOG_NAME:
            super().join_collective(step)
        else:
            self._comm_hooks.get_unit(step).join_with_neutral_values(
                step.operation, step.values[fsdp_collectives.NUM_KEY_VALUES :]
            )

    def snapshot(self) -> Any:
        """Return a copy of the record of parameters that the accumulation window has used so far."""
        return [(each.usage, each.usage.snapshot()) for each in self._prepared]

    def restore(self, snapshot: Any) -> None:
        """Restore the record of used parameters from a snapshot.

        Gathered parameters are freed, and pending collectives are dropped.
        """
        self.clean_up_failure()
        for usage, state in snapshot:
            usage.restore(state)

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Average the gradients of scalars, remove the gradients of parameters that no rank used, and broadcast buffers.

        The gradients of sharded parameters were already reduced in backward, except in a pipeline, where they are reduced
        here. Rank 0's buffers are broadcast, unless the options disable it or the model is in evaluation mode.

        Raises:
            StateError: If a rank used fewer parameters than at the first update (see `ParameterUsage.remove_unused_gradients`).
            PrepareError: If gradients that must be equal on all ranks of a mesh axis differ.
        """
        for each in self._prepared:
            if not self._is_pipeline_stage:
                each.usage.remove_unused_gradients()
            elif self.sharder.is_sharded:
                fsdp_state.reduce_accumulated_gradients(each.model, self.everyone)
        for each in self._prepared:
            for split in each.splits:
                split.check_gradients(self._all_ranks)
            if self._options.broadcast_buffers and each.model.training:
                buffers = [buffer for buffer in each.model.buffers() if buffer.numel() and not buffer.is_meta]
                self.everyone.broadcast_in_place(buffers)
        # After `check_gradients`, because averages would hide differences between the ranks of tensor parallelism.
        # By ID, because models can share a scalar, whose gradient must be averaged only once.
        scalars = {id(p): p for each in self._prepared for _, p in each.scalars if p.requires_grad}
        if scalars:
            average_gradients(list(scalars.values()), self.everyone)

    def end_forward(self, model: torch.nn.Module, output: Any) -> Any:
        """Run the post-forward work that a model skipped because a pipeline stage ended its forward early.

        Restore parameters that tensor parallelism replaced during the forward, and run FSDP's post-forward hooks.

        Args:
            model: Prepared model.
            output: Output of the stage's last block.

        Returns:
            The output, as FSDP's hooks return it.
        """
        for each in self._prepared:
            if each.model is model:
                for split in each.splits:
                    split.end_forward()
        return fsdp_state.run_post_forward(model, output) if self.sharder.is_sharded else output

    # ---------------------------------------------------------------- final gradients

    def list_replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return pairs of (name, parameter) for the scalars of the models, except those that are DTensors (under "tp").

        Changes of DTensors are found by `find_changed_shards`.
        """
        return [pair for each in self._prepared for pair in each.scalars if not is_dtensor(pair[1])]

    def find_changed_shards(self) -> tuple[list[str], list[int]]:
        """Return which shards user code has changed in place since the last call.

        Returns:
            Names of the changed parameters, and for every parameter the number by which an optimizer step increases its
                version counter.
        """
        changed: list[str] = []
        increases: list[int] = []
        for each in self._prepared:
            names, increases_per_step = each.writes.find_changed()
            changed += names
            increases += increases_per_step
        return changed, increases

    def get_local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's shards of the existing gradients of `parameters`."""
        return dtensors.get_local_gradients(map(self.find_current, parameters))

    def compute_total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of all gradients over all ranks.

        Each element counts once, even if several ranks hold copies of it.
        """
        return compute_total_norm(map(self.find_current, parameters), norm_type, self.everyone)

    def count_holders(self, parameter: torch.Tensor) -> int:
        """Return the number of ranks that store each element of this rank's shard of a parameter."""
        return count_copies(parameter, self.everyone.world_size)

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None
    ) -> bool:
        """Step the optimizer on the shards. Return False if the gradient scaler (fp16) skipped the update.

        Before the first step, the dtypes of parameters and gradients are checked. Before the steps number 1, 2, 4, 8 and so on,
        hooks and writes of the script that were lost are searched for.

        Args:
            optimizer: torch's own optimizer.
            precision: Precision of the run. Its gradient scaler can skip the step.
            closure: Closure as for a torch optimizer, or None.

        Raises:
            StateError: If a dtype was changed after prepare(), or if a hook or write of the script was lost.
        """
        if not self._num_steps:
            for each in self._prepared:
                check_formats(each.model, each.dtypes)
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) == 0:  # 1, 2, 4, 8 ...
            for each in self._prepared:
                each.lost_writes.check()
        # Function that steps an optimizer on full parameters; None if this optimizer steps on shards.
        run_step = None if self._updates is None else self._updates.find_step(optimizer, closure)
        if run_step is not None and closure is not None:
            # Optimizers call the closure at the start of their step. While `run_step` executes the step, however, the
            # optimizer's parameters are not those of the model, so the closure is called here.
            closure()
            closure = None
        for each in self._prepared:
            each.reshard()  # copies gathered since backward would be outdated after the update
            each.writes.begin_step()
        did_step = precision.step(optimizer, closure, run_step)
        for each in self._prepared:
            each.writes.end_step(did_step)
        if did_step and self._number_format == "fp8":
            compute_float8_scales(self._models)
        return did_step

    def apply_loaded_values(self) -> None:
        """Recompute the scales of float8 weights after a load, and restart the detection of in-place changes."""
        for each in self._prepared:
            each.writes.record_versions()
        if self._number_format == "fp8":
            compute_float8_scales(self._models)

    # ---------------------------------------------------------------- release

    def release_model(self, model: torch.nn.Module | None = None) -> None:
        """Release a prepared model, or all models if `model` is None. A released model can be prepared again.

        Parameters stay sharded, because the full model might not fit into memory.
        """
        super().release_model()
        released = [each for each in self._prepared if model is None or each.model is model]
        for each in released:
            each.release()
            self._comm_hooks.remove_units(each.model)
        self._prepared = [each for each in self._prepared if each not in released]
        self._replaced.forget_released()
        self._num_steps = 0

    # ---------------------------------------------------------------- state

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield pairs of (name, tensor) for the model's tensors, with the names of the unwrapped module.

        Sharded tensors are DTensors.
        """
        self.free_gathered(model)
        yield from super().export_state(model)
