"""Divide a DTensor among the ranks that write it into a checkpoint, without communication."""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy

from headway.core.weights.dtensor_boxes import compute_ranges, iterate_boxes, list_cuts
from headway.core.weights.pieces import ShardPiece, TensorBox, TensorSplit, get_local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardSplitter:
    """Creator of `ShardPiece` objects from DTensors. It chooses which rank writes a box that several ranks hold.

    A box is a rectangular block of a tensor. All ranks make the same choices without communication, if they pass the
    tensors in the same order. The writes are divided among the replicas, balanced by bytes.
    """

    def __init__(self) -> None:
        self._splits: dict[tuple[Any, ...], TensorSplit] = {}
        """Splits by everything that determines them, because many tensors have equal ones."""
        self._ranks: dict[int, tuple[Any, numpy.ndarray[Any, Any]]] = {}
        """Pair of (mesh, result of `_list_ranks`) by the mesh's `id`. The mesh is kept, so that its `id` stays unique."""
        self._written_bytes: dict[int, list[int]] = {}
        """Bytes that each replica writes, by the number of replicas."""

    def split_tensor(self, tensor: "DTensor") -> ShardPiece:
        """Return this rank's `ShardPiece` of a DTensor.

        Raises:
            CheckpointError: If the values are partial sums, or the local tensor's shape differs from the one that the
                placements imply.
        """
        cuts, ranks = list_cuts(tensor), self._list_ranks(tensor.device_mesh)
        sharding_axes = [axis for each in cuts for axis, _ in each]
        # Axes of `ranks`, whose first one is not a mesh dim. Ranks that differ only along them hold equal boxes.
        replica_axes = [axis for axis in range(1, ranks.ndim) if axis - 1 not in sharding_axes]
        num_replicas = ranks.shape[0] * prod(ranks.shape[axis] for axis in replica_axes)
        written_bytes = self._written_bytes.setdefault(num_replicas, [0] * num_replicas)
        replica = written_bytes.index(min(written_bytes))
        written_bytes[replica] += tensor.numel() * tensor.dtype.itemsize
        key = (id(tensor.device_mesh), tuple(tensor.shape), str(tensor.placements), replica)
        if key not in self._splits:
            # Move the replica axes to the front and flatten them. The other axes are the sharding ones.
            ordered = numpy.moveaxis(ranks, replica_axes, range(1, len(replica_axes) + 1))
            sharding_shape = ordered.shape[len(replica_axes) + 1 :]
            ranks_by_replica = ordered.reshape(num_replicas, *sharding_shape)
            self._splits[key] = _split_dtensor(tensor, cuts, ranks_by_replica[replica])
        split, local = self._splits[key], get_local_part(tensor)
        rank = tensor.device_mesh.get_rank()
        boxes = []
        for offsets, local_slices in iterate_boxes(tensor):
            index = 0  # row-major index of the box in the grid
            for start, positions in zip(offsets, split.positions_by_start):
                index = index * len(positions) + positions[start]
            boxes.append(TensorBox(offsets, local[local_slices], split.writers[index] == rank))
        return ShardPiece(tuple(tensor.shape), tensor.dtype, tuple(boxes), local, split)

    def _list_ranks(self, mesh: Any) -> "numpy.ndarray[Any, Any]":
        """Return the ranks that hold a tensor on a mesh, as an array indexed by (replica, coordinate in the mesh).

        The mesh can be part of a larger mesh. The tensor is then replicated along the larger mesh's other dims, except
        along pipeline stages.
        """
        if id(mesh) in self._ranks:
            _, ranks = self._ranks[id(mesh)]
            return ranks
        own_ranks = mesh.mesh.cpu().numpy()
        root = mesh._get_root_mesh()
        all_ranks, names = root.mesh.cpu().numpy(), root.mesh_dim_names or ()
        # Coordinates in the root mesh, of shape [number of ranks in this mesh, number of the root's dims].
        coordinate_by_rank = {int(rank): coordinate for coordinate, rank in numpy.ndenumerate(all_ranks)}
        coordinates = numpy.array([coordinate_by_rank[int(rank)] for rank in own_ranks.reshape(-1)])
        coordinates = coordinates.reshape(own_ranks.size, all_ranks.ndim)
        # All ranks of this mesh have the same coordinate along these axes: the tensor is replicated along them.
        replica_axes = [
            axis
            for axis in range(all_ranks.ndim)
            if (coordinates[:, axis] == coordinates[0, axis]).all() and names[axis : axis + 1] != ("pp",)
        ]
        replicas = []
        for replica_coordinate in product(*(range(all_ranks.shape[axis]) for axis in replica_axes)):
            # This mesh, moved along the replica axes.
            moved_coordinates = coordinates.copy()
            moved_coordinates[:, replica_axes] = replica_coordinate
            replicas.append(all_ranks[tuple(moved_coordinates.T)].reshape(own_ranks.shape))
        ranks = numpy.stack(replicas)
        self._ranks[id(mesh)] = mesh, ranks
        return ranks


def _split_dtensor(
    tensor: "DTensor", cuts: Sequence[Sequence[tuple[int, int | None]]], ranks: "numpy.ndarray[Any, Any]"
) -> TensorSplit:
    """Return the division of a DTensor among ranks as a grid of rectangular blocks.

    Args:
        tensor: The DTensor.
        cuts: For each dim, the mesh dims that shard it, as pairs of (mesh dim, split factor of torch's `_StridedShard`
            or None).
        ranks: Ranks indexed by the coordinates along the sharding mesh dims, in the mesh's order.
    """
    mesh = tensor.device_mesh
    sharding_axes = sorted(axis for each in cuts for axis, _ in each)
    sizes: list[tuple[int, ...]] = []
    # For each sharding mesh dim, the coordinate of each box along it, in an array that broadcasts to the grid of boxes.
    coordinates: list[Any] = [0] * len(sharding_axes)
    for dim, (length, dim_cuts) in enumerate(zip(tensor.shape, cuts)):
        ranges_by_coordinate = compute_ranges(length, [(factor, mesh.size(axis)) for axis, factor in dim_cuts])
        # Pairs of (index range, coordinate along the mesh dims of `dim_cuts`), by increasing index.
        in_order = sorted((each, coordinate) for coordinate, ranges in ranges_by_coordinate.items() for each in ranges)
        sizes.append(tuple(stop - start for (start, stop), _ in in_order))
        grid_shape = [1] * tensor.ndim
        grid_shape[dim] = len(in_order)
        for cut_index, (axis, _) in enumerate(dim_cuts):
            along_dim = numpy.array([coordinate[cut_index] for _, coordinate in in_order], dtype=numpy.int64)
            coordinates[sharding_axes.index(axis)] = along_dim.reshape(grid_shape)
    writers = ranks[tuple(coordinates)] if sharding_axes else ranks
    writers = numpy.broadcast_to(writers, tuple(map(len, sizes)))
    return TensorSplit(tuple(sizes), tuple(int(rank) for rank in writers.reshape(-1)))
