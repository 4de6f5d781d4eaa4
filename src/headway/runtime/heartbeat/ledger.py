"""The ledger: a small ring of the collectives this process entered and left, with the user's line for each."""

from collections import deque
from dataclasses import dataclass

from headway.common.callsite import call_site
from headway.runtime.heartbeat import file as pulse


@dataclass(frozen=True)
class LedgerEntry:
    """One collective: its number in this ledger, its kind, the user's line, what was handed in; its number in the pulse."""

    sequence: int
    operation: str
    call_site: str
    detail: str
    number: int = 0


class CollectiveLedger:
    """The last `size` collectives, oldest first."""

    def __init__(self, size: int = 200) -> None:
        self.entries: deque[LedgerEntry] = deque(maxlen=size)
        self.sequence = 0

    def record(self, operation: str, detail: str = "") -> LedgerEntry:
        """Note that a collective is entered now."""
        self.sequence += 1
        site = call_site()
        entry = LedgerEntry(self.sequence, operation, site, detail, pulse.own().enter(operation, site))
        self.entries.append(entry)
        return entry

    def leave(self, entry: LedgerEntry) -> None:
        """Note that all ranks have come to this collective: those of its parts that follow cannot miss one."""
        pulse.own().leave(entry.number)
