"""Steps that turn a user's model into a `ShardedModel`: checks, initial values, splits along mesh axes, and FSDP."""

import weakref
from collections.abc import Container, Iterable, Set
from typing import Any

import torch

from headway.common.text import join_names
from headway.core import extensions
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.moving import move_parameter
from headway.core.strategies.base import Transform
from headway.core.strategies.device_mesh import LayoutMesh
from headway.core.strategies.fully_sharded import fsdp_state, units
from headway.core.strategies.fully_sharded.apply_fsdp import UnitSharder
from headway.core.strategies.fully_sharded.axes import AxisOptions, ModelAxis, SplitModel
from headway.core.strategies.fully_sharded.float8_weights import compute_float8_scales, wrap_float8_weights
from headway.core.strategies.fully_sharded.lost_writes import LostWrites, check_hooks
from headway.core.strategies.fully_sharded.sharded_model import ShardedModel, release_splits
from headway.core.strategies.fully_sharded.values import MissingValues
from headway.core.strategies.sharding_records import ReplacedParameters, ShardedModels, ShardedStages
from headway.core.weights.pieces import is_dtensor
from headway.errors import PrepareError
from headway.log import get_logger

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
_DIVIDED = (
    "%s share parameters with modules outside them; their submodules that share none are gathered one by one, and the shared "
    "parameters with the root"
)


def load_axes(options: AxisOptions) -> dict[str, ModelAxis]:
    """Return the mesh axes of the layout that split models, by name.

    Raises:
        UnsupportedError: If an axis of the layout cannot be combined with the options.
    """
    return {name: extensions.load("axis", name)(options) for name in _MODEL_AXES if getattr(options.layout, name) > 1}


