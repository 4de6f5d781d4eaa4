"""Find out why a run on several processes differs from the single-process run, or why its ranks differ."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from headway.common.text import join_names
from headway.verify.blame import Blame
from headway.verify.causes import Cause, explain_parts
from headway.verify.compare import RunDifference, find_different_numbers
from headway.verify.part_blame import blame_parts
from headway.verify.record_types import UpdateRecord
from headway.verify.records import RunRecord


def find_cause(
    reference: RunRecord,
    other: RunRecord,
    run_difference: RunDifference,
    *,
    is_layout_only: bool,
    depends_on_padding: bool,
) -> Cause:
    """Return the likely cause of a difference between the single-process run and a run on several processes.

    Causes with strong evidence come first: parameters with a gradient in only one run, the first torch call that
    differs, and lines that change gradients too early. The others are guesses from the size of the difference, the
    model's modules and the names of the parameters that differ.

    Args:
        reference: Single-process run.
        other: Run that differs.
        run_difference: First difference beyond the tolerance.
        is_layout_only: Whether the run on several processes without the layout agrees with the single-process run.
        depends_on_padding: Whether the model's outputs for real tokens change with the padding.
    """
    difference = run_difference.difference
    update = difference.update
    if is_layout_only:
        return _find_cause_of_layout(reference, other, run_difference)
    if difference.one_sided:
        return Cause(
            f"{join_names(run_difference.parameters, 3)} has a gradient only on one process, or only on several: the loop depends on "
            "their number",
            "remove conditions on the rank or on the number of processes from the loss",
            "several_models.md",
        )
    if not run_difference.is_before_step:
        return _find_cause_of_step(reference, other, update)
    blame = blame_ranks(reference, other, update)
    if blame is not None:
        return explain_blame(other, blame, update)
    lines = _list_gradient_lines(other, update, is_early=True)
    if lines:
        return Cause(
            f"{join_names(lines, 3)} changes gradients before all micro-batches of the update are added up, so each rank changes "
            "its own",
            "change or clip gradients only if accelerator.sync_gradients is true: use accelerator.clip_grad_norm_()",
            "accumulation.md",
        )
    if difference.is_proportional:
        factor = difference.factor
        text = f"1/{1 / factor:.3g}" if 0 < factor < 1 else f"{factor:.3g}"
        return Cause(
            f"all gradients are {text} times those of one process: a loss is a sum, or is multiplied or divided by a number "
            f"of processes, rows or steps",
            "let the loss be a mean over the rows of its batch (or pass weight= or reduction='sum' to accelerator.backward), and do "
            "not scale it by num_processes",
            "accumulation.md",
        )
    return _guess_cause(other, run_difference, depends_on_padding=depends_on_padding)


def _guess_cause(other: RunRecord, run_difference: RunDifference, *, depends_on_padding: bool) -> Cause:
    """Return a cause for gradients that differ, although the recorded torch calls agree or were not recorded.

    Args:
        other: Run on several processes.
        run_difference: First difference beyond the tolerance.
        depends_on_padding: Whether the model's outputs for real tokens change with the padding.
    """
    batch_norms = other.rank0_facts.batch_norms
    if batch_norms:
        return Cause(
            f"{batch_norms[0]} is a BatchNorm that normalizes over the rows of one rank only",
            "use GroupNorm, or on GPUs convert the model before prepare(): "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which has no CPU kernel",
            "troubleshooting.md",
        )
    lines = _list_gradient_lines(other, run_difference.difference.update)
    if lines:
        return Cause(
            f"{join_names(lines, 3)} changes gradients, and not in the same way on several processes as on one",
            "change gradients only by values that are equal on all ranks, between backward and optimizer.step()",
            "several_models.md",
        )
    if depends_on_padding:
        return Cause(
            "the outputs depend on padding, and the ranks pad their rows to another length than one process",
            "pass the attention mask to the model, and leave padding out of sums and means",
            "verify.md#nothing-leaks",
        )
    # A wrong loss changes almost all gradients.
    if len(run_difference.parameters) < 0.5 * max(1, len(run_difference.difference.gradient_by_name)):
        return Cause(
            f"only {join_names(run_difference.parameters, 3)} differs: its gradient is not averaged over the ranks, or depends on "
            "one rank's rows",
            "use the parameter inside the forward of a prepared model, and the loss in accelerator.backward()",
            "several_models.md",
        )
    return Cause(
        f"the loss of one rank's rows is not a part of the loss of all rows ({other.num_processes} ranks)",
        "look for sums over the batch in the loss or the model: tokens counted per rank (pass weight=), contrastive losses "
        "(gather the others' features), statistics of the batch",
        "accumulation.md",
    )


def _find_cause_of_layout(reference: RunRecord, other: RunRecord, run_difference: RunDifference) -> Cause:
    """Return the cause of a difference that occurs only under the layout.

    Args:
        reference: Single-process run.
        other: Run under the layout.
        run_difference: First difference.
    """
    update = run_difference.difference.update
    blame = blame_ranks(reference, other, update) if run_difference.is_before_step else None
    # Tensor, pipeline and context parallelism make other calls by design.
    if blame is not None and (blame.kind != "path" or other.rank0_facts.strategy in ("fsdp", "hsdp")):
        return explain_blame(other, blame, update)
    lines, action = _list_gradient_lines(other, update), "changes gradients"
    if not run_difference.is_before_step:
        lines, action = _list_write_lines(_list_rank_updates(other, update)) or lines, "changes weights"
    suspects = f": {join_names(lines, 3)} {action}" if lines else ""
    return Cause(
        f"only this layout differs: code of the script reads or changes one rank's shard{suspects}",
        "look for to_local(), .data and norms of parameters or gradients in the loop: use accelerator.clip_grad_norm_(), and "
        "full_tensor() for values of full tensors",
        "fsdp.md",
    )


def _find_cause_of_step(reference: RunRecord, other: RunRecord, update: int) -> Cause:
    """Return the cause of a difference that arises in the optimizer step or after it.

    Args:
        reference: Single-process run.
        other: Run that differs.
        update: Number of the update that differs.
    """
    ours, theirs = reference.rank0_updates[update], other.rank0_updates[update]
    rates = find_different_numbers(ours.learning_rates, theirs.learning_rates)
    if rates is not None:
        lines = list(
            dict.fromkeys(line for each in range(1, update + 1) for line in other.rank0_updates[each].rate_lines)
        )
        optimizer_lines = [each["line"] for each in other.rank0_facts.optimizers if each["line"]]
        our_rate, their_rate = rates
        origin, advice = "", "do not multiply the rate by the number of processes"
        if lines:
            origin = f", set at {join_names(lines[-2:], 3)}"
            advice = (
                "let a scheduler tick once per update: scheduler_ticks='updates'; if the script sets the rate itself, count "
                "updates, or the samples and values of all ranks (accelerator.reduce)"
            )
        elif optimizer_lines:
            origin = f", set at {join_names(optimizer_lines, 3)}, where the optimizer is created"
        return Cause(
            f"the learning rate is {their_rate:.3g}, and {our_rate:.3g} on one process{origin}", advice, "schedules.md"
        )
    lines = _list_write_lines([ours, *_list_rank_updates(other, update)])
    suspects = f": {join_names(lines, 3)} changes weights" if lines else ""
    return Cause(
        f"the optimizer's step differs{suspects}",
        "change weights after the step alike on all ranks",
        "several_models.md",
    )


# -------------------------------------------------------------------- torch calls


def blame_ranks(reference: RunRecord, other: RunRecord, update: int) -> Blame | None:
    """Return an update's first torch call whose results on the ranks do not match its result in the single-process run.

    Return None if all results match.

    Args:
        reference: Single-process run.
        other: Run on several processes.
        update: Number of the update.
    """
    ranks_by_shard: dict[int, list[int]] = {}
    for rank, facts in enumerate(other.facts_by_rank):
        ranks_by_shard.setdefault(facts.data_shard_index, []).append(rank)
    groups = list(ranks_by_shard.values())
    num_choices = max(map(len, groups), default=0)
    if "tp" not in other.rank0_facts.strategy:
        num_choices = min(num_choices, 1)
    is_rounded = reference.rank0_facts.mixed_precision != "no"
    options: dict[str, Any] = {"tolerance": 0.05} if is_rounded else {}
    whole = reference.trace(0, update)
    blames = []
    # All ranks of a tensor-parallel group compute the same rows. So one rank of each group is compared, then another.
    for index in range(num_choices):
        ranks = [group[min(index, len(group) - 1)] for group in groups]
        blame = blame_parts(whole, [other.trace(rank, update) for rank in ranks], **options)
        if blame is not None:
            blames.append(blame)
    # A fault on one rank of a group also changes later calls on the group's other ranks, so the earliest call counts.
    order = [(call.line, call.func) for loss in whole for call in loss.calls]

    def find_position(blame: Blame) -> int:
        key = (blame.line, blame.call)
        return order.index(key) if key in order else len(order)

    return min(blames, key=find_position, default=None)


def explain_blame(other: RunRecord, blame: Blame, update: int) -> Cause:
    """Return the cause of a difference whose first torch call is known.

    If only some ranks run a line that explains the difference, this line is the cause.

    Args:
        other: Run on several processes.
        blame: First torch call that differs from the single-process run.
        update: Number of the update in which it differs.
    """
    is_accelerate = bool(other.rank0_facts.uses_accelerate_rules)
    return _find_lone_line(other, blame, update) or explain_parts(blame, "rank", is_accelerate=is_accelerate)


def _find_lone_line(other: RunRecord, blame: Blame, update: int) -> Cause | None:
    """Return the cause of a difference if it is a line that only some ranks run, else None.

    Such a line changes a model that was not passed to `prepare`, or draws from a global generator of Python or NumPy.

    Args:
        other: Run on several processes.
        blame: First torch call that differs from the single-process run.
        update: Number of the update in which it differs.
    """
    if blame.kind == "tensor":
        writes_by_rank = [_list_unprepared_writes(updates.values(), update) for updates in other.updates_by_rank]
        write = _find_lone_use(writes_by_rank)
        if write is not None:
            return Cause(
                f"only {write.ranks} changes the weights of {write.name}: {write.line}",
                "change them on every rank alike, without a condition on the rank",
                "several_models.md",
            )
    if blame.kind in ("number", "draw", "path", "tensor"):
        draws_by_rank = [set(facts.global_draw_lines.items()) for facts in other.facts_by_rank]
        draw = _find_lone_use(draws_by_rank)
        if draw is not None:
            reason = explain_parts(blame, "rank").reason
            return Cause(
                f"only {draw.ranks} draws from {draw.name}() at {draw.line}, so the ranks draw other random numbers afterwards: "
                f"{reason}",
                "draw on every rank alike, or from a generator of its own, such as random.Random(0)",
                "several_models.md",
            )
    return None


def _list_unprepared_writes(updates: Iterable[UpdateRecord], end: int) -> set[tuple[str, str]]:
    """Return (script line, model) for each in-place change of an unprepared model in the updates before number `end`."""
    return {
        (line, name)
        for update in updates
        if update.number < end
        for name, lines in update.unprepared_write_lines.items()
        for line in lines
    }


class _LoneUse(NamedTuple):
    """Script line that only some of the ranks have run.

    Attributes:
        line: Line of the script.
        name: Name of the function or model that the line uses or changes.
        ranks: Text with the numbers of these ranks, such as "rank 0".
    """

    line: str
    name: str
    ranks: str


def _find_lone_use(uses_by_rank: list[set[tuple[str, str]]]) -> _LoneUse | None:
    """Return the first script line, in the order of their text, that only some ranks have run. None if there is none.

    Args:
        uses_by_rank: For each rank, pairs of a script line and the name of what the line uses or changes.
    """
    for line, name in sorted(set().union(*uses_by_rank)):
        ranks = [rank for rank, uses in enumerate(uses_by_rank) if (line, name) in uses]
        if len(ranks) < len(uses_by_rank):
            return _LoneUse(line, name, f"rank {join_names([str(rank) for rank in ranks], 3)}")
    return None


# -------------------------------------------------------------------- lines that change tensors


def _list_gradient_lines(other: RunRecord, update: int, *, is_early: bool = False) -> list[str]:
    """Return the lines of the script that changed gradients up to an update.

    Args:
        other: Run on several processes.
        update: Number of the last update to examine.
        is_early: Whether to return only lines that changed gradients before the last backward pass of an update.
            Default: False.
    """
    changing_lines: dict[str, None] = {}  # a set of lines in order
    for updates in other.updates_by_rank:
        for each in updates.values():
            for line, num_backwards in each.gradient_lines.items():
                if each.number <= update and not (is_early and min(num_backwards) >= len(each.losses)):
                    changing_lines[line] = None
    return list(changing_lines)


def _list_write_lines(updates: Iterable[UpdateRecord]) -> list[str]:
    """Return the lines of the script that changed parameters or buffers in place in any of the updates."""
    return list(dict.fromkeys(line for each in updates for lines in each.write_lines.values() for line in lines))


def _list_rank_updates(other: RunRecord, update: int) -> list[UpdateRecord]:
    """Return the records of all ranks about one update, in the order of ranks. Ranks without a record are left out."""
    return [updates[update] for updates in other.updates_by_rank if update in updates]


# -------------------------------------------------------------------- ranks that differ


class DivergedReplica(NamedTuple):
    """Parameter whose value on a rank differs from its value on rank 0.

    Attributes:
        update: Number of the update after which it differs.
        parameter: Name of the parameter.
        rank: Global rank.
    """

    update: int
    parameter: str
    rank: int


def find_diverged_replica(record: RunRecord) -> DivergedReplica | None:
    """Return the first parameter whose value on a rank differs from that on rank 0, or None if there is none."""
    for number, update in sorted(record.rank0_updates.items()):
        for rank, updates in enumerate(record.updates_by_rank[1:], 1):
            theirs = updates[number].parameter_hashes if number in updates else {}
            for name, value in update.parameter_hashes.items():
                if theirs.get(name, value) != value:
                    return DivergedReplica(number, name, rank)
    return None


def describe_replica_write(other: RunRecord, reason: str) -> str | None:
    """Return a phrase about the in-place change that explains why replicas differ, such as "weight at train.py:3".

    The phrase contains the rank if only one rank runs the line. Otherwise all ranks write, but different values, for
    example because each rank seeds its generator differently. Return None if no such change is known.

    Args:
        other: Run that failed.
        reason: Error of the failed run, which names the parameters that differ.
    """
    if "replicas of the model are not alike" not in reason:
        return None
    lines_by_rank = _collect_write_lines(other)
    for rank, lines_by_name in enumerate(lines_by_rank):
        others = lines_by_rank[:rank] + lines_by_rank[rank + 1 :]
        for name, lines in lines_by_name.items():
            if f" {name} on rank" not in reason or not lines:
                continue
            lines_of_others = {line for each in others for line in each.get(name, ())}
            lone_lines = lines - lines_of_others
            if lone_lines:
                return f"{name} at {min(lone_lines)} on rank {rank}"
            return f"{name} at {min(lines)}"
    return None


def _collect_write_lines(record: RunRecord) -> list[dict[str, set[str]]]:
    """Return, for each rank, the script lines that change a tensor in place, by the name of the tensor.

    Changes before the first update are included.
    """
    lines_by_rank = []
    for facts, updates in zip(record.facts_by_rank, record.updates_by_rank, strict=False):
        lines_by_name: dict[str, set[str]] = {}
        recorded = [facts.write_lines]
        recorded += [update.write_lines for update in updates.values()]
        for each in recorded:
            for name, lines in each.items():
                lines_by_name.setdefault(name, set()).update(lines)
        lines_by_rank.append(lines_by_name)
    return lines_by_rank


def describe_local_metric(other: RunRecord) -> str | None:
    """Return a line of text about a scheduler whose `step` gets a different metric on each rank, or None."""
    metrics_by_rank = [facts.scheduler_metrics for facts in other.facts_by_rank]
    for metrics in zip(*metrics_by_rank, strict=False):
        values = [each["value"] for each in metrics]
        if max(values) - min(values) > 1e-6 * max(map(abs, values)):
            texts = ", ".join(f"{value:.4g}" for value in values[:3])
            update, line = metrics[0]["update"], metrics[0]["line"]
            return (
                f"update {update}: the scheduler gets another value on each rank ({texts}) at {line}: a rank's own loss"
            )
    return None
