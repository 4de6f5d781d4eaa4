"""Device mesh of a layout: torch's mesh with axes named as in the layout, and the submeshes that FSDP uses."""

from typing import Any, NamedTuple

from headway.common.optional import LazyModule
from headway.core.config.mesh import Layout
from headway.core.strategies._torch import clear_sharding_cache

device_mesh = LazyModule("torch.distributed.device_mesh")


class LayoutMesh(NamedTuple):
    """Device mesh of a layout, and its submeshes for FSDP.

    Attributes:
        mesh: torch's device mesh of all ranks, with axes named as in the layout.
        sharding_mesh: Submesh along which `fully_shard` shards and replicates; None if `fully_shard` is not used.
        expert_mesh: Submesh along which distributed experts are sharded and replicated; None without expert
            parallelism.
    """

    mesh: Any
    sharding_mesh: Any
    expert_mesh: Any


def build_mesh(device_type: str, layout: Layout) -> LayoutMesh:
    """Create the device mesh of a layout. All ranks must call this.

    Parameters are also sharded over the ranks along cp (context parallelism) and ep (expert parallelism). Otherwise
    these ranks would hold equal parameters. Gradients have to be reduced over these ranks in any case. Experts differ
    along ep, so they are sharded only over the ranks along shard and cp.

    Args:
        device_type: Device type, such as "cuda".
        layout: Number of ranks along each axis.
    """
    # torch treats submeshes of two meshes as equal if names and ranks agree. Its cached results of operators could then refer
    # to an earlier mesh, with other axes around it or with process groups that have ended.
    clear_sharding_cache()
    sizes = dict(layout.sizes)
    shards: list[str] = [axis for axis in ("shard", "cp", "ep") if axis in sizes]
    if "replicate" in sizes and not shards:
        # fully_shard needs a shard axis in addition to the one along which it replicates, even with only one rank.
        sizes = {a: getattr(layout, a) for a in ("pp", "replicate", "shard", "cp", "tp") if a in sizes or a == "shard"}
        shards = ["shard"]
    if len(shards) < 2 and layout.ep == 1:
        return _build_plain_mesh(device_type, sizes, shards)
    return _build_mesh_of_several_shard_axes(device_type, layout, sizes, shards)


def _build_plain_mesh(device_type: str, sizes: dict[str, int], shards: list[str]) -> LayoutMesh:
    """Create a device mesh in which parameters are sharded along at most one axis.

    Args:
        device_type: Device type, such as "cuda".
        sizes: Number of ranks along each axis, outermost first.
        shards: Name of the axis along which parameters are sharded, or empty.
    """
    mesh = device_mesh.init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    sharding_axes = tuple(axis for axis in sizes if axis == "replicate") + tuple(shards)
    return LayoutMesh(mesh, mesh[sharding_axes] if shards else None, None)


def _build_mesh_of_several_shard_axes(
    device_type: str, layout: Layout, sizes: dict[str, int], shards: list[str]
) -> LayoutMesh:
    """Create a device mesh in which parameters are sharded along several axes, such as "shard" and "cp".

    fully_shard needs a single axis along which it shards. So create one axis for all of them, such as "shard_cp_ep", and
    unflatten it. Experts are sharded along "shard", even if it has only one rank.

    Args:
        device_type: Device type, such as "cuda".
        layout: Number of ranks along each axis.
        sizes: Number of ranks along each axis that the mesh has, outermost first.
        shards: Names of the axes along which parameters are sharded.
    """
    replicas = [axis for axis in sizes if axis == "replicate"]
    names = [axis for axis in sizes if axis not in shards]
    position = names.index("tp") if "tp" in names else len(names)
    flat_axis = "_".join(dict.fromkeys(("shard", *shards)))
    names.insert(position, flat_axis)
    flat_mesh = device_mesh.init_device_mesh(
        device_type, tuple(sizes.get(axis, layout.num_shards) for axis in names), mesh_dim_names=tuple(names)
    )
    mesh, expert_mesh = flat_mesh, None
    if layout.ep > 1:
        outer_axis = flat_axis.removesuffix("_ep")
        mesh = flat_mesh._unflatten(position, (layout.num_shards // layout.ep, layout.ep), (outer_axis, "ep"))
        expert_axes = (*replicas, outer_axis)
        expert_mesh = mesh[expert_axes]
    if layout.cp > 1:
        mesh = mesh._unflatten(position, (layout.shard, layout.cp), ("shard", "cp"))
    sharding_axes = (*replicas, flat_axis)
    return LayoutMesh(mesh, flat_mesh[sharding_axes], expert_mesh)


def describe_ended_groups(layout: Layout) -> str:
    """Return the error message for preparing a model in a layout whose process groups have been destroyed."""
    return (
        f"the process groups of this Accelerator ({layout.describe()}) have ended: memory ran out in an attempt of "
        "find_executable_batch_size, which continues with new ones. Create the Accelerator inside its function, with this layout"
    )
