"""Sharded layouts on torch's FSDP2 and DTensor: a device mesh with named axes along which parameters are DTensors.

FSDP2 (`fully_shard`) shards each parameter along its first dimension over the axis "shard". It gathers a unit's
parameters before its forward and its backward, and reduces gradients to shards again. HSDP adds the axis
"replicate". Sharding has consequences: optimizers step on the parameters that `find_current` returns, norms need a
collective (`dtensors.py`), and all ranks of the mesh must run a model together.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headway.common import scope, tracebacks
from headway.common.optional import LazyModule
from headway.common.text import join_names
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
from headway.core.strategies.fully_sharded import dtensors, fsdp_collectives, fsdp_state, units
from headway.core.strategies.fully_sharded.axes import AxisOptions, ModelAxis
from headway.core.strategies.fully_sharded.checks import (
    LostWrites,
    ParameterUsage,
    check_hooks,
    check_optimizer,
    check_sizes,
    warn_of_own_state_dict,
)
from headway.core.strategies.fully_sharded.sharded_model import ShardedModel
from headway.core.strategies.fully_sharded.values import MissingValues, check_initializers
from headway.core.strategies.sharding_records import ReplacedParameters, ShardedModels, ShardedStages
from headway.errors import PrepareError, StateError
from headway.log import get_logger

fsdp = LazyModule("torch.distributed.fsdp")
log = get_logger(__name__)

_MODEL_AXES = ("cp", "tp", "ep")
"""Axes that split models, in the order in which they are applied."""
_CONTAINERS = (torch.nn.ModuleDict, torch.nn.ModuleList)
_CONTAINER = (
    "{name} has no forward, and strategy={strategy!r} gathers parameters when a model is called. Write a module that contains "
    "these modules and calls them in its forward, and prepare that; or prepare each of them by itself"
)
_SHARED = (
    "{name} shares trainable parameters ({keys}) with a model that is sharded already. With strategy={strategy!r} each prepared "
    "model is sharded by itself, and a shared parameter would become two. Put both models into one module whose forward calls "
    "them, and prepare that; or use strategy='ddp'"
)


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
        is_sharded: Whether FSDP manages the parameters.

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
        self.is_sharded = layout.replicate * layout.num_shards > 1
        self.name = format_sizes(dict.fromkeys(layout.sizes)) if layout.sizes else self.name
        self._options = options
        self._number_format = number_format
        self._tensor = tensor or TensorParallelOptions()
        axis_options = AxisOptions(
            layout=layout,
            sharding=options,
            tensor=self._tensor,
            context=context or TorchContextParallelConfig(),
            number_format=number_format,
            float8=float8,
        )
        axes: dict[str, ModelAxis] = {
            word: extensions.load("axis", word)(axis_options) for word in _MODEL_AXES if getattr(layout, word) > 1
        }
        self._sequence_axis = axes.pop("cp", None)
        self._axes = list(axes.values())
        self._float8 = float8
        self._computes_on = device_type or collectives.runtime.device.type
        self.mesh, self._sharding_mesh, self._expert_mesh = build_mesh(collectives.runtime.device.type, layout)
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
        self._comm_hooks = fsdp_collectives.CommHooks(collectives)
        self._updates: Any = None
        self._num_steps = 0
        self._has_ended = False
        collectives.runtime.scope.get_or_create(dtensors.FullScalars).register_handler(collectives.runtime)
        process.release_at_end(self._end_group, ends_with_group=True)
        scope.get_or_create(tracebacks.ExceptionHook).add_note(dtensors.explain_error)

    def _end_group(self) -> None:
        """Release all models when the process group ends, because the device mesh becomes invalid with it."""
        self.release_model()
        self._has_ended = True

    @property
    def _is_pipeline_stage(self) -> bool:
        """Whether models are stages of a pipeline, which sets values and calls the model's blocks itself."""
        return self.layout.pp > 1

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
            context_parallel: Return value of `split_sequences` for the model. If None, and the layout has context parallelism,
                `split_sequences` is called.

        Returns:
            The context-parallel wrapper that is called in place of the model, or None without context parallelism.

        Raises:
            PrepareError: If the model cannot be sharded, or was sharded in another way.
            ConfigError: If the options name modules that the model does not contain.
            StateError: If the process group of the mesh has ended.
        """
        if self._has_ended:
            raise StateError(describe_ended_groups(self.layout))
        sharded_model = ShardedModel(model, context_parallel or self.split_sequences(model))
        try:
            self._shard_once(sharded_model, transforms, other_stage_ids)
        except BaseException:
            sharded_model.release_splits()
            raise
        sharded_model.attach_detectors(self.everyone, self._options, self._is_pipeline_stage)
        self._prepared.append(sharded_model)
        self._replaced.forget_gathered()
        self._comm_hooks.install_hooks(model)
        engine: Engine | None = sharded_model.context_parallel
        return engine

    def split_sequences(self, model: torch.nn.Module) -> Any:
        """Set up context parallelism for a model, before its transforms are applied.

        Returns:
            The wrapper that splits the model's sequences, or None if the layout has no context parallelism.
        """
        return (
            None if self._sequence_axis is None else self._sequence_axis.split_model(model, self.mesh, self._all_ranks)
        )

    def _shard_once(
        self, sharded_model: ShardedModel, transforms: Iterable[Transform], other_stage_ids: Container[int]
    ) -> None:
        """Shard the model and record how, or only enable its splits again if it was sharded in this way before.

        Args:
            sharded_model: Model, whose `splits` and `lost_writes` are set here.
            transforms: Functions to apply to the model before it is sharded.
            other_stage_ids: IDs of parameters and buffers that are empty because they belong to other stages of a pipeline.

        Raises:
            PrepareError: If the model cannot be sharded, or was sharded in another way.
        """
        model = sharded_model.model
        records = self.everyone.runtime.scope.get_or_create(ShardedStages if self._is_pipeline_stage else ShardedModels)
        settings = (self.layout, self._options, f"mixed_precision={self._number_format!r}", self._tensor)
        split_references = records.find_record(model, settings)
        if split_references is not None:
            earlier_splits = [reference() for reference in split_references]
            sharded_model.splits = [split for split in earlier_splits if split is not None]
            for split in sharded_model.splits:
                split.resume()
            fsdp_state.reshard_units(model)  # a forward since the release has left the root's parameters gathered
            sharded_model.lost_writes = LostWrites(
                model, [], type(model).__name__
            )  # this time no parameter is replaced
            return
        check_hooks(model)
        name, before = type(model).__name__, list(model.named_parameters(remove_duplicate=False))
        # A frozen parameter keeps its value in both models. A trainable one would be updated in one of them only.
        shared = [key for key, p in before if p.requires_grad and self._replaced.get_current(p) is not p]
        if shared:
            raise PrepareError(_SHARED.format(name=name, keys=join_names(shared), strategy=self.name))
        self._split_and_shard(sharded_model, transforms, other_stage_ids)
        # Weak references, because the splits refer to the model. Its hooks keep alive the splits that are resumed later.
        records.record_model(model, settings, [weakref.ref(split) for split in sharded_model.splits])
        after = dict(model.named_parameters(remove_duplicate=False))
        replaced = [(key, parameter) for key, parameter in before if after[key] is not parameter]
        self._replaced.record_pairs((parameter, after[key]) for key, parameter in replaced)
        sharded_model.lost_writes = LostWrites(model, replaced, name)

    def check_shardable(self, model: torch.nn.Module) -> None:
        """Raise an error if the model cannot be sharded. Nothing is changed.

        Args:
            model: The user's own model.

        Raises:
            PrepareError: If the model cannot be sharded. The message names the modules or parameters.
            ConfigError: If the options name modules that the model does not contain.
        """
        if self.is_sharded:
            if isinstance(model, _CONTAINERS) and type(model).forward is torch.nn.Module.forward:
                raise PrepareError(_CONTAINER.format(name=type(model).__name__, strategy=self.name))
            units.find_units(model, self._options)
            units.check_sizes(model)
        units.check_unsharded(model)

    def broadcast_values(self, model: torch.nn.Module, expected: Set[str]) -> MissingValues:
        """Broadcast rank 0's values to all ranks, and return an object for the values that are still missing.

        Args:
            model: The user's own model, for which `check_shardable` has raised no error.
            expected: Names of tensors whose values are read from files afterwards.

        Returns:
            Object that fills in the missing values after the model is sharded.
        """
        return MissingValues(model, self._all_ranks, expected)

    def _split_and_shard(
        self, sharded_model: ShardedModel, transforms: Iterable[Transform], other_stage_ids: Container[int]
    ) -> None:
        """Broadcast rank 0's values, split the model along mesh axes, apply the transforms, and shard it with FSDP.

        In a pipeline, the values are set by the pipeline, and are not broadcast here.

        Args:
            sharded_model: Model, whose `splits` are set here.
            transforms: Functions to apply to the model before it is sharded.
            other_stage_ids: IDs of parameters and buffers that are empty because they belong to other stages of a pipeline.
        """
        model = sharded_model.model
        missing = None
        if not self._is_pipeline_stage:
            self.check_shardable(model)
            missing = self.broadcast_values(model, self._expected_names)
        for axis in self._axes:
            sharded_model.splits.append(axis.split_model(model, self.mesh, self._all_ranks, other_stage_ids))
        distributed = [module for split in sharded_model.splits for module in split.distributed]
        super().setup_model(model, transforms)
        if not self.is_sharded:
            if missing is not None:
                missing.fill(model, ())
            units.move_buffers(model, self.everyone.runtime.device)
            return
        num_wrapped = 0
        if not self._is_pipeline_stage:  # a stage gathers weights once per window, and keeps them in half precision
            num_wrapped = units.wrap_float8_weights(model, self._float8, self._options, self.layout.num_shards)
        chosen = units.find_units(model, self._options)
        if chosen.divided_blocks:
            log.info(
                "%s share parameters with modules outside them; their submodules that share none are gathered one by one, and the "
                "shared parameters with the root",
                ", ".join(chosen.divided_blocks),
            )
        sharded_modules = self._shard_units(model, chosen, other_stage_ids, distributed)
        if num_wrapped:
            # Compute all scales in one collective when a forward of the sharded model begins.
            model.register_forward_pre_hook(lambda model, args: units.compute_float8_scales([model]), prepend=True)
        if missing is not None:
            missing.fill(model, sharded_modules)

    def _shard_units(
        self,
        model: torch.nn.Module,
        chosen: units.ShardingUnits,
        other_stage_ids: Container[int],
        distributed: Sequence[Any],
    ) -> list[torch.nn.Module]:
        """Apply FSDP2 to the distributed modules, the float32 norms, the units and the root, and configure what FSDP2 does with them.

        This also sets the prefetching, the reduction of gradients of unused parameters, and the methods besides `forward` that
        gather parameters.

        Args:
            model: Model to shard.
            chosen: Modules that become units, and parameters that stay unsharded.
            other_stage_ids: IDs of parameters and buffers that are empty because they belong to other stages of a pipeline.
            distributed: Modules with different parameters on each rank of "ep", such as experts. They are sharded over the
                expert mesh.

        Returns:
            Float32 norms that are sharded separately, then the units on this rank, innermost first. The root is not included.
        """
        options, runtime_device_type = self._options, self.everyone.runtime.device.type
        dtypes = units.choose_formats(options, self._number_format, self._computes_on)
        if dtypes.message:
            log.info_once("%s", dtypes.message)
        offload = fsdp.CPUOffloadPolicy(pin_memory=runtime_device_type != "cpu")
        fsdp_arguments: dict[str, Any] = {
            "offload_policy": offload if options.cpu_offload else fsdp.OffloadPolicy(),
            "ignored_params": {*chosen.ignored, *(p for p in model.parameters() if id(p) in other_stage_ids)} or None,
        }
        is_stage = self._is_pipeline_stage
        reshard = False if is_stage else options.reshard_after_forward
        # A number of ranks applies to the units only. The root and the experts use torch's default then.
        root_reshard = reshard if isinstance(reshard, bool) else None
        for module in distributed:  # along "ep" each rank has different experts
            fsdp.fully_shard(
                module,
                mesh=self._expert_mesh,
                reshard_after_forward=root_reshard,
                mp_policy=dtypes.blocks,
                **fsdp_arguments,
            )
        fsdp_arguments["mesh"] = self._sharding_mesh
        modules = units.list_local_units(model, chosen.modules, other_stage_ids)
        norms = list(units.iterate_float32_norms(modules, dtypes))
        for norm in norms:
            fsdp.fully_shard(norm, reshard_after_forward=reshard, mp_policy=dtypes.root, **fsdp_arguments)
        for unit in (unit for unit in modules if not any(unit is module for module in distributed)):
            fsdp.fully_shard(unit, reshard_after_forward=reshard, mp_policy=dtypes.blocks, **fsdp_arguments)
        fsdp.fully_shard(model, reshard_after_forward=root_reshard, mp_policy=dtypes.root, **fsdp_arguments)
        if is_stage:
            fsdp_state.defer_gradients(model)
        else:
            fsdp_state.reduce_unused_parameters(model)
        unit_ids = set(map(id, modules))
        fsdp_state.set_prefetching([module for module in model.modules() if id(module) in unit_ids], options)
        generation = [] if is_stage else fsdp_state.list_generation_methods(model)
        fsdp_state.add_forward_methods(model, dict.fromkeys((*options.forward_methods, *generation)))
        return [*norms, *modules]

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise an error if an optimizer cannot step on shards, unless full parameters can be gathered for its steps.

        Raises:
            UnsupportedError: If the optimizer cannot train the sharded model.
        """
        warn_of_own_state_dict(optimizer)
        if not self._is_pipeline_stage and self._options.whole_updates is not False:
            if self._updates is None:
                create_updates = extensions.load("feature", "whole_updates")
                self._updates = create_updates(self.everyone, bool(self._options.whole_updates))
            if self._updates.take_over(optimizer):
                return
        check_optimizer(optimizer)
        check_sizes(optimizer, self.find_current)

    def call_optimizer(self, optimizer: torch.optim.Optimizer, method: str) -> None:
        """Call an optimizer method, such as "train" or "eval", that changes parameters.

        If the optimizer needs full parameters, they are gathered for the call.
        """
        if hasattr(optimizer, method) and self.keeps_whole_state(optimizer):
            self._updates.call(optimizer, method)
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
        """Accumulate the gradient of `loss * factor`, and record which parameters the loss used."""
        with ExitStack() as stack:
            for each in self._prepared:
                each.usage.watch_backward()
                if each.context_parallel is not None:
                    stack.enter_context(each.context_parallel.backward_context())
                stack.enter_context(each.second_order.backward())
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
        """Remove the gradients of parameters that no rank used, and broadcast rank 0's buffers.

        Gradients were already reduced in backward, except in a pipeline, where they are reduced here. Buffers are not
        broadcast if the options disable it, or if the model is in evaluation mode.

        Raises:
            StateError: If a rank used fewer parameters than at the first update (see `ParameterUsage.remove_unused_gradients`).
            PrepareError: If gradients that must be equal on all ranks of a mesh axis differ.
        """
        for each in self._prepared:
            if not self._is_pipeline_stage:
                each.usage.remove_unused_gradients()
            elif self.is_sharded:
                fsdp_state.reduce_accumulated_gradients(each.model, self.everyone)
        for each in self._prepared:
            for split in each.splits:
                split.check_gradients(self._all_ranks)
            if self._options.broadcast_buffers and each.model.training:
                buffers = [buffer for buffer in each.model.buffers() if buffer.numel() and not buffer.is_meta]
                self.everyone.broadcast_in_place(buffers)

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
            for split in each.splits if each.model is model else ():
                split.end_forward()
        return fsdp_state.run_post_forward(model, output) if self.is_sharded else output

    # ---------------------------------------------------------------- final gradients

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
        return dtensors.compute_total_norm(map(self.find_current, parameters), norm_type, self.everyone)

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None
    ) -> bool:
        """Step the optimizer on the shards. Return False if the gradient scaler (fp16) skipped the update.

        Before the first step, the dtypes of parameters and gradients are checked. Before the steps number 1, 2, 4, 8
        and so on, hooks and writes of the script that were lost are searched for.

        Raises:
            StateError: If a dtype was changed after prepare(), or if a hook or write of the script was lost.
        """
        if not self._num_steps:
            for each in self._prepared:
                units.check_formats(each.model, each.dtypes)
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) == 0:  # 1, 2, 4, 8 ...
            for each in self._prepared:
                if each.lost_writes is not None:
                    each.lost_writes.check()
        # Function that steps an optimizer on full parameters; None if this optimizer steps on shards.
        run_step = None if self._updates is None else self._updates.find_step(optimizer, closure)
        if run_step is not None and closure is not None:
            # Optimizers call the closure at the start of their step. While `run_step` executes the step, however, the
            # optimizer's parameters are not those of the model, so the closure is called here.
            closure()
            closure = None
        for model in self._models:  # copies gathered since backward would be outdated after the update
            fsdp_state.reshard_units(model)
        for each in self._prepared:
            each.writes.begin_step()
        did_step = precision.step(optimizer, closure, run_step)
        for each in self._prepared:
            each.writes.end_step(did_step)
        if did_step and self._number_format == "fp8":
            units.compute_float8_scales(self._models)
        return did_step

    def apply_loaded_values(self) -> None:
        """Recompute the scales of float8 weights after a load, and restart the detection of in-place changes."""
        for each in self._prepared:
            each.writes.record_versions()
        if self._number_format == "fp8":
            units.compute_float8_scales(self._models)

    # ---------------------------------------------------------------- release

    def release_model(self, model: torch.nn.Module | None = None) -> None:
        """Release a prepared model, or all models if `model` is None. A released model can be prepared again.

        Parameters stay sharded, because the full model might not fit into memory.
        """
        super().release_model()
        released = [each for each in self._prepared if model is None or each.model is model]
        for each in released:
            each.release_splits()
            fsdp_state.reshard_units(each.model)
            self._comm_hooks.remove_units(each.model)
            each.usage.release()
            each.second_order.release()
            if each.free_hook is not None:
                each.free_hook.remove()
        self._prepared = [each for each in self._prepared if each not in released]
        self._replaced.forget_released()
        self._num_steps = 0

    # ---------------------------------------------------------------- state

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield pairs of (name, tensor) for the model's tensors, with the names of the unwrapped module.

        Sharded tensors are DTensors.
        """
        self.free_gathered(model)
        yield from super().export_state(model)
