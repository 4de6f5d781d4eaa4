"""Proofs that the number of processes and the layout do not change the result of training."""

from dataclasses import dataclass

from headway.common.text import join_names
from headway.verify.compare import RunDifference, find_first_difference
from headway.verify.proofs.rank_causes import (
    blame_ranks,
    describe_local_metric,
    describe_replica_write,
    explain_blame,
    find_cause,
    find_diverged_replica,
)
from headway.verify.proofs.samples import explain_other_contents, have_equal_contents, list_fetch_generators
from headway.verify.records import RunRecord
from headway.verify.sample_counts import count_rows
from headway.verify.verdict import Proof, RunSet, Verdict, describe_failure


def check_processes(runs: RunSet) -> Verdict:
    """Return the verdict on whether runs on one and on several processes compute equal results at equal batch sizes.

    The batch size is that of the global batch, which the processes share.
    """
    name = f"{runs.num_processes} processes"
    return _compare_runs(Proof("processes", title=f"same result on {name}"), runs, runs.several, name)


def check_layout(runs: RunSet) -> Verdict:
    """Return the verdict on whether the single-process run and a run under the user's layout compute equal results.

    If no layout was given, a layout other than DDP that the script itself chose is judged. Without either, the verdict
    is NOT CHECKED.
    """
    if runs.layout_name:
        name, record = runs.layout_name, runs.layout
    else:
        name = runs.several.rank0_facts.strategy if runs.several is not None else ""
        record = runs.several
    if name in ("", "ddp", "single") and not runs.layout_name:
        proof = Proof("layout", title="same result under the layout")
        return proof.report_unchecked("no layout was given, such as --strategy fsdp")
    return _compare_runs(Proof("layout", title=f"same result under {name}"), runs, record, name)


@dataclass(frozen=True)
class _Comparison:
    """Comparison of a run on several processes with the single-process run.

    Attributes:
        proof: Proof that makes the comparison.
        runs: Records of all runs.
        reference: Single-process run.
        other: Run on several processes.
        name: Description of the other run, such as "2 processes".
    """

    proof: Proof
    runs: RunSet
    reference: RunRecord
    other: RunRecord
    name: str


def _compare_runs(proof: Proof, runs: RunSet, other: RunRecord | None, name: str) -> Verdict:
    """Compare the single-process run with another run, and return the verdict.

    Args:
        proof: Proof that makes the comparison.
        runs: Records of all runs.
        other: Run to compare, or None if it was not made.
        name: Description of the other run, such as "2 processes".
    """
    reference = runs.reference
    if other is None or reference is None or not reference.rank0_updates:
        return proof.report_unchecked("the script did not run on several processes")
    comparison = _Comparison(proof, runs, reference, other, name)
    if "deepspeed" in other.rank0_facts.strategy:
        return proof.report_unchecked("DeepSpeed keeps gradients and parameters in buffers of its own")
    batch_size = other.rank0_facts.indivisible_batch_size
    if batch_size:
        return proof.report_unchecked(
            f"the batch size {batch_size} is no multiple of {other.num_processes}: processes cannot share it",
            advice="give the script a batch size that is, or verify with another -n",
        )
    if not other.is_complete:
        return _judge_failure(comparison)
    reason = describe_local_metric(other)
    if reason is not None:
        return proof.report_failure(
            reason,
            advice="pass the mean over all ranks: scheduler.step(accelerator.reduce(loss, 'mean').item())",
            page="schedules.md",
        )
    replica = find_diverged_replica(other)
    if replica is not None:
        initial_hashes = {facts.initial_hashes.get(replica.parameter) for facts in other.facts_by_rank}
        details: tuple[str, ...] = ()
        if len(initial_hashes) > 1:
            details = ("it differs before the first update: the ranks build different models",)
        return proof.report_failure(
            f"update {replica.update}: {replica.parameter} differs between rank 0 and rank {replica.rank}",
            details=details,
            advice="every rank must make the same updates: compute losses and change weights on all ranks alike, and call "
            "accelerator.backward()",
            page="several_models.md",
        )
    if other.last_update < reference.last_update and other.rank0_facts.end_reason != "enough":
        return proof.report_failure(
            f"{name}: {other.last_update} updates, but {reference.last_update} on one process",
            advice="the number of updates must not depend on the number of processes",
            page="data.md",
        )
    result = find_first_difference(reference, other, runs.reordered)
    if result.first_difference is None:
        return proof.report_pass(
            f"{result.num_updates} updates agree: gradients and parameters differ by at most {result.largest:.0e} of their size"
        )
    return _judge_difference(comparison, result.first_difference)