class ModelSharder:
    """Part of `MeshStrategy` that shards models, and resumes the sharding of models that were released.

    Args:
        options: Settings of the run.
        axes: Mesh axes that split models, by name, from `load_axes`.
        meshes: Device mesh of the run, with its submeshes.
        all_ranks: Collectives over all ranks of the run.
        everyone: Collectives over all ranks that hold the same models: in a pipeline, the same stages.
        replaced: Record of the parameters that sharding has replaced.
        strategy_name: Name of the strategy in messages.
        compute_device_type: Device type for which number formats are chosen.

    Attributes:
        is_sharded: Whether FSDP manages the parameters. False if the layout has only axes such as "tp".
    """

    def __init__(
        self,
        options: AxisOptions,
        axes: dict[str, ModelAxis],
        meshes: LayoutMesh,
        *,
        all_ranks: Collectives,
        everyone: Collectives,
        replaced: ReplacedParameters,
        strategy_name: str,
        compute_device_type: str,
    ) -> None:
        layout = options.layout
        self.is_sharded = layout.replicate * layout.num_shards > 1
        # Models are then stages of a pipeline, which sets values and calls the model's blocks itself.
        self._is_stage = layout.pp > 1
        self._options = options
        self._sequence_axis = axes.get("cp")
        self._parameter_axes = [axis for name, axis in axes.items() if name != "cp"]
        self._mesh = meshes.mesh
        self._all_ranks = all_ranks
        self._everyone = everyone
        self._replaced = replaced
        self._strategy_name = strategy_name
        self._device = all_ranks.runtime.device
        # All models of the Accelerator that are known so far. The options may name modules of any of them.
        self._announced: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._unit_sharder = UnitSharder(options, meshes, compute_device_type, self._device.type)

    def announce_models(self, models: Iterable[torch.nn.Module]) -> None:
        """Record models that will be sharded. The options may name modules and methods of any model that was announced."""
        models = tuple(models)
        self._announced.update(models)
        for axis in self._parameter_axes:
            axis.announce_models(models)

    # ---------------------------------------------------------------- steps that a pipeline calls for the whole model

    def split_sequences(self, model: torch.nn.Module) -> Any:
        """Set up context parallelism for a model, before its transforms are applied.

        Returns:
            The wrapper that splits the model's sequences, or None if the layout has no context parallelism.
        """
        if self._sequence_axis is None:
            return None
        return self._sequence_axis.split_model(model, self._mesh, self._all_ranks)

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
                raise PrepareError(_CONTAINER.format(name=type(model).__name__, strategy=self._strategy_name))
            units.find_units(model, self._options.sharding, self._announced)
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

    # ---------------------------------------------------------------- sharding

    def shard_model(
        self,
        model: torch.nn.Module,
        transforms: Iterable[Transform],
        expected: Set[str],
        other_stage_ids: Container[int] = (),
        context_parallel: Any = None,
    ) -> ShardedModel:
        """Shard a model. A model that was sharded in this way before, and then released, stays as it is.

        Args:
            model: The user's own model.
            transforms: Functions to apply to the model before it is sharded.
            expected: Names of tensors whose values are read from files afterwards.
            other_stage_ids: IDs of parameters and buffers that are empty because they belong to other stages of a pipeline.
            context_parallel: Return value of `split_sequences` for the model. If None, and the layout has context parallelism,
                `split_sequences` is called.

        Raises:
            PrepareError: If the model cannot be sharded, or was sharded in another way.
            ConfigError: If the options name modules that the model does not contain.
        """
        name = type(model).__name__  # for messages: fully_shard replaces the class by one with another name
        context_parallel = context_parallel or self.split_sequences(model)
        records = self._everyone.runtime.scope.get_or_create(ShardedStages if self._is_stage else ShardedModels)
        options = self._options
        settings = (options.layout, options.sharding, f"mixed_precision={options.number_format!r}", options.tensor)
        splits: list[SplitModel] = []
        replaced: list[tuple[str, torch.nn.Parameter]] = []
        try:
            split_references = records.find_record(model, settings)
            if split_references is None:
                replaced = self._shard_new_model(model, splits, transforms, expected, other_stage_ids)
                # Weak references, because the splits refer to the model. Its hooks keep alive the splits that are resumed later.
                records.record_model(model, settings, [weakref.ref(split) for split in splits])
            else:
                splits += [split for reference in split_references if (split := reference()) is not None]
                self._resume_sharding(model, splits)
            lost_writes = LostWrites(model, replaced, name)
        except BaseException:
            release_splits(splits, context_parallel)
            raise
        return ShardedModel(
            model, context_parallel, splits, lost_writes, self._everyone, options.sharding, self._is_stage
        )

    def _resume_sharding(self, model: torch.nn.Module, splits: Iterable[SplitModel]) -> None:
        """Enable the splits of a model again that was sharded before, and then released."""
        for split in splits:
            split.resume()
        fsdp_state.reshard_units(model)  # a forward since the release has left the root's parameters gathered

    def _shard_new_model(
        self,
        model: torch.nn.Module,
        splits: list[SplitModel],
        transforms: Iterable[Transform],
        expected: Set[str],
        other_stage_ids: Container[int],
    ) -> list[tuple[str, torch.nn.Parameter]]:
        """Broadcast rank 0's values, split the model along mesh axes, apply the transforms, and shard it with FSDP.

        In a pipeline, the values are set by the pipeline, and are not broadcast here.

        Args:
            model: The user's own model.
            splits: Empty list, to which the splits are appended. After an error, it contains those made before the error.
            transforms: Functions to apply to the model before it is sharded.
            expected: Names of tensors whose values are read from files afterwards.
            other_stage_ids: IDs of parameters and buffers that are empty because they belong to other stages of a pipeline.

        Returns:
            Names and parameters that sharding has replaced. They are also recorded in `ReplacedParameters`.
        """
        check_hooks(model)
        before = list(model.named_parameters(remove_duplicate=False))
        self._check_unshared(model, before)
        missing = None
        if not self._is_stage:
            self.check_shardable(model)
            missing = self.broadcast_values(model, expected)
        for axis in self._parameter_axes:
            splits.append(axis.split_model(model, self._mesh, self._all_ranks, other_stage_ids))
        for transform in transforms:
            transform(model)
        sharded_units: list[torch.nn.Module] = []
        if self.is_sharded:
            sharded_units = self._apply_fsdp(model, splits, other_stage_ids)
        if missing is not None:
            missing.fill(model, sharded_units)
        move_unsharded(model, self._device)
        after = dict(model.named_parameters(remove_duplicate=False))
        replaced = [(name, parameter) for name, parameter in before if after[name] is not parameter]
        self._replaced.record_pairs((parameter, after[name]) for name, parameter in replaced)
        return replaced

    def _check_unshared(self, model: torch.nn.Module, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Raise an error if the model shares trainable parameters with a model that is sharded already.

        A frozen parameter keeps its value in both models. A trainable one would be updated in one of them only.

        Args:
            model: The user's own model.
            named: Names and parameters of the model.

        Raises:
            PrepareError: If there are such parameters. The message names them.
        """
        shared = [name for name, p in named if p.requires_grad and self._replaced.get_current(p) is not p]
        if shared:
            raise PrepareError(
                _SHARED.format(name=type(model).__name__, keys=join_names(shared), strategy=self._strategy_name)
            )

    def _apply_fsdp(
        self, model: torch.nn.Module, splits: Iterable[SplitModel], other_stage_ids: Container[int]
    ) -> list[torch.nn.Module]:
        """Wrap float8 weights, choose the units, and shard them.

        Args:
            model: Model to shard, after its splits and transforms.
            splits: Splits of the model along mesh axes.
            other_stage_ids: IDs of parameters and buffers that are empty because they belong to other stages of a pipeline.

        Returns:
            Separately sharded modules on this rank, innermost first, without the root and without experts.
        """
        options = self._options
        num_wrapped = 0
        if not self._is_stage:  # a stage gathers weights once per window, and keeps them in half precision
            num_wrapped = wrap_float8_weights(model, options.float8, options.sharding, options.layout.num_shards)
        # Units are chosen here, and not in `check_shardable`, because splits and transforms can replace modules.
        chosen = units.find_units(model, options.sharding, self._announced)
        if chosen.divided_blocks:
            log.info(_DIVIDED, ", ".join(chosen.divided_blocks))
        experts = [module for split in splits for module in split.distributed]
        sharded_units = self._unit_sharder.shard_units(model, chosen, other_stage_ids, experts, self._announced)
        if num_wrapped:
            # Compute all scales in one collective when a forward of the sharded model begins.
            model.register_forward_pre_hook(lambda model, args: compute_float8_scales([model]), prepend=True)
        return sharded_units


def move_unsharded(model: torch.nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers that are not sharded to a device. The parameter objects stay the same.

    DTensors are already on their device. `fully_shard` moves neither the parameters that it ignores, nor the buffers of
    modules that have only such parameters. Tensors on the meta device belong to other pipeline stages and stay there.
    """
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and not is_dtensor(parameter) and not parameter.is_meta:
                move_parameter(parameter, device)
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
