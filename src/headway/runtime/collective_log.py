"""Collectives as they were called: the ring of all of them for the hang watch, and the trail of the batch in hand.

Under sharded layouts a forward is full of exchanges. A rank whose memory ran out in one of them cannot know which ones the others
have still ahead of them; but they do them in the same order as every rank, and each notes its own here before it enters it.
Only when a rank asks are they told to others. Torch-free.

The ledger: numbers of the collectives that this process entered and left, with the user's line for each.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.common.callsite import call_site
from headway.runtime import pulse

VOTE = "vote"
"""What the exchange is called that ends a round."""

Step = list[Any]
"""An exchange: where ("all", "part1", "fsdp"), what, and what a rank needs to know to take part in it."""


class CollectiveLog:
    """The exchanges of one round: from a batch's begin to its first vote, or from one vote to the next.

    Attributes:
        is_open: a batch is in hand.
        number: of the round; the same on all ranks.
        is_inside: the latest exchange has been entered, and not left.
        lost: why this round cannot be finished on some rank; empty while it can.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.number = 0
        self.is_inside = False
        self.lost = ""
        self._steps: list[str | None] = []
        self._tell: Callable[[int, str], None] | None = None
        self._lock = threading.Lock()

    @property
    def position(self) -> int:
        """How many exchanges the round has had here."""
        return len(self._steps)

    @property
    def is_told(self) -> bool:
        """Do others hear of each step?"""
        return self._tell is not None

    def open(self) -> None:
        """A batch begins."""
        self.turn()
        self.is_open = True

    def turn(self) -> None:
        """The next round begins."""
        with self._lock:
            self._steps, self._tell = [], None
            self.number += 1
            self.is_inside = False

    def close(self) -> None:
        """No batch is in hand."""
        self.is_open = False

    def note(self, *step: Any) -> None:
        """This exchange is entered next; `passed` follows."""
        if not self.is_open:
            return
        text = json.dumps(step)
        with self._lock:
            self.is_inside = True
            self._steps.append(text)
            if self._tell is not None:
                self._tell(len(self._steps) - 1, text)

    def passed(self) -> None:
        """The latest exchange has been left."""
        self.is_inside = False

    def skip(self) -> None:
        """None of those with whom this rank would have had this exchange has it."""
        with self._lock:
            self._steps.append(None)

    def tell(self, number: int, listener: Callable[[int, str], None]) -> None:
        """Tell the steps of this round, and those that will follow; one that is over stays untold."""
        with self._lock:
            if number != self.number or self._tell is not None:
                return
            for index, step in enumerate(self._steps):
                if step is not None:
                    listener(index, step)
            self._tell = listener


def read(text: str | bytes) -> Step:
    """A step as it was noted."""
    found: Step = json.loads(text)
    return found


def is_vote(step: Sequence[Any]) -> bool:
    """Does it end the round?"""
    return step[1:3] == ["numbers", VOTE]


@dataclass(frozen=True)
class LedgerEntry:
    """One collective: its number in this ledger, its kind, the user's line; its number in the pulse."""

    sequence: int
    operation: str
    call_site: str
    number: int


class CollectiveLedger:
    """Numbers the collectives of a group, and enters them into the pulse."""

    def __init__(self) -> None:
        self.sequence = 0

    def record(self, operation: str) -> LedgerEntry:
        """Note that a collective is entered now."""
        self.sequence += 1
        site = call_site()
        return LedgerEntry(self.sequence, operation, site, pulse.own().enter(operation, site))

    def leave(self, entry: LedgerEntry) -> None:
        """Note that all ranks have come to this collective: those of its parts that follow cannot miss one."""
        pulse.own().leave(entry.number)