def _judge_failure(comparison: _Comparison) -> Verdict:
    """Return the verdict on a run on several processes that ended with an error or made no progress."""
    other, name = comparison.other, comparison.name
    reason = describe_failure(other)
    if "split_batches=True shares each batch" in other.output:
        return comparison.proof.report_unchecked(
            "the batch size is not a multiple of the number of processes",
            details=(reason,),
            advice="give the script a batch size that is, or headway verify another number of processes (-n)",
        )
    if "UnsupportedError" in reason or "ConfigError" in reason:
        return comparison.proof.report_unchecked(f"{name}: {reason}")
    change = describe_replica_write(other, reason)
    if change is not None:
        return comparison.proof.report_failure(
            f"the replicas on {name} are not alike: the script changes {change}",
            details=(reason,),
            advice="change weights on all ranks alike, with the same random numbers, or before prepare()",
            page="several_models.md",
        )
    updates = [update for by_number in other.updates_by_rank for update in by_number.values()]
    rate_lines = list(dict.fromkeys(line for update in updates for line in update.rate_lines))
    if rate_lines and "optimizers of the ranks are not alike: 'lr'" in reason:
        return comparison.proof.report_failure(
            f"the ranks on {name} set other learning rates at {join_names(rate_lines[-2:], 3)}",
            details=(reason,),
            advice="decide by a value that is equal on all ranks, such as accelerator.reduce(loss.detach(), 'mean')",
            page="schedules.md",
        )
    if "differ between ranks" in reason or "are not alike" in reason:
        update = other.last_update + 1
        blame = blame_ranks(comparison.reference, other, update)
        if blame is not None:
            cause = explain_blame(other, blame, update)
            return comparison.proof.report_failure(
                cause.reason, details=(reason,), advice=cause.advice, page=cause.page
            )
    last_lines = tuple(line for line in other.output.splitlines()[-8:] if line.strip())
    if other.has_stalled:
        return comparison.proof.report_failure(
            f"the script hangs on {name}: {reason}",
            details=last_lines,
            advice="every rank must make the same calls in the same order",
            page="hangs.md",
        )
    return comparison.proof.report_failure(
        f"the script fails on {name}: {reason}",
        details=last_lines,
        advice="run it: headway launch with these flags",
        page="troubleshooting.md",
    )


