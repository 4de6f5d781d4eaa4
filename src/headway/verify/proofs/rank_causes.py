"""Find out why a run on several processes differs from the single-process run, or why its ranks differ."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from headway.common.text import join_names
from headway.verify.blame import Blame
from headway.verify.causes import Cause, explain_parts
from headway.verify.compare import RunDifference, find_different_numbers
from headway.verify.part_blame import blame_parts
from headway.verify.records import RunRecord, UpdateRecord


def find_cause(
    reference: RunRecord,
    other: RunRecord,
    found: RunDifference,
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
        found: First difference beyond the tolerance.
        is_layout_only: Whether the run on several processes without the layout agrees with the single-process run.
        depends_on_padding: Whether the model's outputs for real tokens change with the padding.
    """
    difference = found.difference
    update = difference.update
    if is_layout_only:
        return _find_cause_of_layout(reference, other, found)
    if difference.one_sided:
        return Cause(
            f"{join_names(found.parameters, 3)} has a gradient only on one process, or only on several: the loop depends on their "
            "number",
            "remove conditions on the rank or on the number of processes from the loss",
            "several_models.md",
        )
    if not found.is_before_step:
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
    return _guess_cause(other, found, depends_on_padding=depends_on_padding)


def _guess_cause(other: RunRecord, found: RunDifference, *, depends_on_padding: bool) -> Cause:
    """Return a cause for gradients that differ, although the recorded torch calls agree or were not recorded.

    Args:
        other: Run on several processes.
        found: First difference beyond the tolerance.
        depends_on_padding: Whether the model's outputs for real tokens change with the padding.
    """
    batch_norms = other.rank0_facts.get("batch_norms")
    if batch_norms:
        return Cause(
            f"{batch_norms[0]} is a BatchNorm that normalizes over the rows of one rank only",
            "use GroupNorm, or on GPUs convert the model before prepare(): "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which has no CPU kernel",
            "troubleshooting.md",
        )
    lines = _list_gradient_lines(other, found.difference.update)
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
    if len(found.parameters) < 0.5 * max(1, len(found.difference.gradient_by_name)):
        return Cause(
            f"only {join_names(found.parameters, 3)} differs: its gradient is not averaged over the ranks, or depends on one rank's "
            "rows",
            "use the parameter inside the forward of a prepared model, and the loss in accelerator.backward()",
            "several_models.md",
        )
    return Cause(
        f"the loss of one rank's rows is not a part of the loss of all rows ({other.num_processes} ranks)",
        "look for sums over the batch in the loss or the model: tokens counted per rank (pass weight=), contrastive losses "
        "(gather the others' features), statistics of the batch",
        "accumulation.md",
    )


