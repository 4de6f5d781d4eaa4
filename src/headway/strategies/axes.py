"""torch's device mesh of a layout, its axes named as in the layout."""

from typing import Any

from headway.common.optional import Later
from headway.config.mesh import Layout

device_mesh = Later("torch.distributed.device_mesh")


def build_mesh(device_type: str, layout: Layout) -> tuple[Any, Any]:
    """The mesh, and the part of it on which `fully_shard` works: replicas, if any, and those that share parameters.

    Ranks along cp share parameters, too: they would hold the same ones, and their gradients have to be summed anyway.
    """
    sizes = {axis: layout.sizes[axis] for axis in layout.sizes}
    shards = [axis for axis in ("shard", "cp") if axis in sizes]
    if "replicate" in sizes and not shards:
        # fully_shard replicates along an axis beside the one it cuts along, if only of one rank.
        sizes = {a: getattr(layout, a) for a in ("pp", "replicate", "shard", "cp", "tp") if a in sizes or a == "shard"}
        shards = ["shard"]
    if len(shards) < 2:
        mesh = device_mesh.init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return mesh, mesh[tuple(axis for axis in ("replicate", *shards) if axis in sizes)] if shards else None
    # One axis for both, which is opened for those who ask for cp alone.
    names = [axis for axis in sizes if axis not in shards]
    place = names.index("tp") if "tp" in names else len(names)
    names.insert(place, "shard_cp")
    flat = device_mesh.init_device_mesh(
        device_type, tuple(sizes.get(axis, layout.num_shards) for axis in names), mesh_dim_names=tuple(names)
    )
    mesh = flat._unflatten(place, (layout.shard, layout.cp), ("shard", "cp"))
    return mesh, flat[("replicate", "shard_cp")] if "replicate" in sizes else flat["shard_cp"]


def left(layout: Layout) -> str:
    """What a person should hear where a model is prepared in a layout whose process groups have ended."""
    return (
        f"the process groups of this Accelerator ({layout.describe()}) have ended: memory ran out in an attempt of "
        "find_executable_batch_size, which goes on with new ones. Create the Accelerator inside its function, with this layout"
    )
