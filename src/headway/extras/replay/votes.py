"""Votes on a batch that may be replayed: the numbers that all ranks gather to learn whether each has succeeded."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """Point of a batch at which a rank votes, that is, reports whether its batch has succeeded so far.

    GRADIENTS: all micro-batches of the accumulation window have run. STEP: the optimizer step cannot run out of memory
    any more. END: all micro-batches have run, and the batch does not end its window. FAILED: memory ran out.
    """

    GRADIENTS = 0
    STEP = 1
    END = 2
    FAILED = 3


class Vote(NamedTuple):
    """Numbers that one rank reports in a vote. They are gathered as floats.

    Attributes:
        phase: `Phase` of the rank.
        smaller_size: Rows per micro-batch that a failed rank wants to try next. 0 if none are smaller, -1 if the rank has
            not failed.
        max_piece_rows: Rows of the rank's largest micro-batch in this batch.
        predicted_rows: Largest number of rows per micro-batch that is predicted to fit. 0 if no prediction is due, -1 if
            the memory is not measured.
        is_thrashing: Whether the device's allocator repeatedly has to empty its cache.
        batch_rows: Rows of the rank's whole batch.
        loss_weight: Sum of the weights of the rank's losses. Only at GRADIENTS.
        num_gaps: Number of parameters without a gradient. Only at GRADIENTS.
        data_shard: Index of the data shard that the rank reads. Only at GRADIENTS.
        has_given_weights: Whether the script passed `weight=` to a backward of the window. Only at GRADIENTS.
        has_default_weights: Whether the script passed no weight to a backward of the window. Only at GRADIENTS.
    """

    phase: float
    smaller_size: float
    max_piece_rows: float
    predicted_rows: float
    is_thrashing: float
    batch_rows: float
    loss_weight: float = 0.0
    num_gaps: float = 0.0
    data_shard: float = 0.0
    has_given_weights: float = 0.0
    has_default_weights: float = 0.0


class VoteResult(NamedTuple):
    """Numbers from a vote, over all ranks, from which the next micro-batch size is chosen.

    Attributes:
        max_piece_rows: Rows of the largest micro-batch on any rank. Default: 1.
        batch_rows: Rows of the largest whole batch on any rank. Default: 1.
        predicted_rows: Number of rows per micro-batch that is predicted to fit into the memory of every rank. 0 if no
            prediction was due or not even one row fits. None (the default) if some rank's memory is not measured.
        is_on_step: Whether the vote was on an optimizer step. Default: False.
    """

    max_piece_rows: int = 1
    batch_rows: int = 1
    predicted_rows: int | None = None
    is_on_step: bool = False

    @classmethod
    def from_votes(cls, votes: Sequence[Vote], phase: Phase) -> "VoteResult":
        """Combine the votes of all ranks at a point of the batch into one result, which is equal on all ranks.

        Args:
            votes: Vote of each rank.
            phase: Point of the batch at which the ranks voted.
        """
        predicted_rows = int(min(vote.predicted_rows for vote in votes))
        return cls(
            max_piece_rows=int(max(vote.max_piece_rows for vote in votes)),
            batch_rows=int(max(vote.batch_rows for vote in votes)),
            predicted_rows=None if predicted_rows < 0 else predicted_rows,
            is_on_step=phase == Phase.STEP,
        )
