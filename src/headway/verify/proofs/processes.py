"""Proofs that the number of processes and the layout do not change the result of training."""

from typing import Any

from headway.verify.blame import Blame, blame_parts
from headway.verify.causes import explain_parts
from headway.verify.compare import RunDifference, count_rows, count_samples, find_first_difference
from headway.verify.proofs.samples import explain_other_contents
from headway.verify.records import RunRecord, UpdateRecord
from headway.verify.verdict import RunSet, Verdict, describe_failure, join


def check_processes(runs: RunSet) -> Verdict:
    """Return the verdict on whether runs on one and on several processes compute equal results at equal batch sizes.

    The batch size is that of the global batch, which the processes share.
    """
    title = f"same result on {runs.num_processes} processes"
    return _compare_runs("processes", title, runs, runs.several, f"{runs.num_processes} processes")


def check_layout(runs: RunSet) -> Verdict:
    """Return the verdict on whether the single-process run and a run under the user's layout compute equal results.

    If no layout was given, a layout other than DDP that the script itself chose is judged. Without either, the verdict
    is NOT CHECKED.
    """
    if not runs.layout_name:
        title, is_own = "same result under the layout", runs.several is not None
        name = runs.several.fact.get("strategy", "") if runs.several is not None else ""
        if is_own and name not in ("", "ddp", "single"):
            done = _compare_runs("layout", f"same result under {name}", runs, runs.several, name)
            return done
        return Verdict("layout", title, "NOT CHECKED", "no layout was given, such as --strategy fsdp")
    return _compare_runs("layout", f"same result under {runs.layout_name}", runs, runs.layout, runs.layout_name)


def _compare_runs(key: str, title: str, runs: RunSet, other: RunRecord | None, name: str) -> Verdict:
    """Compare the single-process run with another run, and return the verdict.

    Args:
        key: Key of the proof.
        title: Title of the proof.
        runs: Records of all runs.
        other: Run to compare, or None if it was not made.
        name: Description of the other run, such as "2 processes".
    """
    reference = runs.reference
    if other is None or reference is None or not reference.first:
        return Verdict(key, title, "NOT CHECKED", "the script did not run on several processes")
    if "deepspeed" in other.fact.get("strategy", ""):
        return Verdict(key, title, "NOT CHECKED", "DeepSpeed keeps gradients and parameters in buffers of its own")
    if other.fact.get("undivided"):
        return Verdict(
            key, title, "NOT CHECKED",
            f"the batch size {other.fact['undivided']} is no multiple of {other.num_processes}: processes cannot share it", (),
            "give the script a batch size that is, or verify with another -n",
        )  # fmt: skip
    if not other.is_complete:
        return _judge_failure(key, title, reference, other, name)
    local = _find_local_metric(other)
    if local is not None:
        return Verdict(
            key, title, "FAIL", local, (),
            "pass the mean over all ranks: scheduler.step(accelerator.reduce(loss, 'mean').item())", "schedules.md",
        )  # fmt: skip
    diverged = find_diverged(other)
    if diverged is not None:
        update, parameter, rank = diverged
        return Verdict(
            key, title, "FAIL", f"update {update}: {parameter} differs between rank 0 and rank {rank}",
            _list_causes_of_divergence(other, parameter),
            "every rank must make the same updates: compute losses and change weights on all ranks alike, and call "
            "accelerator.backward()",
            "several_models.md",
        )  # fmt: skip
    if other.last_update < reference.last_update and other.fact.get("end") != "enough":
        return Verdict(
            key, title, "FAIL", f"{name}: {other.last_update} updates, but {reference.last_update} on one process",
            (), "the number of updates must not depend on the number of processes", "data.md",
        )  # fmt: skip
    found, num, largest = find_first_difference(reference, other, runs.reordered)
    if found is None:
        return Verdict(
            key,
            title,
            "PASS",
            f"{num} updates agree: gradients and parameters differ by at most {largest:.0e} of their size",
        )
    return _explain_difference(key, title, runs, reference, other, name, found)