def _find_cause_of_layout(reference: RunRecord, other: RunRecord, found: RunDifference) -> Cause:
    """Return the cause of a difference that occurs only under the layout.

    Args:
        reference: Single-process run.
        other: Run under the layout.
        found: First difference.
    """
    update = found.difference.update
    blame = blame_ranks(reference, other, update) if found.is_before_step else None
    # Tensor, pipeline and context parallelism make other calls by design.
    if blame is not None and (blame.kind != "path" or other.rank0_facts.get("strategy") in ("fsdp", "hsdp")):
        return explain_blame(other, blame, update)
    lines, what = _list_gradient_lines(other, update), "changes gradients"
    if not found.is_before_step:
        lines, what = _list_write_lines(_list_rank_updates(other, update)) or lines, "changes weights"
    by = f": {join_names(lines, 3)} {what}" if lines else ""
    return Cause(
        f"only this layout differs: code of the script reads or changes one rank's shard{by}",
        "look for to_local(), .data and norms of parameters or gradients in the loop: use accelerator.clip_grad_norm_(), and "
        "full_tensor() for values of whole tensors",
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
        optimizer_lines = [each["line"] for each in other.rank0_facts.get("optimizers", []) if each["line"]]
        where = ""
        if lines:
            where = f", set at {join_names(lines[-2:], 3)}"
        elif optimizer_lines:
            where = f", set at {join_names(optimizer_lines, 3)}, where the optimizer is created"
        return Cause(
            f"the learning rate is {rates[1]:.3g}, and {rates[0]:.3g} on one process{where}",
            "let a scheduler tick once per update: scheduler_ticks='updates'; if the script sets the rate itself, count "
            "updates, or the samples and values of all ranks (accelerator.reduce)"
            if lines
            else "do not multiply the rate by the number of processes",
            "schedules.md",
        )
    lines = _list_write_lines([ours, *_list_rank_updates(other, update)])
    where = f": {join_names(lines, 3)} changes weights" if lines else ""
    return Cause(
        f"the optimizer's step differs{where}", "change weights after the step alike on all ranks", "several_models.md"
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
        ranks_by_shard.setdefault(facts["data_shard_index"], []).append(rank)
    groups = list(ranks_by_shard.values())
    num_choices = max(map(len, groups), default=0)
    if "tp" not in other.rank0_facts.get("strategy", ""):
        num_choices = min(num_choices, 1)
    is_rounded = reference.rank0_facts.get("mixed_precision", "no") != "no"
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
    order = [(call["line"], call["func"]) for loss in whole for call in loss["calls"]]

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
    is_accelerate = bool(other.rank0_facts.get("uses_accelerate_rules"))
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
        for line, name, ranks in _list_lone_lines(
            _list_unprepared_writes(updates.values(), update) for updates in other.updates_by_rank
        ):
            return Cause(
                f"only {ranks} changes the weights of {name}: {line}",
                "change them on every rank alike, without a condition on the rank",
                "several_models.md",
            )
    if blame.kind in ("number", "draw", "path", "tensor"):
        draws_by_rank = (set(facts.get("global_draw_lines", {}).items()) for facts in other.facts_by_rank)
        reason = explain_parts(blame, "rank").reason
        for line, name, ranks in _list_lone_lines(draws_by_rank):
            return Cause(
                f"only {ranks} draws from {name}() at {line}, so the ranks draw other random numbers afterwards: {reason}",
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


def _list_lone_lines(lines_by_rank: Iterable[set[tuple[str, str]]]) -> list[tuple[str, str, str]]:
    """Return (script line, name, text with the ranks) for each line that only some of the ranks have run.

    Args:
        lines_by_rank: For each rank, pairs of a script line and the name of what the line uses or changes.
    """
    by_rank = list(lines_by_rank)
    lone_lines = []
    for line, name in sorted(set().union(*by_rank)):
        ranks = [rank for rank, lines in enumerate(by_rank) if (line, name) in lines]
        if len(ranks) < len(by_rank):
            lone_lines.append((line, name, f"rank {join_names([str(rank) for rank in ranks], 3)}"))
    return lone_lines


# -------------------------------------------------------------------- lines that change tensors


def _list_gradient_lines(other: RunRecord, update: int, *, is_early: bool = False) -> list[str]:
    """Return the lines of the script that changed gradients up to an update.

    Args:
        other: Run on several processes.
        update: Number of the last update to examine.
        is_early: Whether to return only lines that changed gradients before the last backward pass of an update.
            Default: False.
    """
    found: dict[str, None] = {}
    for updates in other.updates_by_rank:
        for each in updates.values():
            for line, num_backwards in each.gradient_lines.items():
                if each.number <= update and not (is_early and min(num_backwards) >= len(each.losses)):
                    found[line] = None
    return list(found)


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
    lines_by_rank: list[dict[str, set[str]]] = []
    for facts, updates in zip(other.facts_by_rank, other.updates_by_rank, strict=False):
        lines_by_name: dict[str, set[str]] = {}
        for each in (facts.get("write_lines", {}), *(update.write_lines for update in updates.values())):
            for name, lines in each.items():
                lines_by_name.setdefault(name, set()).update(lines)
        lines_by_rank.append(lines_by_name)
    for rank, lines_by_name in enumerate(lines_by_rank):
        others = lines_by_rank[:rank] + lines_by_rank[rank + 1 :]
        for name, found in lines_by_name.items():
            if f" {name} on rank" not in reason or not found:
                continue
            lone = [line for line in sorted(found) if all(line not in each.get(name, ()) for each in others)]
            return f"{name} at {lone[0]} on rank {rank}" if lone else f"{name} at {min(found)}"
    return None


def describe_local_metric(other: RunRecord) -> str | None:
    """Return a line of text about a scheduler whose `step` gets a different metric on each rank, or None."""
    metrics_by_rank = [facts.get("scheduler_metrics", []) for facts in other.facts_by_rank]
    for metrics in zip(*metrics_by_rank, strict=False):
        values = [each["value"] for each in metrics]
        if max(values) - min(values) > 1e-6 * max(map(abs, values)):
            shown = ", ".join(f"{value:.4g}" for value in values[:3])
            update, line = metrics[0]["update"], metrics[0]["line"]
            return (
                f"update {update}: the scheduler gets another value on each rank ({shown}) at {line}: a rank's own loss"
            )
    return None
