"""Application of torch's `fully_shard` to the units of a model, and configuration of the sharded modules."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from headway.common.optional import LazyModule
from headway.core.strategies.device_mesh import LayoutMesh
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.strategies.fully_sharded.axes import AxisOptions
from headway.core.strategies.fully_sharded.formats import MixedPrecisionFormats, choose_formats, iterate_float32_norms
from headway.core.strategies.fully_sharded.units import ShardingUnits
from headway.errors import ConfigError
from headway.log import get_logger

fsdp = LazyModule("torch.distributed.fsdp")
log = get_logger(__name__)


class UnitSharder:
    """Function object that shards the units of a model with `fully_shard`, as the settings of a run request.

    Args:
        options: Settings of the run.
        meshes: Device mesh of the run, with the submeshes along which units and experts are sharded.
        compute_device_type: Device type for which number formats are chosen.
        storage_device_type: Type of the device of this process, on which gathered parameters are.
    """

    def __init__(
        self, options: AxisOptions, meshes: LayoutMesh, compute_device_type: str, storage_device_type: str
    ) -> None:
        self._sharding = options.sharding
        self._number_format = options.number_format
        self._is_stage = options.layout.pp > 1
        self._meshes = meshes
        self._compute_device_type = compute_device_type
        self._storage_device_type = storage_device_type
        # A stage gathers parameters once per accumulation window.
        self._reshard_units = False if self._is_stage else options.sharding.reshard_after_forward
        # A number of ranks applies to the units only. The root and the experts use torch's default then.
        self._reshard_root = self._reshard_units if isinstance(self._reshard_units, bool) else None

    def shard_units(
        self,
        model: torch.nn.Module,
        chosen: ShardingUnits,
        other_stage_ids: Container[int] = (),
        experts: Sequence[torch.nn.Module] = (),
        other_models: Iterable[torch.nn.Module] = (),
    ) -> list[torch.nn.Module]:
        """Shard a model with `fully_shard`: the experts, the norms that stay in float32, the units, and then the root.

        The reductions of gradients and the gathers of parameters of the sharded modules are configured, too.

        Args:
            model: Model to shard, in place.
            chosen: Modules that become units, and parameters that stay unsharded.
            other_stage_ids: IDs of parameters and buffers that are empty because they belong to other stages of a pipeline.
            experts: Modules with different parameters on each rank of "ep". They are sharded over the expert mesh.
            other_models: Other models of the Accelerator. A method that the options name may be one of theirs instead of
                the model's.

        Returns:
            Float32 norms that are sharded separately, then the units on this rank, the innermost unit first, including
                experts that are units. The root is not included.
        """
        formats = self._choose_formats()
        units = _list_local_units(model, chosen.modules, other_stage_ids)
        norms = list(iterate_float32_norms(units, formats))
        blocks = [unit for unit in units if not any(unit is expert for expert in experts)]
        ignored = {*chosen.ignored, *(p for p in model.parameters() if id(p) in other_stage_ids)}
        common: dict[str, Any] = {"offload_policy": self._choose_offload_policy(), "ignored_params": ignored or None}
        # fully_shard requires that inner modules are sharded before the modules around them. Experts are resharded like
        # the root, because a number of ranks, which the units can have, does not apply to the expert mesh.
        sharding_mesh, expert_mesh = self._meshes.sharding_mesh, self._meshes.expert_mesh
        _shard_modules(experts, expert_mesh, self._reshard_root, formats.blocks, common)
        _shard_modules(norms, sharding_mesh, self._reshard_units, formats.root, common)
        _shard_modules(blocks, sharding_mesh, self._reshard_units, formats.blocks, common)
        _shard_modules([model], sharding_mesh, self._reshard_root, formats.root, common)
        self._configure_gradients(model)
        self._configure_gathers(model, units, other_models)
        return [*norms, *units]

    def _choose_formats(self) -> MixedPrecisionFormats:
        """Return the number formats of parameters, reductions and outputs. Log a message about them once, if there is one."""
        formats = choose_formats(self._sharding, self._number_format, self._compute_device_type)
        if formats.message:
            log.info_once("%s", formats.message)
        return formats

    def _choose_offload_policy(self) -> Any:
        """Return FSDP's policy that keeps shards on the CPU between uses, or the one that does not."""
        if self._sharding.cpu_offload:
            return fsdp.CPUOffloadPolicy(pin_memory=self._storage_device_type != "cpu")
        return fsdp.OffloadPolicy()

    def _configure_gradients(self, model: torch.nn.Module) -> None:
        """Set when gradients are reduced, and that parameters without a gradient contribute zeros."""
        if self._is_stage:
            fsdp_state.defer_gradients(model)
        else:
            fsdp_state.reduce_unused_parameters(model)

    def _configure_gathers(
        self, model: torch.nn.Module, units: Iterable[torch.nn.Module], other_models: Iterable[torch.nn.Module]
    ) -> None:
        """Set how many units are gathered in advance, and which methods besides `forward` gather parameters."""
        unit_ids = set(map(id, units))
        in_forward_order = [module for module in model.modules() if id(module) in unit_ids]
        fsdp_state.set_prefetching(in_forward_order, self._sharding)
        generation = [] if self._is_stage else fsdp_state.list_generation_methods(model)
        names = dict.fromkeys((*self._sharding.forward_methods, *generation))
        fsdp_state.add_forward_methods(model, names, other_models)


def _shard_modules(
    modules: Iterable[torch.nn.Module], mesh: Any, reshard: bool | int | None, formats: Any, common: dict[str, Any]
) -> None:
    """Call `fully_shard` on each module.

    Args:
        modules: Modules to shard.
        mesh: Device mesh along which they are sharded and replicated.
        reshard: Value of `reshard_after_forward`. None: FSDP2's default, to reshard all modules except the root.
        formats: Mixed-precision policy.
        common: Arguments that are equal for all modules of a model.
    """
    for module in modules:
        fsdp.fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=formats, **common)


def _list_local_units(
    model: torch.nn.Module, units: Iterable[torch.nn.Module], other_stage_ids: Container[int]
) -> list[torch.nn.Module]:
    """Return the units whose parameters are on this rank.

    Args:
        model: Model that contains the units, for messages.
        units: Modules that are units.
        other_stage_ids: IDs of parameters and buffers that are empty because they belong to other pipeline stages.

    Raises:
        ConfigError: If only some of a unit's parameters are on this rank.
    """
    local_units = []
    for unit in units:
        is_on_other_stage = [id(p) in other_stage_ids for p in unit.parameters()]
        if not all(is_on_other_stage):
            local_units.append(unit)
        if any(is_on_other_stage) and not all(is_on_other_stage):
            name = next(name for name, module in model.named_modules() if module is unit)
            raise ConfigError(
                f"ShardingOptions(units=...) takes {name!r} as a unit, but it is on several stages of the pipeline; name modules "
                "within blocks, or the blocks"
            )
    return local_units