def _judge_failure(key: str, title: str, reference: RunRecord, other: RunRecord, name: str) -> Verdict:
    """Return the verdict on a run that ended with an error or made no progress.

    Args:
        key: Key of the proof.
        title: Title of the proof.
        reference: Single-process run.
        other: Run that failed.
        name: Description of the run, such as "2 processes".
    """
    reason = describe_failure(other)
    if "split_batches=True shares each batch" in other.output:
        return Verdict(
            key, title, "NOT CHECKED", "the batch size is not a multiple of the number of processes", (reason,),
            "give the script a batch size that is, or headway verify another number of processes (-n)",
        )  # fmt: skip
    if "UnsupportedError" in reason or "ConfigError" in reason:
        return Verdict(key, title, "NOT CHECKED", f"{name}: {reason}")
    written = _find_written(other, reason)
    if written:
        where = f"{written[1]} on rank {written[2]}" if written[2] else written[1]
        return Verdict(
            key, title, "FAIL", f"the replicas on {name} are not alike: the script changes {written[0]} at {where}", (reason,),
            "change weights on all ranks alike, with the same random numbers, or before prepare()", "several_models.md",
        )  # fmt: skip
    set_at = list(
        dict.fromkeys(line for updates in other.updates for each in updates.values() for line in each.rate_lines)
    )
    if set_at and "optimizers of the ranks are not alike: 'lr'" in reason:
        return Verdict(
            key, title, "FAIL", f"the ranks on {name} set other learning rates at {join(set_at[-2:])}", (reason,),
            "decide by a value that is equal on all ranks, such as accelerator.reduce(loss.detach(), 'mean')", "schedules.md",
        )  # fmt: skip
    unlike = "differ between ranks" in reason or "are not alike" in reason
    blame = blame_ranks(reference, other, other.last_update + 1) if unlike else None
    if blame is not None:
        cause, advice, page = _find_lone_cause(other, blame, other.last_update + 1) or _describe_blame(other, blame)
        return Verdict(key, title, "FAIL", cause, (reason,), advice, page)
    what = "hangs" if other.code is None or other.code == 70 else "fails"
    lines = tuple(line for line in other.output.splitlines()[-8:] if line.strip())
    return Verdict(
        key, title, "FAIL", f"the script {what} on {name}: {reason}", lines,
        "every rank must make the same calls in the same order" if what == "hangs" else "run it: headway launch with these flags",
        "hangs.md" if what == "hangs" else "troubleshooting.md",
    )  # fmt: skip


def _find_written(other: RunRecord, reason: str) -> tuple[str, str, str] | None:
    """Return (parameter, line, rank) of the in-place change that explains why the replicas differ, or None.

    The rank is "" if all ranks run the line but write different values, for example because each rank seeds its
    generator differently.

    Args:
        other: Run that failed.
        reason: Error of the failed run, which names the parameters that differ.
    """
    if "replicas of the model are not alike" not in reason:
        return None
    by_rank: list[dict[str, set[str]]] = []
    for facts, updates in zip(other.facts, other.updates, strict=False):
        lines: dict[str, set[str]] = {}
        for each in (facts.get("written", {}), *(update.written for update in updates.values())):
            for name, found in each.items():
                lines.setdefault(name, set()).update(found)
        by_rank.append(lines)
    for rank, lines in enumerate(by_rank):
        for name, found in lines.items():
            if f" {name} on rank" not in reason or not found:
                continue
            alone = [
                line
                for line in found
                if not any(line in there.get(name, ()) for there in by_rank[:rank] + by_rank[rank + 1 :])
            ]
            return name, (alone or sorted(found))[0], str(rank) if alone else ""
    return None


def _find_local_metric(other: RunRecord) -> str | None:
    """Return a line of text about a scheduler whose `step` gets a different metric on each rank, or None."""
    metrics = [facts.get("metrics", []) for facts in other.facts]
    for each in zip(*metrics, strict=False):
        values = [value for _, value, _ in each]
        if max(values) - min(values) > 1e-6 * max(map(abs, values)):
            shown = ", ".join(f"{value:.4g}" for value in values[:3])
            return f"update {each[0][0]}: the scheduler gets another value on each rank ({shown}) at {each[0][2]}: a rank's own loss"
    return None


