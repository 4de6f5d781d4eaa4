"""Copy the files of in-memory checkpoints to the next machine, so that the files of a lost machine still exist."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.core.checkpoint.saving.writer import get_part_marks
from headway.core.runtime.group import MARGIN, create_group
from headway.core.runtime.process import ProcessRuntime


class NeighborCopies:
    """Transfer of in-memory checkpoint files between machines, so that the files of a lost machine still exist.

    Each machine sends its files to the next one. Every rank must create this object, on its main thread.

    Args:
        runtime: Runtime of this process.
        machines: Machine name of each rank.
    """

    def __init__(self, runtime: ProcessRuntime, machines: Sequence[str]) -> None:
        self._rank = runtime.rank
        names = list(dict.fromkeys(machines))
        ranks_by_machine = [[rank for rank, name in enumerate(machines) if name == each] for each in names]
        index = names.index(machines[self._rank])
        own_ranks = ranks_by_machine[index]
        previous_ranks = ranks_by_machine[index - 1]
        next_ranks = ranks_by_machine[(index + 1) % len(names)]
        # Machines can have different numbers of ranks, so a rank can have several senders, or none.
        self._receiver = next_ranks[own_ranks.index(self._rank) % len(next_ranks)]
        self._senders = [
            rank for number, rank in enumerate(previous_ranks) if own_ranks[number % len(own_ranks)] == self._rank
        ]
        self._remote_ranks = [rank for rank in range(len(machines)) if rank not in own_ranks]
        # One rank per machine also writes the file lists of the ranks whose files this machine does not get.
        is_first = own_ranks[0] == self._rank
        self._list_only_ranks = [rank for rank in self._remote_ranks if is_first and rank not in previous_ranks]
        self._group: Any = create_group(range(len(machines)), runtime.timeout + MARGIN)

    def announce(self, staging: Path) -> None:
        """Create a marker file for each rank on another machine, before the checkpoint's files are exchanged.

        The rank that commits this machine's checkpoint waits until `exchange` has replaced each marker with the list of
        files that the rank has written.

        Args:
            staging: Staging directory of the save.
        """
        for rank in self._remote_ranks:
            get_part_marks(staging, rank).writing.touch()

    def exchange(self, staging: Path) -> None:
        """Send this rank's checkpoint files to the next machine, and receive files from the previous machine.

        Each machine also gets the lists of the files that all ranks have written.

        Every rank must call it, after it has written its own files.

        Args:
            staging: Staging directory of the save.

        Raises:
            OSError, RuntimeError: If a machine is lost, or the memory is full.
        """
        file_lists: list[str] = [""] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(
                file_lists, get_part_marks(staging, self._rank).written.read_text(), group=self._group
            )
            work = [
                dist.isend(_map_file(staging / name, size), self._receiver, group=self._group)
                for name, size, *_ in json.loads(file_lists[self._rank])["files"]
            ]
            buffers = []  # the memory must live as long as the transfer
            for rank in self._senders:
                for name, size, *_ in json.loads(file_lists[rank])["files"]:
                    buffer = _map_file(staging / name, size)
                    buffers.append(buffer)
                    work.append(dist.irecv(buffer, rank, group=self._group))
            for each in work:
                if each is not None:
                    each.wait()
        except BaseException:
            for rank in self._senders:  # so that the committing rank does not wait for them
                get_part_marks(staging, rank).writing.unlink(missing_ok=True)
            raise
        for rank in (*self._senders, *self._list_only_ranks):
            marks = get_part_marks(staging, rank)
            marks.writing.write_text(file_lists[rank])
            marks.writing.replace(marks.written)


def _map_file(path: Path, size: int) -> torch.Tensor:
    """Return a uint8 tensor of shape [size] that is mapped to the first bytes of a file. Writes change the file.

    The file is created if it is missing, and extended if it is shorter than `size` bytes.
    """
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