def _judge_difference(comparison: _Comparison, run_difference: RunDifference) -> Verdict:
    """Return the verdict on a difference beyond the tolerance, with its likely cause.

    The verdict is NOT CHECKED if random numbers that differ between ranks by design can explain the difference.

    Args:
        comparison: Runs that differ.
        run_difference: First difference beyond the tolerance.
    """
    runs, reference, other = comparison.runs, comparison.reference, comparison.other
    update = run_difference.difference.update
    names = _find_different_start(reference, other)
    if names:
        return comparison.proof.report_failure(
            f"{join_names(names, 3)} has another value than on one process before the first update",
            advice="create weights before prepare(), from a seed that does not depend on the rank",
            page="several_models.md",
        )
    has_equal_samples = _has_equal_samples(reference, other, update)
    variation = None if has_equal_samples else explain_other_contents(reference, other)
    if variation is not None:
        return comparison.proof.report_unchecked(
            f"the samples are those of one process, but their contents vary ({variation}); the proof needs equal contents, for "
            "example without augmentation"
        )
    cause = find_cause(
        reference,
        other,
        run_difference,
        is_layout_only=other is runs.layout and _is_equal_without_layout(runs),
        depends_on_padding=_depends_on_padding(runs),
    )
    details = _describe_difference(run_difference)
    if comparison.proof.key == "processes" and _is_drawn_for_layout(runs, other, update):
        return comparison.proof.report_unchecked(
            f"{cause.reason}; under {runs.layout_name}, where all ranks have the same rows, the result is the same",
            details=(*details, cause.reason),
        )
    if not has_equal_samples:
        generators = list_fetch_generators(reference, reference.rank0_updates)
        if generators:
            reason = f"samples are drawn at random while they are fetched ({join_names(generators, 3)})"
            return comparison.proof.report_unchecked(reason, details=(*details, cause.reason))
        reason = "the ranks trained on other samples than one process"
        return comparison.proof.report_failure(
            reason, details=(*details, cause.reason), advice="see the proof of samples", page="data.md"
        )
    draw_lines = {
        **reference.rank0_facts.unshared_draw_lines,
        **other.rank0_facts.unshared_draw_lines,
    }
    # Other random numbers do not scale all gradients by the same factor.
    if draw_lines and not run_difference.difference.is_proportional:
        line, function = next(iter(draw_lines.items()))
        return comparison.proof.report_unchecked(
            f"{function}() at {line} draws other random numbers on each rank, by design",
            details=(*details, cause.reason),
        )
    return comparison.proof.report_failure(cause.reason, details=details, advice=cause.advice, page=cause.page)


def _describe_difference(run_difference: RunDifference) -> tuple[str, ...]:
    """Return one or two lines of text: the size of a difference, and the first parameter that differs."""
    difference = run_difference.difference
    if run_difference.is_before_step:
        size = f"{difference.gradient:.2g} of their size, allowed is {run_difference.tolerance.gradient:.1g}"
        line = f"update {difference.update}: gradients differ by {size}"
    else:
        line = f"update {difference.update}: gradients agree, but parameters differ after the step by {difference.movement:.2g}"
    return (line, f"first parameter: {run_difference.first_parameter}") if run_difference.first_parameter else (line,)


def _find_different_start(reference: RunRecord, other: RunRecord) -> list[str]:
    """Return the names of the parameters whose initial values differ by more than 1e-6 between the runs."""
    ours, theirs = reference.values(0), other.values(0)
    return [
        name
        for name, value in ours.items()
        if name in theirs and value.shape == theirs[name].shape and abs(value - theirs[name]).max(initial=0.0) > 1e-6
    ]


def _has_equal_samples(reference: RunRecord, other: RunRecord, update: int) -> bool:
    """Whether both runs trained on equal samples up to an update. Also True if no samples of this update are known."""
    return have_equal_contents(reference, other, range(1, update + 1)) or not count_rows(reference, update)


def _is_equal_without_layout(runs: RunSet) -> bool:
    """Whether the run on several processes without the layout agrees with the single-process run."""
    if runs.several is None or runs.reference is None or not runs.several.is_complete:
        return False
    return find_first_difference(runs.reference, runs.several, runs.reordered).first_difference is None


def _depends_on_padding(runs: RunSet) -> bool:
    """Whether the test for leaks has found that outputs for real tokens change with the padding."""
    entries = (runs.probed.rank0_facts.leak_entries or []) if runs.probed is not None else []
    return any(each["kind"] == "padding" and each["is_leak"] for each in entries)


def _is_drawn_for_layout(runs: RunSet, other: RunRecord, update: int) -> bool:
    """Whether a difference comes from random numbers that are equal on all ranks, as the user's layout requires.

    Under tensor parallelism, for example, all ranks of a group compute the same rows and must add the same noise to
    them. In a run without the layout, such a script adds this same noise to different rows on each rank.

    Args:
        runs: Records of all runs.
        other: Run on several processes without the layout.
        update: Number of the first update that differs.
    """
    layout, reference = runs.layout, runs.reference
    if layout is None or reference is None or not layout.is_complete:
        return False
    if len({facts.data_shard_index for facts in layout.facts_by_rank}) > 1:
        return False
    blame = blame_ranks(reference, other, update)
    if blame is None or blame.kind != "draw":
        return False
    return find_first_difference(reference, layout, runs.reordered).first_difference is None