def find_diverged(record: RunRecord) -> tuple[int, str, int] | None:
    """Return (update, parameter, rank) of the first parameter replica that differs from that on rank 0, or None."""
    for update in sorted(record.first):
        ours = record.first[update].hashes
        for rank, updates in enumerate(record.updates[1:], 1):
            theirs = updates[update].hashes if update in updates else ours
            for name, value in ours.items():
                if theirs.get(name, value) != value:
                    return update, name, rank
    return None


def _list_causes_of_divergence(other: RunRecord, parameter: str) -> tuple[str, ...]:
    ours = [facts.get("initial", {}).get(parameter) for facts in other.facts]
    if len(set(ours)) > 1:
        return ("it differs before the first update: the ranks build different models",)
    return ()


def _explain_difference(
    key: str, title: str, runs: RunSet, reference: RunRecord, other: RunRecord, name: str, found: RunDifference
) -> Verdict:
    """Return the verdict on a difference beyond the tolerance, with its likely cause.

    Args:
        key: Key of the proof.
        title: Title of the proof.
        runs: Records of all runs.
        reference: Single-process run.
        other: Run that differs.
        name: Description of the run that differs, such as "2 processes".
        found: First difference beyond the tolerance.
    """
    update, difference = found.difference.update, found.difference
    unlike = find_unlike_start(reference, other)
    if unlike:
        return Verdict(
            key, title, "FAIL", f"{join(unlike)} has another value than on one process before the first update", (),
            "create weights before prepare(), from a seed that does not depend on the rank", "several_models.md",
        )  # fmt: skip
    varying = None if _has_equal_samples(reference, other, update) else explain_other_contents(reference, other)
    if varying is not None:
        return Verdict(
            key,
            title,
            "NOT CHECKED",
            f"the samples are those of one process, but their contents vary ({varying}); the proof needs equal contents, for "
            "example without augmentation",
        )
    size = f"{difference.gradient:.2g} of their size, allowed is {found.tolerance.gradient:.1g}"
    details = [f"update {update}: gradients differ by {size}"]
    if not found.is_before_step:
        details = [
            f"update {update}: gradients agree, but parameters differ after the step by {difference.movement:.2g}"
        ]
    if found.parameter:
        details.append(f"first parameter: {found.parameter}")
    is_layout_only = (
        other is runs.layout
        and runs.several is not None
        and runs.several.is_complete
        and find_first_difference(reference, runs.several, runs.reordered)[0] is None
    )
    padded = runs.probed.fact.get("leaks", ()) if runs.probed is not None else ()
    depends_on_padding = any(each["kind"] == "padding" and each["leaks"] for each in padded)
    cause, advice, page = _find_cause(
        reference, other, found, is_layout_only=is_layout_only, depends_on_padding=depends_on_padding
    )
    if cause:
        details.append(cause)
    if key == "processes" and _is_drawn_for_a_group(runs, other, update):
        return Verdict(
            key, title, "NOT CHECKED",
            f"{cause}; under {runs.layout_name}, where all ranks have the same rows, the result is the same", tuple(details),
        )  # fmt: skip
    unshared = {**reference.fact.get("unshared", {}), **other.fact.get("unshared", {})}
    drew = _list_drawing(reference)
    if not _has_equal_samples(reference, other, update):
        cause = "the ranks trained on other samples than one process"
        if drew:
            return Verdict(
                key,
                title,
                "NOT CHECKED",
                f"samples are drawn at random while they are fetched ({join(drew)})",
                tuple(details),
            )
        return Verdict(key, title, "FAIL", cause, tuple(details), "see the proof of samples", "data.md")
    if unshared and not difference.is_proportional:
        line, function = next(iter(unshared.items()))
        return Verdict(
            key,
            title,
            "NOT CHECKED",
            f"{function}() at {line} draws other random numbers on each rank, by design",
            tuple(details),
        )
    reason = cause or f"{name} train differently from update {update} on"
    return Verdict(key, title, "FAIL", reason, tuple(each for each in details if each != cause), advice, page)


