"""Replace collectives in a dry run, in which one rank of a layout runs alone and transfers no data.

In most layouts, all ranks pass equal objects to a collective. Pipeline stages do not, because each sends the shapes of
its outputs to the next. So each pipeline rank has its own dry run, and reads the objects that earlier dry runs of other
ranks have stored. If an object is missing, the dry run is aborted, and repeated after the dry runs of the other ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.group import MARGIN, create_group
from headway.core.runtime.process import ProcessRuntime
from headway.layouts.whole_updates.transfers import Box
from headway.planning.dry_run.boxes import RankBoxes


class FakeCollectives(Collectives):
    """Collectives of a dry run, in which only one rank exists.

    All other ranks are assumed to send the same data as this rank. Tensors have no values and stay unchanged.

    Attributes:
        boxes: Boxes of tensors on each rank of the layout. None in a subgroup.
    """

    boxes: RankBoxes | None = None

    def predict_boxes(self, tensors: Sequence[torch.Tensor]) -> list[list[list[Box]]]:
        """Return which parts of each tensor each rank holds.

        `result[rank][index]` lists the boxes (rectangular parts) of `tensors[index]` on a rank.
        """
        assert self.boxes is not None
        return [list(each) for each in zip(*map(self.boxes.list_boxes, tensors))]

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """Return collectives over a group that contains only this rank.

        A group with other ranks is not needed, because preparing a model communicates nothing within a subgroup.
        """
        return FakeCollectives(self.runtime, is_alone=True)

    def gather_numbers(
        self, values: Sequence[float], operation: str = "numbers", signature: str = ""
    ) -> list[list[float]]:
        """Return a list with a copy of this rank's values for every rank."""
        return [list(values)] * self.world_size

    def barrier(self) -> None:
        """Return immediately, because there are no other ranks."""

    def broadcast_into(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Do nothing, because tensors have no values."""

    def broadcast_in_place(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Do nothing, because tensors have no values."""

    def sum_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing, because tensors have no values."""

    def gather_objects(self, obj: Any) -> list[Any]:
        """Return a list with this rank's object for every rank."""
        return [obj] * self.world_size

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return this rank's object. The object of rank `src` is assumed to be equal."""
        return obj


class ObjectNotReady(BaseException):
    """Raised to abort a dry run that needs an object which another pipeline rank has not stored yet.

    It is not an error. It derives from `BaseException` so that error handlers do not catch it.
    """


class PeerObjects:
    """Store of the objects that pipeline ranks pass to object collectives, shared by the dry runs of these ranks.

    Attributes:
        objects: For each collective in order, a dict with the object of each rank. All ranks call the collectives in
            the same order.
    """

    def __init__(self) -> None:
        self.objects: list[dict[int, Any]] = []

    @property
    def num_stored(self) -> int:
        """Number of objects that are stored, over all collectives and ranks."""
        return sum(map(len, self.objects))

    def share_object(self, collective_index: int, rank: int, obj: Any, num_ranks: int) -> list[Any]:
        """Store this rank's object for a collective, and return the list of all ranks' objects.

        Reading an object from the list raises ObjectNotReady if its rank has not stored it yet.

        Args:
            collective_index: 0-based index of the collective among those that each rank calls.
            rank: This rank.
            obj: Object to store.
            num_ranks: Number of ranks in the collective.
        """
        if collective_index == len(self.objects):
            self.objects.append({})
        objects_by_rank = self.objects[collective_index]
        objects_by_rank[rank] = obj
        return _GatheredObjects(objects_by_rank.get(each, _NOT_STORED) for each in range(num_ranks))


_NOT_STORED = object()
"""Placeholder for the object of a rank that has not stored one yet. None is an object that a rank can store."""


class _GatheredObjects(list[Any]):
    """List of the objects that the ranks have passed to one collective.

    Reading the object of a rank that has not stored one yet raises ObjectNotReady.
    """

    def __getitem__(self, rank: Any) -> Any:
        obj = super().__getitem__(rank)
        if obj is _NOT_STORED:
            raise ObjectNotReady
        return obj

    def __iter__(self) -> Any:
        return (self[rank] for rank in range(len(self)))


class FakeStageGroup(FakeCollectives):
    """Collectives over all ranks, for the dry run of one pipeline stage.

    Collectives over a subgroup use a process group that sends nothing.

    Args:
        runtime: Runtime of the rank.
        peer_objects: Objects stored by earlier dry runs.
    """

    def __init__(self, runtime: ProcessRuntime, peer_objects: PeerObjects) -> None:
        super().__init__(runtime)
        self._peer_objects = peer_objects

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """Return the collectives of the subgroup that contains this rank.

        Process groups are not created for the other subgroups.
        """
        own_ranks = next(list(ranks) for ranks in groups if self.runtime.rank in ranks)
        if len(own_ranks) == 1:
            return FakeCollectives(self.runtime, is_alone=True)
        group = None
        if len(own_ranks) < self.world_size:
            group = create_group(own_ranks, self.runtime.timeout + MARGIN)
        return StageLink(self.runtime, group, self._peer_objects)


class StageLink(FakeCollectives):
    """Collectives over a subgroup of the ranks, for the dry run of one pipeline stage.

    Tensors are passed to the process group, so that their bytes are counted. Objects are read from earlier dry runs.

    Args:
        runtime: Runtime of the rank.
        group: Process group of the subgroup, or None for all ranks.
        peer_objects: Objects stored by earlier dry runs.
    """

    def __init__(self, runtime: ProcessRuntime, group: dist.ProcessGroup | None, peer_objects: PeerObjects) -> None:
        super().__init__(runtime, group)
        self._peer_objects = peer_objects
        self._num_collectives = 0

    sum_in_place = Collectives.sum_in_place
    broadcast_in_place = Collectives.broadcast_in_place

    def broadcast_into(self, tensors: Sequence[torch.Tensor], src: int = 0) -> None:
        """Broadcast tensors in place from rank `src`, without the handshake that checks their shapes."""
        self.broadcast_in_place(tensors, src)

    def gather_objects(self, obj: Any) -> list[Any]:
        """Store this rank's object, and return a list of all ranks' objects for this collective.

        Reading an object from the list raises ObjectNotReady if its rank has not stored it yet.
        """
        collective_index = self._num_collectives
        self._num_collectives += 1
        return self._peer_objects.share_object(collective_index, self.rank, obj, self.world_size)
