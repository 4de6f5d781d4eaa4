"""Counters of the collectives that this process enters and leaves, with the line of user code that called each one.

The counts are written to the rank's heartbeat file, which the hang watch reads. This module does not
import torch.
"""

from dataclasses import dataclass

from headway.common.callsite import find_call_site
from headway.core.runtime import heartbeat_file


@dataclass(frozen=True)
class LedgerEntry:
    """One recorded collective.

    Attributes:
        sequence: Number of the collective in its process group.
        operation: Kind of the collective, such as "gather".
        call_site: Line of user code that called it.
        number: Number of the collective in this process, counted over all groups. The heartbeat file
            contains this number.
    """

    sequence: int
    operation: str
    call_site: str
    number: int


class CollectiveLedger:
    """Counter of the collectives that this process enters in one process group.

    It also records each collective in this process's heartbeat file, for the hang watch.

    Attributes:
        sequence: Number of collectives entered so far.
    """

    def __init__(self) -> None:
        self.sequence = 0

    def record_entry(self, operation: str) -> LedgerEntry:
        """Record that this process enters a collective, and return the entry to pass to `record_exit`.

        Args:
            operation: Kind of the collective, such as "gather".
        """
        self.sequence += 1
        site = find_call_site()
        return LedgerEntry(
            self.sequence, operation, site, heartbeat_file.get_own_file().enter_collective(operation, site)
        )

    def record_exit(self, entry: LedgerEntry) -> None:
        """Record that all ranks have entered this collective, so that a missing rank can no longer make it hang."""
        heartbeat_file.get_own_file().leave_collective(entry.number)