def _is_drawn_for_a_group(runs: RunSet, other: RunRecord, update: int) -> bool:
    """Whether a difference comes from random numbers that are equal on all ranks, as the user's layout requires.

    Under tensor parallelism, for example, all ranks of a group compute the same rows and must add the same noise to
    them. In a run without the layout, such a script adds this same noise to different rows on each rank.

    Args:
        runs: Records of all runs.
        other: Run on several processes without the layout.
        update: Number of the first update that differs.
    """
    layout, reference = runs.layout, runs.reference
    if layout is None or reference is None or not layout.is_complete or len({f["shard"][0] for f in layout.facts}) > 1:
        return False
    blame = blame_ranks(reference, other, update)
    is_draw = blame is not None and blame.kind == "draw"
    return is_draw and find_first_difference(reference, layout, runs.reordered)[0] is None


def _find_cause(
    reference: RunRecord,
    other: RunRecord,
    found: RunDifference,
    *,
    is_layout_only: bool,
    depends_on_padding: bool,
) -> tuple[str, str, str]:
    """Return the likely cause of a difference, advice on what to change, and a page of the documentation.

    Args:
        reference: Single-process run.
        other: Run that differs.
        found: First difference beyond the tolerance.
        is_layout_only: Whether the run on several processes without the layout agrees with the single-process run.
        depends_on_padding: Whether the model's outputs for real tokens change with the padding.
    """
    difference, ranks = found.difference, other.num_processes
    update = difference.update
    if is_layout_only:
        return _find_cause_of_layout(reference, other, found)
    if difference.one_sided:
        return (
            f"{join(found.others)} has a gradient only on one process, or only on several: the loop depends on their number",
            "remove conditions on the rank or on the number of processes from the loss", "several_models.md",
        )  # fmt: skip
    if not found.is_before_step:
        return _find_cause_of_step(reference, other, found)
    blame = blame_ranks(reference, other, update)
    if blame is not None:
        return _find_lone_cause(other, blame, update) or _describe_blame(other, blame)
    lines = _list_gradient_lines(other, update, is_early=True)
    if lines:
        return (
            f"{join(lines)} changes gradients before all micro-batches of the update are added up, so each rank changes its own",
            "change or clip gradients only if accelerator.sync_gradients is true: use accelerator.clip_grad_norm_()",
            "accumulation.md",
        )  # fmt: skip
    if difference.is_proportional:
        factor = difference.factor
        text = f"{factor:.3g}" if factor >= 1 else f"1/{1 / factor:.3g}" if factor > 0 else f"{factor:.3g}"
        return (
            f"all gradients are {text} times those of one process: a loss is a sum, or is multiplied or divided by a number "
            f"of processes, rows or steps",
            "let the loss be a mean over the rows of its batch (or pass weight= or reduction='sum' to accelerator.backward), and do "
            "not scale it by num_processes",
            "accumulation.md",
        )  # fmt: skip
    normalized = other.fact.get("norms") or []
    if normalized:
        return (
            f"{normalized[0]} is a BatchNorm that normalizes over the rows of one rank only",
            "use GroupNorm, or on GPUs convert the model before prepare(): "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which has no CPU kernel", "troubleshooting.md",
        )  # fmt: skip
    lines = _list_gradient_lines(other, update)
    if lines:
        return (
            f"{join(lines)} changes gradients, and not in the same way on several processes as on one",
            "change gradients only by values that are equal on all ranks, between backward and optimizer.step()",
            "several_models.md",
        )  # fmt: skip
    if depends_on_padding:
        return (
            "the outputs depend on padding, and the ranks pad their rows to another length than one process",
            "pass the attention mask to the model, and leave padding out of sums and means",
            "verify.md#nothing-leaks",
        )
    share = len(found.others) / max(1, len(difference.by_name))
    if share < 0.5:
        return (
            f"only {join(found.others)} differs: its gradient is not averaged over the ranks, or depends on one rank's rows",
            "use the parameter inside the forward of a prepared model, and the loss in accelerator.backward()", "several_models.md",
        )  # fmt: skip
    return (
        f"the loss of one rank's rows is not a part of the loss of all rows ({ranks} ranks)",
        "look for sums over the batch in the loss or the model: tokens counted per rank (pass weight=), contrastive losses "
        "(gather the others' features), statistics of the batch",
        "accumulation.md",
    )  # fmt: skip


