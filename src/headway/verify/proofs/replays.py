"""Proof that out-of-memory errors are harmless: the failed batch is repeated in micro-batches, with an equal result."""

from headway.verify.causes import Cause, explain_parts
from headway.verify.compare import find_first_difference
from headway.verify.part_blame import blame_parts
from headway.verify.record_types import LossEntry
from headway.verify.records import RunRecord
from headway.verify.verdict import Proof, RunSet, Verdict, describe_failure

_PROOF = Proof("out_of_memory", title="out of memory is harmless", page="microbatching.md")


def check_out_of_memory(runs: RunSet) -> Verdict:
    """Return the verdict on a run with one injected out-of-memory error, compared with a run without errors."""
    baseline, replayed = runs.baseline, runs.replayed
    if not baseline.rank0_facts.replays_batches:
        return _PROOF.report_unchecked(
            'the script does not use Accelerator(microbatching="auto"): it would end', page=_PROOF.page
        )
    if replayed is None:
        return _PROOF.report_unchecked("the run was not made")
    if not replayed.rank0_facts.failed_backward:
        return _PROOF.report_unchecked("the injected failure did not happen in these updates")
    if not replayed.is_complete:
        return _PROOF.report_failure(
            f"the run ends: {describe_failure(replayed)}",
            advice="loop over accelerator.microbatches(batch), with forward and backward inside",
        )
    if baseline.rank0_facts.batch_norms:
        return _PROOF.report_unchecked(
            "BatchNorm normalizes over the rows of a micro-batch, so that micro-batches differ by design"
        )
    comparison = find_first_difference(baseline, replayed, runs.reordered)
    run_difference = comparison.first_difference
    if run_difference is None:
        return _PROOF.report_pass(
            f"a batch failed and was replayed in micro-batches; {comparison.num_updates} updates agree up to {comparison.largest:.0e}"
        )
    if baseline.draws_random_numbers:
        return _PROOF.report_unchecked("micro-batches draw other random numbers than the full batch, by design")
    difference = run_difference.difference
    details = (
        f"update {difference.update}: gradients differ by {difference.gradient:.2g} of their size",
        f"first parameter: {run_difference.first_parameter}",
    )
    cause = _find_cause(baseline, replayed, difference.update)
    if cause is not None:
        reason = f"the batch that ran in micro-batches gave another update: {cause.reason}"
        return _PROOF.report_failure(reason, details=details, advice=cause.advice, page=cause.page)
    return _PROOF.report_failure(
        "the batch that ran in micro-batches gave another update",
        details=details,
        advice="the loss must be a mean over the rows of a micro-batch, or get weight= (a number of tokens); keep state out of the "
        "loop over micro-batches",
    )


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
    for call in loss.calls:
        if call.shape and not call.model_tensor:
            return call.shape[0]
    return 1
