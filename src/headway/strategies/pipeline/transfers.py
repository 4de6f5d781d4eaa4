"""What stages of a pipeline send each other, one rank to one other: while a rank waits for it, its pulse says so.

These are no collectives: ranks make different numbers of them, so they are not numbered with the ledger's. Where an engine takes
several transfers in one launch (NCCL), the host does not wait, and nothing is noted.
"""

from typing import Any

import torch
import torch.distributed as dist

from headway.runtime.heartbeat import file as pulse


class StageTransfer(dist.P2POp):
    """torch's operation between two ranks, with a name.

    Args:
        op: `dist.isend` or `dist.irecv`.
        tensor: what travels, or where it arrives.
        peer: the other rank, of all.
        group: of the pipeline.
        name: for a report of a hang, as "receive from stage 2".
    """

    def __init__(self, op: Any, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None, name: str) -> None:
        super().__init__(op, tensor, peer, group)
        self.op: Any = _NamedTransfer(op, name)

    def __new__(cls, op: Any, tensor: torch.Tensor, peer: int, group: Any, name: str) -> "StageTransfer":
        """torch checks its arguments where the object is made."""
        made: StageTransfer = super().__new__(cls, op, tensor, peer, group)
        return made


class _NamedTransfer:
    """In the place of torch's function, which schedules compare it with."""

    def __init__(self, op: Any, name: str) -> None:
        self._op, self._name = op, name
        self.__name__ = op.__name__

    def __call__(
        self, tensor: torch.Tensor, *, group: Any, tag: int, group_dst: int | None = None, group_src: int | None = None
    ) -> Any:
        peer = group_src if group_dst is None else group_dst
        key = "group_dst" if self._op is dist.isend else "group_src"
        work = self._op(tensor, group=group, tag=tag, **{key: peer})
        return None if work is None else _Awaited(work, self._name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._op or (isinstance(other, _NamedTransfer) and other._op is self._op)

    def __hash__(self) -> int:
        return hash(self._op)


class _Awaited:
    """A transfer on its way."""

    def __init__(self, work: dist.Work, name: str) -> None:
        self._work, self._name = work, name

    def wait(self) -> Any:
        """Until it is done; meanwhile the pulse says what this rank waits for."""
        own = pulse.own()
        own.set_transfer(self._name)
        try:
            return self._work.wait()
        finally:
            own.set_transfer("")