def _describe_blame(other: RunRecord, blame: Blame) -> tuple[str, str, str]:
    cause = explain_parts(blame, "rank", is_accelerate=bool(other.fact.get("orders_apart")))
    return cause.reason, cause.advice, cause.page


def _find_cause_of_layout(reference: RunRecord, other: RunRecord, found: RunDifference) -> tuple[str, str, str]:
    """Return (cause, advice, page of the documentation) for a difference that occurs only under the layout.

    Args:
        reference: Single-process run.
        other: Run under the layout.
        found: First difference.
    """
    update = found.difference.update
    blame = blame_ranks(reference, other, update) if found.is_before_step else None
    # Tensor, pipeline and context parallelism make other calls by design.
    if blame is not None and (blame.kind != "path" or other.fact.get("strategy") in ("fsdp", "hsdp")):
        return _find_lone_cause(other, blame, update) or _describe_blame(other, blame)
    lines = _list_gradient_lines(other, update)
    what = "changes gradients"
    if not found.is_before_step:
        lines = _list_writers([updates[update] for updates in other.updates if update in updates]) or lines
        what = "changes weights"
    by = f": {join(lines)} {what}" if lines else ""
    return (
        f"only this layout differs: code of the script reads or changes one rank's shard{by}",
        "look for to_local(), .data and norms of parameters or gradients in the loop: use accelerator.clip_grad_norm_(), and "
        "full_tensor() for values of whole tensors",
        "fsdp.md",
    )  # fmt: skip


def _find_lone_cause(other: RunRecord, blame: Blame, update: int) -> tuple[str, str, str] | None:
    """Return the cause of a difference if it is a line that only some ranks run, as (cause, advice, page of the docs).

    Such a line changes a model that was not passed to `prepare`, or draws from a global generator of Python or NumPy.
    Return None if there is no such line.

    Args:
        other: The run on several processes, which differs from the reference.
        blame: First call that differs.
        update: Number of the update in which it differs.
    """
    texts = explain_parts(blame, "rank")
    if blame.kind == "tensor":
        by_rank = [
            {(line, name) for each in updates.values() if each.number < update for name, lines in each.written_outside.items()
             for line in lines}
            for updates in other.updates
        ]  # fmt: skip
        for (line, name), ranks in _find_lone(by_rank):
            return (
                f"only {ranks} changes the weights of {name}: {line}",
                "change them on every rank alike, without a condition on the rank",
                "several_models.md",
            )
    if blame.kind in ("number", "draw", "path", "tensor"):
        drawn = [set(facts.get("draws", {}).items()) for facts in other.facts]
        for (line, name), ranks in _find_lone(drawn):
            return (
                f"only {ranks} draws from {name}() at {line}, so the ranks draw other random numbers afterwards: {texts.reason}",
                "draw on every rank alike, or from a generator of its own, such as random.Random(0)",
                "several_models.md",
            )
    return None


def _find_lone(by_rank: list[set[tuple[str, str]]]) -> list[tuple[tuple[str, str], str]]:
    """Return (entry, ranks that have it) for each entry, a pair of strings, that only some of the ranks have."""
    found = []
    for each in sorted(set().union(*by_rank)):
        ranks = [rank for rank, there in enumerate(by_rank) if each in there]
        if len(ranks) < len(by_rank):
            found.append((each, f"rank {join([str(rank) for rank in ranks])}"))
    return found


def _list_gradient_lines(other: RunRecord, update: int, *, is_early: bool = False) -> list[str]:
    """Return the lines of the script that changed gradients up to an update.

    Args:
        other: Run on several processes.
        update: Number of the last update to examine.
        is_early: Whether to return only lines that changed gradients before the last backward pass of an update.
            Default: False.
    """
    found: dict[str, None] = {}
    for updates in other.updates:
        for each in updates.values():
            for line, counts in each.gradient_lines.items():
                if each.number <= update and not (is_early and min(counts) >= len(each.losses)):
                    found[line] = None
    return list(found)


