"""Proof that out-of-memory errors are harmless: the failed batch is repeated in micro-batches, with an equal result."""

from typing import Any

from headway.verify.blame import blame_parts
from headway.verify.causes import Cause, explain_parts
from headway.verify.compare import find_first_difference
from headway.verify.records import RunRecord
from headway.verify.verdict import RunSet, Verdict, describe_failure

KEY, TITLE = "out_of_memory", "out of memory is harmless"
PAGE = "microbatching.md"


def check_out_of_memory(runs: RunSet) -> Verdict:
    """Return the verdict on a run with one injected out-of-memory error, compared with a run without errors."""
    first, replayed = runs.first, runs.replayed
    if not first.fact.get("microbatching"):
        return Verdict(
            KEY,
            TITLE,
            "NOT CHECKED",
            'the script does not use Accelerator(microbatching="auto"): it would end',
            (),
            "",
            PAGE,
        )
    if replayed is None:
        return Verdict(KEY, TITLE, "NOT CHECKED", "the run was not made")
    if not replayed.fact.get("failed"):
        return Verdict(KEY, TITLE, "NOT CHECKED", "the injected failure did not happen in these updates")
    if not replayed.is_complete:
        return Verdict(
            KEY, TITLE, "FAIL", f"the run ends: {describe_failure(replayed)}", (),
            "loop over accelerator.microbatches(batch), with forward and backward inside", PAGE,
        )  # fmt: skip
    if first.fact.get("norms"):
        return Verdict(
            KEY, TITLE, "NOT CHECKED", "BatchNorm normalizes over the rows of a piece, so that pieces differ by design"
        )
    found, num, largest = find_first_difference(first, replayed, runs.reordered)
    if found is None:
        return Verdict(
            KEY, TITLE, "PASS", f"a batch failed and was run again in pieces; {num} updates agree up to {largest:.0e}"
        )
    if first.fact.get("drawn") or first.fact.get("num_dropped") or first.fact.get("num_dropouts"):
        return Verdict(KEY, TITLE, "NOT CHECKED", "pieces draw other random numbers than the whole batch, by design")
    details = (
        f"update {found.difference.update}: gradients differ by {found.difference.gradient:.2g} of their size",
        f"first parameter: {found.parameter}",
    )
    cause = _find_cause(first, replayed, found.difference.update)
    if cause is not None:
        reason = f"the batch that ran in pieces gave another update: {cause.reason}"
        return Verdict(KEY, TITLE, "FAIL", reason, details, cause.advice, cause.page)
    return Verdict(
        KEY, TITLE, "FAIL", "the batch that ran in pieces gave another update", details,
        "the loss must be a mean over the rows of a piece, or get weight= (a number of tokens); keep state out of the loop "
        "over pieces",
        PAGE,
    )  # fmt: skip


def _find_cause(first: RunRecord, replayed: RunRecord, update: int) -> Cause | None:
    """Return the cause of a difference between a whole batch and its micro-batches, or None.

    The torch calls behind the loss of the whole batch are compared with those behind the losses of the micro-batches.

    Args:
        first: Run without errors.
        replayed: Run with the injected error, which ran the failed batch again in micro-batches.
        update: Number of the update.
    """
    wholes, pieces = first.trace(0, update), replayed.trace(0, update)
    for whole in wholes:
        parts: list[dict[str, Any]] = []
        while pieces and sum(map(_count_rows, parts)) < _count_rows(whole):
            parts.append(pieces.pop(0))
        blame = blame_parts([whole], [[each] for each in parts])
        if blame is not None:
            return explain_parts(blame, "piece")
    return None


def _count_rows(loss: dict[str, Any]) -> int:
    """Return the number of rows of the first tensor that was recorded for a loss; 1 if no tensor has rows.

    Parameters and buffers are left out.
    """
    return next((call["shape"][0] for call in loss["calls"] if call.get("shape") and not call.get("own")), 1)
