"""Proof that out-of-memory errors are harmless: the failed batch is repeated in micro-batches, with an equal result."""

from headway.verify.causes import Cause, explain_parts
from headway.verify.compare import find_first_difference
from headway.verify.part_blame import blame_parts
from headway.verify.record_types import LossEntry
from headway.verify.records import RunRecord
from headway.verify.verdict import RunSet, Verdict, describe_failure

KEY, TITLE = "out_of_memory", "out of memory is harmless"
PAGE = "microbatching.md"


def check_out_of_memory(runs: RunSet) -> Verdict:
    """Return the verdict on a run with one injected out-of-memory error, compared with a run without errors."""
    baseline, replayed = runs.baseline, runs.replayed
    if not baseline.rank0_facts.get("replays_batches"):
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
    if not replayed.rank0_facts.get("failed_backward"):
        return Verdict(KEY, TITLE, "NOT CHECKED", "the injected failure did not happen in these updates")
    if not replayed.is_complete:
        return Verdict(
            KEY, TITLE, "FAIL", f"the run ends: {describe_failure(replayed)}", (),
            "loop over accelerator.microbatches(batch), with forward and backward inside", PAGE,
        )  # fmt: skip
    if baseline.rank0_facts.get("batch_norms"):
        return Verdict(
            KEY, TITLE, "NOT CHECKED", "BatchNorm normalizes over the rows of a piece, so that pieces differ by design"
        )
    found, num_updates, largest = find_first_difference(baseline, replayed, runs.reordered)
    if found is None:
        return Verdict(
            KEY,
            TITLE,
            "PASS",
            f"a batch failed and was run again in pieces; {num_updates} updates agree up to {largest:.0e}",
        )
    if baseline.draws_random_numbers:
        return Verdict(KEY, TITLE, "NOT CHECKED", "pieces draw other random numbers than the whole batch, by design")
    details = (
        f"update {found.difference.update}: gradients differ by {found.difference.gradient:.2g} of their size",
        f"first parameter: {found.first_parameter}",
    )
    cause = _find_cause(baseline, replayed, found.difference.update)
    if cause is not None:
        reason = f"the batch that ran in pieces gave another update: {cause.reason}"
        return Verdict(KEY, TITLE, "FAIL", reason, details, cause.advice, cause.page)
    return Verdict(
        KEY, TITLE, "FAIL", "the batch that ran in pieces gave another update", details,
        "the loss must be a mean over the rows of a piece, or get weight= (a number of tokens); keep state out of the loop "
        "over pieces",
        PAGE,
    )  # fmt: skip


def _find_cause(baseline: RunRecord, replayed: RunRecord, update: int) -> Cause | None:
    """Return the cause of a difference between a whole batch and its micro-batches, or None.

    The torch calls behind the loss of the whole batch are compared with those behind the losses of the micro-batches.

    Args:
        baseline: Run without errors.
        replayed: Run with the injected error, which ran the failed batch again in micro-batches.
        update: Number of the update.
    """
    micro_batches = replayed.trace(0, update)
    for whole in baseline.trace(0, update):
        parts: list[LossEntry] = []
        while micro_batches and sum(map(_count_rows, parts)) < _count_rows(whole):
            parts.append(micro_batches.pop(0))
        blame = blame_parts([whole], [[part] for part in parts])
        if blame is not None:
            return explain_parts(blame, "piece")
    return None


def _count_rows(loss: LossEntry) -> int:
    """Return the number of rows of the first tensor that was recorded for a loss; 1 if no tensor has rows.

    Parameters and buffers are left out.
    """
    for call in loss["calls"]:
        if call.get("shape") and not call.get("model_tensor"):
            return call["shape"][0]
    return 1
