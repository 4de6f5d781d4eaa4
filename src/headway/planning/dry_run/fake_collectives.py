"""Exchanges of a rank whose peers are not there: what they would say.

In most layouts every rank would say what this one says. The stages of a pipeline tell each other what they hand on: each rank
is rehearsed by itself, and hears what the others have told before. Where it needs to know what has not been told yet, its rehearsal
is broken off, and comes again after the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from headway.runtime.collectives.checked import Collectives
from headway.runtime.group import MARGIN, part
from headway.runtime.process import ProcessRuntime


class FakeCollectives(Collectives):
    """Exchanges of a rank whose peers are not there: each of them would say what this one says, and values are nowhere."""

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """This rank alone: nobody asks its part anything in a preparation."""
        return FakeCollectives(self.runtime, is_alone=True)

    def gather_numbers(self, values: Sequence[float], operation: str = "numbers") -> list[list[float]]:
        """These, for every rank."""
        return [list(values)] * self.world_size

    def barrier(self) -> None:
        """Nobody is waited for."""

    def broadcast_into(self, found: Sequence[torch.Tensor], src: int = 0) -> None:
        """Nothing travels."""

    def broadcast_in_place(self, found: Sequence[torch.Tensor], src: int = 0) -> None:
        """Nothing travels."""

    def sum_in_place(self, found: Sequence[torch.Tensor]) -> None:
        """Nothing travels."""

    def gather_objects(self, obj: Any) -> list[Any]:
        """This one, for every rank."""
        return [obj] * self.world_size

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """This one."""
        return obj


class AnswerNotReady(BaseException):
    """A rank waits for what another one has not told. No error: whoever handles errors must let it pass."""


class PeerAnswer:
    """What the ranks of a pipeline have told each other in their rehearsals.

    Attributes:
        answers: by the number of the exchange, which is alike on all ranks, and the rank.
    """

    def __init__(self) -> None:
        self.answers: list[dict[int, Any]] = []

    def tell(self, number: int, rank: int, obj: Any, num_ranks: int) -> list[Any]:
        """Tell something, and hear what all ranks have told.

        Raises:
            NotYet: another rank, whose answer is read, has not come so far.
        """
        if number == len(self.answers):
            self.answers.append({})
        known = self.answers[number]
        known[rank] = obj
        return _Answers(known.get(each) for each in range(num_ranks))


class _Answers(list[Any]):
    """Answers by rank; one that is not there must not be read."""

    def __getitem__(self, rank: Any) -> Any:
        found = super().__getitem__(rank)
        if found is None:
            raise AnswerNotReady
        return found

    def __iter__(self) -> Any:
        return (self[rank] for rank in range(len(self)))


class FakeStageGroup(FakeCollectives):
    """All ranks, of which one is rehearsed; the parts that it is in have groups, in which nothing is sent.

    Args:
        runtime: of the rank.
        told: by the ranks that were rehearsed before.
    """

    def __init__(self, runtime: ProcessRuntime, told: PeerAnswer) -> None:
        super().__init__(runtime)
        self._told = told

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """The part that this rank is in; no other group is made."""
        own = next(list(ranks) for ranks in groups if self.runtime.rank in ranks)
        if len(own) == 1:
            return FakeCollectives(self.runtime, is_alone=True)
        group = part(own, self.runtime.patience + MARGIN) if len(own) < self.world_size else None
        return StageLink(self.runtime, group, self._told)


class StageLink(FakeCollectives):
    """A part of all ranks. Tensors are handed to its group, where they are counted; objects come from what was told.

    Args:
        runtime: of the rank.
        group: of the part; None: all ranks.
        told: by the ranks that were rehearsed before.
    """

    def __init__(self, runtime: ProcessRuntime, group: dist.ProcessGroup | None, told: PeerAnswer) -> None:
        super().__init__(runtime, group)
        self._told, self._number = told, 0

    sum_in_place = Collectives.sum_in_place
    broadcast_in_place = Collectives.broadcast_in_place

    def broadcast_into(self, found: Sequence[torch.Tensor], src: int = 0) -> None:
        """Without a handshake."""
        self.broadcast_in_place(found, src)

    def gather_objects(self, obj: Any) -> list[Any]:
        """What the ranks have told at this place."""
        number, self._number = self._number, self._number + 1
        return self._told.tell(number, self.rank, obj, self.world_size)
