"""A copy of each rank's part on the next machine, for machines that keep sharded state in memory.

The ranks of one machine send what they have written to those of the next, on a gloo group of their own and behind the loop, and every
machine learns what all parts are. So each commits the same manifest, over its own files and its neighbour's.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.runtime.group import MARGIN, part
from headway.runtime.process import ProcessRuntime


class NeighbourCopies:
    """Exchanges parts; every rank makes it, on its main thread.

    Args:
        runtime: this process.
        machines: for each rank, which machine it is on, by any name.
    """

    def __init__(self, runtime: ProcessRuntime, machines: Sequence[str]) -> None:
        self._rank = runtime.rank
        order = list(dict.fromkeys(machines))
        ranks = [[rank for rank, name in enumerate(machines) if name == each] for each in order]
        here = order.index(machines[self._rank])
        before, after = ranks[here - 1], ranks[(here + 1) % len(order)]
        own = ranks[here]
        self._receiver = after[own.index(self._rank) % len(after)]
        self._senders = [rank for number, rank in enumerate(before) if own[number % len(own)] == self._rank]
        self._elsewhere = [rank for rank in range(len(machines)) if rank not in own]
        self._never_here = [rank for rank in self._elsewhere if rank not in before] if own[0] == self._rank else []
        self._group: Any = part(range(len(machines)), runtime.timeout + MARGIN)

    def announce(self, staging: Path) -> None:
        """Say, for the rank that commits on this machine, that the parts of other machines will come."""
        for rank in self._elsewhere:
            (staging / f".writing-{rank}").touch()

    def exchange(self, staging: Path) -> None:
        """Send this rank's part, and take those that come here; every rank calls it when its own is written.

        Raises:
            OSError, RuntimeError: a machine is gone, or the memory full.
        """
        told: list[str] = [""] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(told, (staging / f".written-{self._rank}").read_text(), group=self._group)
            work = [
                dist.isend(_mapped(staging / name, size), self._receiver, group=self._group)
                for name, size, *_ in json.loads(told[self._rank])["files"]
            ]
            received = []  # the memory must live as long as the transfer
            for rank in self._senders:
                for name, size, *_ in json.loads(told[rank])["files"]:
                    received.append(_mapped(staging / name, size))
                    work.append(dist.irecv(received[-1], rank, group=self._group))
            for each in work:
                if each is not None:
                    each.wait()
        except BaseException:
            for rank in self._senders:  # who commits need not wait for them
                (staging / f".writing-{rank}").unlink(missing_ok=True)
            raise
        for rank in (*self._senders, *self._never_here):
            working = staging / f".writing-{rank}"
            working.write_text(told[rank])
            os.replace(working, staging / f".written-{rank}")


def _mapped(path: Path, size: int) -> torch.Tensor:
    """The bytes of a file, which is made where it is not there."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