def blame_ranks(reference: RunRecord, other: RunRecord, update: int) -> Blame | None:
    """Return an update's first torch call whose results on the ranks do not match its result in the single-process run.

    Return None if all results match.

    Args:
        reference: Single-process run.
        other: Run on several processes.
        update: Number of the update.
    """
    shards: dict[int, list[int]] = {}
    for rank, facts in enumerate(other.facts):
        shards.setdefault(facts["shard"][0], []).append(rank)
    loose: dict[str, Any] = {"loose": 0.05} if reference.fact.get("mixed_precision", "no") != "no" else {}
    whole = reference.trace(0, update)
    found: list[Blame] = []
    for number in range(max(map(len, shards.values()), default=0)):
        # All ranks of a group of tensor parallelism compute the same rows, so each must match one process.
        ranks = [group[min(number, len(group) - 1)] for group in shards.values()]
        if number and "tp" not in other.fact.get("strategy", ""):
            break
        blame = blame_parts(whole, [other.trace(rank, update) for rank in ranks], **loose)
        if blame is not None:
            found.append(blame)
    # What one rank of a group does differently reaches the others, whose first difference is later.
    order = [(call["line"], call["func"]) for loss in whole for call in loss["calls"]]
    places = [order.index((each.line, each.call)) if (each.line, each.call) in order else len(order) for each in found]
    return found[places.index(min(places))] if found else None


def _find_cause_of_step(reference: RunRecord, other: RunRecord, found: RunDifference) -> tuple[str, str, str]:
    """Return (cause, advice, page of the documentation) for a difference that arises in the optimizer step or after it.

    Args:
        reference: Single-process run.
        other: Run that differs.
        found: First difference beyond the tolerance.
    """
    update = found.difference.update
    mine, yours = reference.first[update], other.first[update]
    if mine.rates != yours.rates:
        index = next(
            index for index, pair in enumerate(zip(mine.rates, yours.rates, strict=False)) if pair[0] != pair[1]
        )
        lines = list(dict.fromkeys(line for each in range(1, update + 1) for line in other.first[each].rate_lines))
        made = [each["line"] for each in other.fact.get("optimizers", []) if each["line"]]
        where = (
            f", set at {join(lines[-2:])}"
            if lines
            else f", set at {join(made)}, where the optimizer is created"
            if made
            else ""
        )
        return (
            f"the learning rate is {yours.rates[index]:.3g}, and {mine.rates[index]:.3g} on one process{where}",
            "let a scheduler tick once per update: scheduler_ticks='updates'; if the script sets the rate itself, count "
            "updates, or the samples and values of all ranks (accelerator.reduce)"
            if lines
            else "do not multiply the rate by the number of processes",
            "schedules.md",
        )  # fmt: skip
    lines = _list_writers([mine, *(updates[update] for updates in other.updates if update in updates)])
    where = f": {join(lines)} changes weights" if lines else ""
    return (
        f"the optimizer's step differs{where}",
        "change weights after the step alike on all ranks",
        "several_models.md",
    )


def _list_writers(updates: list[UpdateRecord]) -> list[str]:
    """Return the lines of the script that changed parameters or buffers in place in any of the updates."""
    return list(dict.fromkeys(line for each in updates for lines in each.written.values() for line in lines))


def find_unlike_start(reference: RunRecord, other: RunRecord) -> list[str]:
    """Return the names of the parameters whose initial values differ by more than 1e-6 between the runs."""
    ours, theirs = reference.values(0), other.values(0)
    return [
        name for name, value in ours.items()
        if name in theirs and value.shape == theirs[name].shape and abs(value - theirs[name]).max(initial=0.0) > 1e-6
    ]  # fmt: skip


def _has_equal_samples(reference: RunRecord, other: RunRecord, update: int) -> bool:
    """Whether both runs trained on equal samples up to an update. Also True if no samples of this update are known."""
    return any(
        all(count_samples(reference, each, key) == count_samples(other, each, key) for each in range(1, update + 1))
        for key in ("rows", "loose")
    ) or not count_rows(reference, update)


def _list_drawing(reference: RunRecord) -> list[str]:
    """Return the names of the libraries whose global random number generators were used while batches were fetched."""
    return sorted(
        {name for update in reference.first.values() for batch in update.batches for name in batch.get("drew", ())}
    )
