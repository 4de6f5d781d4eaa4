"""Log of the current batch's collectives, from which a rank that runs out of memory can join those of its peers.

With sharded layouts, a forward contains many collectives. A rank that runs out of memory between them cannot know
which ones its peers have yet to run. All ranks run them in the same order. Each rank records a collective in this log
just before it starts. The records are sent to other ranks only on request.

A round is the part of a batch between two votes. In a vote, the ranks agree whether all of them have succeeded.

This module does not import torch.
"""

import json
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

VOTE = "vote"
"""Name of a vote, in which the ranks agree whether all of them have succeeded so far in the batch.

A vote is recorded with the operation "numbers", like all exchanges of numbers. This name is the first of its values.
"""


class RecordedCollective(NamedTuple):
    """A recorded collective.

    Attributes:
        group: Name of the process group, such as "all", "part1" or "fsdp".
        operation: Kind of collective: "numbers" (an exchange of numbers), "in place" (a sum or broadcast of tensors), or
            an operation of `fully_shard` such as "gather".
        values: Values that a rank needs to take part, such as sizes and dtypes. Their meaning depends on the operation.
    """

    group: str
    operation: str
    values: list[Any]


class CollectiveLog:
    """Log of the collectives that this rank has entered in the current round of a batch.

    The first round begins with the batch. Each vote, in which the ranks agree whether all have succeeded, ends a round.

    Attributes:
        is_open: Whether a batch is being processed.
        number: Number of the current round, equal on all ranks.
        is_in_collective: Whether this rank is inside the latest collective.
        lost: Reason why some rank cannot finish this round; empty while all ranks can.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.number = 0
        self.is_in_collective = False
        self.lost = ""
        self._records: list[str | None] = []  # collectives of this round as JSON; None for one that was skipped
        self._listener: Callable[[int, str], None] | None = None  # receives (position, JSON) of each collective
        self._lock = threading.Lock()

    @property
    def position(self) -> int:
        """Number of collectives that this rank has recorded or skipped in the current round (since the last vote)."""
        return len(self._records)

    @property
    def has_listener(self) -> bool:
        """Whether a function that receives each collective is registered for the current round."""
        return self._listener is not None

    def begin_batch(self) -> None:
        """Start recording the collectives of a new batch."""
        self.begin_round()
        self.is_open = True

    def begin_round(self) -> None:
        """Clear the recorded collectives and the listener, because a new round of the batch begins after a vote."""
        with self._lock:
            self._records = []
            self._listener = None
            self.number += 1
            self.is_in_collective = False

    def end_batch(self) -> None:
        """Stop recording collectives, because the batch has ended."""
        self.is_open = False

    def record_entry(self, group: str, operation: str, *values: Any) -> None:
        """Record the collective that is about to be entered. Call `record_exit` after the collective.

        Do nothing if no batch is being processed.

        Args:
            group: Name of the process group.
            operation: Kind of collective.
            values: Values that a rank needs to take part, as in `RecordedCollective.values`. They must be JSON values.
        """
        if not self.is_open:
            return
        text = json.dumps([group, operation, *values])
        with self._lock:
            self.is_in_collective = True
            self._records.append(text)
            if self._listener is not None:
                self._listener(len(self._records) - 1, text)

    def record_exit(self) -> None:
        """Record that this rank has left the latest collective."""
        self.is_in_collective = False

    def skip_collective(self) -> None:
        """Count a collective that does not take place, because all ranks of its group skip it."""
        with self._lock:
            self._records.append(None)

    def add_listener(self, number: int, listener: Callable[[int, str], None]) -> None:
        """Pass every collective of a round to `listener`: those already recorded now, later ones when recorded.

        A round is the part of a batch between two votes. This method does nothing if the round is over or already
        has a listener.

        Args:
            number: Number of the round.
            listener: Function that is called with a collective's index in the round and its record as JSON text.
        """
        with self._lock:
            if number != self.number or self._listener is not None:
                return
            for index, text in enumerate(self._records):
                if text is not None:  # None: a skipped collective
                    listener(index, text)
            self._listener = listener


def parse_record(text: str | bytes) -> RecordedCollective:
    """Return the collective that a record of `CollectiveLog` describes.

    Args:
        text: Record as JSON text, as `CollectiveLog` passes it to its listener.
    """
    group, operation, *values = json.loads(text)
    return RecordedCollective(group, operation, values)


def is_vote(step: RecordedCollective) -> bool:
    """Whether a recorded collective is a vote, in which the ranks agree whether all of them have succeeded so far."""
    return step.operation == "numbers" and step.values[:1] == [VOTE]
