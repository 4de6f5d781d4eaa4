"""Proof that a resumed run is exact: after a SIGKILL, it continues from its checkpoint with the same numbers."""

from typing import Any, NamedTuple

from headway.common.text import join_names
from headway.verify.blame import blame_repeat
from headway.verify.causes import Cause, explain_repeat
from headway.verify.compare import are_equal, find_different_norms, find_different_numbers, find_first_difference
from headway.verify.record_types import UpdateRecord
from headway.verify.records import RunRecord
from headway.verify.sample_counts import count_samples
from headway.verify.verdict import Proof, RunSet, Verdict, describe_failure

_PROOF = Proof("resume", title="resume is exact", page="checkpoints.md")


def check_resume(runs: RunSet) -> Verdict:
    """Return the verdict of the comparison between a resumed run and the run that was not interrupted."""
    baseline, killed, resumed = runs.baseline, runs.repeat, runs.resumed
    if killed is None or not killed.rank0_facts.saves:
        return _explain_missing_checkpoint(baseline, killed)
    if resumed is None:
        return _PROOF.report_unchecked("the run was not resumed")
    if not resumed.rank0_facts.loads:
        return _explain_missing_load(resumed)
    saved_update = resumed.rank0_facts.loads[-1]["update"]
    updates = [
        number for number in sorted(resumed.rank0_updates) if number in baseline.rank0_updates and number > saved_update
    ]
    if not updates:
        return _explain_missing_updates(resumed, saved_update)
    failure = _compare_parameter_names(baseline, resumed)
    if failure is not None:
        return failure
    for update in updates:
        failure = _compare_update(baseline, resumed, update, saved_update)
        if failure is not None:
            return failure
    on_several = _check_resumed_on_several(runs, saved_update)
    if on_several.failure is not None:
        return on_several.failure
    return _PROOF.report_pass(
        f"killed (SIGKILL) and resumed after update {saved_update}: {len(updates)} updates equal bit by bit{on_several.remark}"
    )


def _explain_missing_checkpoint(baseline: RunRecord, killed: RunRecord | None) -> Verdict:
    """Return the verdict "NOT CHECKED" for a script that saved no checkpoint, with the reason.

    Args:
        baseline: Run that was not interrupted.
        killed: Run that should have saved a checkpoint before it was killed, or None if it was not made.
    """
    # Codes of a run that ended normally, or by the planned SIGKILL (9).
    if killed is not None and killed.code not in (0, -9, 137, 9):
        return _PROOF.report_unchecked(f"no checkpoint could be saved: {describe_failure(killed)}")
    reason = f"the script saves no checkpoint in {len(baseline.rank0_updates)} updates"
    if not baseline.rank0_facts.loaders:
        return _PROOF.report_unchecked(
            f"{reason}, and verify can save one only between the batches of a prepared loader; with --updates N, verify runs as "
            "many updates as the script makes before it saves"
        )
    return _PROOF.report_unchecked(f"{reason}; with automatic_checkpoint_naming=True verify saves one")


def _explain_missing_load(resumed: RunRecord) -> Verdict:
    """Return the verdict on a script that loaded no checkpoint when it was started again after the kill.

    It is "FAIL" if the script ended with an error before its first update, else "NOT CHECKED".
    """
    if resumed.code not in (0, None) and not resumed.rank0_updates:
        return _PROOF.report_failure(
            f"the restarted script fails: {describe_failure(resumed)}", advice="start it twice in one folder"
        )
    return _PROOF.report_unchecked(
        "the restarted script loads no checkpoint; if it needs arguments for that, give them with --resume_args",
        advice='set ProjectConfiguration(folder, automatic_checkpoint_naming=True) and call accelerator.resume("latest")',
        page=_PROOF.page,
    )


def _explain_missing_updates(resumed: RunRecord, saved_update: int) -> Verdict:
    """Return the failed verdict on a resumed run that made none of the updates that should follow its checkpoint.

    Args:
        resumed: Resumed run.
        saved_update: Number of the update after which the checkpoint was saved.
    """
    if resumed.code not in (0, None):
        return _PROOF.report_failure(f"the resumed run fails: {describe_failure(resumed)}")
    if resumed.rank0_updates:
        first_update = min(resumed.rank0_updates)
        reason = f"the resumed run continues with update {first_update} instead of {saved_update + 1}"
    else:
        reason = f"the resumed run made no update after update {saved_update}, as the uninterrupted run did"
    return _PROOF.report_failure(reason, advice="loop over accelerator.epochs(num_epochs), not range()")


def _compare_parameter_names(baseline: RunRecord, resumed: RunRecord) -> Verdict | None:
    """Return a FAIL verdict if the names of the parameters differ between the two runs, else None.

    For example, a model has an additional parameter after the resume if weights are no longer tied.

    Args:
        baseline: Run that was not interrupted.
        resumed: Resumed run.
    """
    ours, theirs = (
        {*run.rank0_facts.trainable_parameters, *run.rank0_facts.frozen_parameters} for run in (baseline, resumed)
    )
    added, missing = sorted(theirs - ours), sorted(ours - theirs)
    if not ours or not theirs or not (added or missing):
        return None
    if added:
        change = f"the model has a parameter {join_names(added, 3)} that it does not have without the kill, such as an untied copy"
        optimized = resumed.rank0_facts.optimized_parameters
        if optimized is not None and added[0] not in optimized:
            change += ", and no optimizer trains it"
    else:
        change = f"the model has no parameter {join_names(missing, 3)} of its own, unlike without the kill"
    return _PROOF.report_failure(
        f"after the resume, {change}",
        advice="build the model alike before and after a resume: tie weights before prepare(), and copy values into existing "
        "parameters",
    )


def _compare_update(baseline: RunRecord, resumed: RunRecord, update: int, saved_update: int) -> Verdict | None:
    """Return the failed verdict if an update of the resumed run differs from that of the uninterrupted run, else None.

    Values are compared in the order in which they are computed, so that the first difference is near its cause: samples,
    losses, gradients, parameters, buffers, and models that were not prepared.

    Args:
        baseline: Run that was not interrupted.
        resumed: Resumed run.
        update: Number of the update.
        saved_update: Number of the update after which the checkpoint was saved.
    """
    ours, theirs = baseline.rank0_updates[update], resumed.rank0_updates[update]
    where = f"update {update}, {_format_ordinal(update - saved_update)} after the resume"
    if count_samples(baseline, update, "row_hashes") != count_samples(resumed, update, "row_hashes"):
        return _explain_samples(baseline, resumed, update, where)
    if not are_equal(ours.losses, theirs.losses):
        return _check_start(baseline, resumed, update, where) or _explain_loss(baseline, resumed, update, where)
    names = find_different_norms(ours, theirs)
    if names:
        return _PROOF.report_failure(f"{where}: the gradient of {names[0]} differs, although the losses are equal")
    names = _list_different_keys(ours.parameter_hashes, theirs.parameter_hashes)
    rates = find_different_numbers(ours.learning_rates, theirs.learning_rates)
    if names and rates is not None:
        return _explain_rates(resumed, theirs, rates, where)
    if names:
        return _explain_step(resumed, ours, theirs, names[0], where)
    names = _list_different_keys(ours.buffer_hashes, theirs.buffer_hashes)
    if names:
        return _PROOF.report_failure(
            f"{where}: the buffer {names[0]} differs",
            details=tuple(f"it is changed at {line}" for line in ours.write_lines.get(names[0], ())),
            advice="register it as persistent: register_buffer(name, value)",
        )
    models = [
        name for name, value in ours.unprepared_hashes.items() if theirs.unprepared_hashes.get(name, value) != value
    ]
    # A model that differs also makes a later loss differ if the loss depends on it. That loss explains more, so the
    # model is reported only in the last update.
    if models and update == max(set(baseline.rank0_updates) & set(resumed.rank0_updates)):
        return _PROOF.report_failure(
            f"{where}: all losses agree, but a model outside of prepare() has other weights than without the kill: {models[0]}",
            advice="put it into the checkpoint: accelerator.register_for_checkpointing(model), before resume()",
        )
    return None


def _list_different_keys(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Return the keys of `ours` whose value differs in `theirs`, or is missing there."""
    return [key for key, value in ours.items() if theirs.get(key) != value]


def _check_start(baseline: RunRecord, resumed: RunRecord, update: int, where: str) -> Verdict | None:
    """Return the failed verdict if the resumed run starts with other parameters than the checkpoint, else None.

    Return None also if `update` is not the first update of the resumed run.

    Args:
        baseline: Run that was not interrupted.
        resumed: Resumed run.
        update: Number of an update in which the losses differ.
        where: Description of the update, such as "update 5, the first after the resume".
    """
    previous = baseline.rank0_updates.get(update - 1)
    if previous is None or update != min(resumed.rank0_updates):
        return None
    names = _list_different_keys(previous.parameter_hashes, resumed.rank0_facts.initial_hashes)
    if not names:
        return None
    lines = [line for name in names for line in resumed.rank0_updates[update].write_lines.get(name, ())]
    return _PROOF.report_failure(
        f"{where}: {join_names(names, 3)} has another value than before the kill",
        details=tuple(f"it is changed at {line}" for line in lines[:2]),
        advice="call resume() after prepare(), and change no weights after it",
    )


def _explain_samples(baseline: RunRecord, resumed: RunRecord, update: int, where: str) -> Verdict:
    """Return the failed verdict on a resumed run whose samples differ from those of the uninterrupted run.

    The verdict names the part of the data loading that has no saved state.

    Args:
        baseline: Run that was not interrupted.
        resumed: Resumed run.
        update: Number of the update.
        where: Description of the update, such as "update 5, the first after the resume".
    """
    same_update = _find_same_samples(baseline, resumed, update)
    details = () if same_update is None else (f"they are the samples of update {same_update}",)
    batches = resumed.rank0_updates[update].batches
    loader_number = batches[0]["loader"] if batches else -1
    if loader_number < 0:  # the batches come from no prepared loader
        cause = _explain_own_position(resumed, update)
    else:
        cause = _explain_loader(baseline, resumed, update, loader_number, same_update)
    reason = f"{where}: the resumed run trains on other samples"
    if cause.reason:
        reason = f"{reason}: {cause.reason}"
    return _PROOF.report_failure(reason, details=details, advice=cause.advice, page=cause.page)


def _explain_own_position(resumed: RunRecord, update: int) -> Cause:
    """Return the cause for a script that picks samples by a position of its own, which no checkpoint contains."""
    line = next((each.line for each in resumed.trace(0, update)), "")
    at = f", used at {line}" if line else ""
    return Cause(
        reason=f"the script picks them itself{at}, by a position that is not in the checkpoint",
        advice="compute the position from accelerator.num_updates, or register it with "
        "accelerator.register_for_checkpointing()",
        page="data.md",
    )


def _explain_loader(
    baseline: RunRecord, resumed: RunRecord, update: int, loader_number: int, same_update: int | None
) -> Cause:
    """Return the cause for other samples that come from a prepared loader. Its reason is "" if it is not known.

    Args:
        baseline: Run that was not interrupted.
        resumed: Resumed run.
        update: Number of the update.
        loader_number: Index of the loader.
        same_update: Number of another update of the uninterrupted run that used these samples, or None.
    """
    page = "data.md"
    loader: dict[str, Any] = {**resumed.rank0_facts.loaders.get(str(loader_number), {})}
    of_loader = f" of the loader at {loader['line']}" if loader.get("line") else ""
    if loader.get("is_stream") and not loader.get("has_state"):
        return Cause(
            f"the stream {loader['dataset']}{of_loader} has no state_dict(), so its position is not in the checkpoint",
            advice="give the stream a state_dict() and a load_state_dict() with its position",
            page=page,
        )

    indices = count_samples(resumed, update, "indices")
    has_same_indices = count_samples(baseline, update, "indices") == indices
    changed_tensors = [
        name
        for run in (baseline, resumed)
        for name in run.rank0_facts.changed_dataset_tensors.get(str(loader_number), ())
    ]
    if has_same_indices and changed_tensors:
        return Cause(
            f"the dataset{of_loader} writes into its own tensor {changed_tensors[0]} while samples are fetched, and the resumed "
            "run starts with the original",
            advice="let __getitem__ change a copy, such as x = self.images[index].clone()",
            page=page,
        )
    batches = resumed.rank0_updates[update].batches
    if (has_same_indices and indices) or (loader.get("generators") and not indices):
        draws = any(batch.get("advanced_generators") for batch in batches)
        return Cause(
            f"the contents of the samples{of_loader} are made {_describe_contents(loader, draws)}",
            advice="draw from a generator that is seeded with the index of the sample, or from torch's global one; if the dataset "
            "already does so, let __getitem__ change copies only",
            page=page,
        )

    epoch = batches[-1].get("epoch", 0)
    if _get_last_epoch(baseline.rank0_updates[update]) > epoch:
        num_updates = sum(_get_last_epoch(each) == epoch for each in baseline.rank0_updates.values() if each.batches)
        return Cause(
            f"it continues with a pass{of_loader} that the run without the kill ends after {num_updates} updates",
            advice="end the pass by a count that survives a resume: limit the loader itself, or count with accelerator.num_updates",
            page=page,
        )
    if same_update == 1:
        return Cause(
            f"the pass over the data{of_loader} begins anew after the resume",
            advice="skip the batches that were trained on: accelerator.skip_first_batches(loader, n), or call resume() and loop over "
            "accelerator.epochs()",
            page=page,
        )
    return Cause(
        "",
        advice="prepare the DataLoader; give a stream of your own state_dict() and load_state_dict(), and use num_workers=0 or a "
        "StatefulDataLoader for it; seed random numbers that the dataset draws",
        page=page,
    )


def _describe_contents(loader: dict[str, Any], draws_random_numbers: bool) -> str:
    """Return how a dataset makes contents that differ for equal indices, such as "at random while they are fetched".

    Args:
        loader: What rank 0 has recorded about the loader of the dataset.
        draws_random_numbers: Whether a global random number generator advanced while the batches were fetched.
    """
    num_workers = loader.get("workers", 0)
    if loader.get("generators"):
        origin = f"by the generator {join_names(loader['generators'], 3)}"
    elif num_workers or draws_random_numbers:
        origin = "at random while they are fetched"
    else:
        origin = "from a state that the dataset keeps"
    return f"{origin} in {num_workers} workers, whose state is lost" if num_workers else origin


def _find_same_samples(baseline: RunRecord, resumed: RunRecord, update: int) -> int | None:
    """Return the number of another update of the uninterrupted run that used the samples of a resumed update, or None.

    Args:
        baseline: Run that was not interrupted.
        resumed: Resumed run.
        update: Number of the resumed update.
    """
    counts = count_samples(resumed, update, "row_hashes")
    for number in sorted(baseline.rank0_updates):
        if number != update and counts and count_samples(baseline, number, "row_hashes") == counts:
            return number
    return None


def _get_last_epoch(update: UpdateRecord) -> int:
    """Return the epoch of the last batch of an update; 0 if the update has no batch or the epoch is unknown."""
    return update.batches[-1].get("epoch", 0) if update.batches else 0


def _explain_loss(baseline: RunRecord, resumed: RunRecord, update: int, where: str) -> Verdict:
    """Return the failed verdict on a loss that differs after a resume, although samples and weights are equal.

    The verdict names the first torch call that differs.

    Args:
        baseline: Run that was not interrupted.
        resumed: Resumed run.
        update: Number of the update.
        where: Description of the update, such as "update 5, the first after the resume".
    """
    losses = find_different_numbers(baseline.rank0_updates[update].losses, resumed.rank0_updates[update].losses)
    change = "the number of losses differs"
    if losses is not None:
        baseline_loss, resumed_loss = losses
        change = f"the loss is {resumed_loss:.8g} instead of {baseline_loss:.8g}"
    reason = f"{where}: {change}, on the same samples and weights"
    blame = blame_repeat(baseline.trace(0, update), resumed.trace(0, update))
    register = "register it with accelerator.register_for_checkpointing()"
    if blame is None:
        draws = [f"{name}() at {line}" for line, name in resumed.rank0_facts.draw_lines.items()]
        return _PROOF.report_failure(
            reason,
            details=tuple(f"draws random numbers: {each}" for each in draws[:2]),
            advice=f"a value that the loop keeps is not in the checkpoint: {register}, or compute it from accelerator.num_updates",
        )
    reason = f"{reason}: {explain_repeat(blame)}"
    at = f" at {blame.line}" if blame.line else ""
    advice = {
        "number": f"the number{at} is kept or drawn by the script and is not in the checkpoint: {register} (its state, or that of "
        "the random.Random that draws it), or compute it from accelerator.num_updates",
        "tensor": f"the tensor used{at} belongs to no prepared model and is not in the checkpoint: prepare its model, or {register}",
        "model_tensor": "load the checkpoint after prepare(), and change no weights or buffers after resume()",
        "draw": f"the generator that draws{at} is not in the checkpoint: {register}, with its get_state()",
        "path": f"a value that decides the path{at} is not in the checkpoint: {register}",
        "call": f"what the script keeps and uses{at} is not in the checkpoint: {register}",
    }[blame.kind]  # fmt: skip
    return _PROOF.report_failure(reason, advice=advice)


def _explain_rates(resumed: RunRecord, update: UpdateRecord, rates: tuple[float, float], where: str) -> Verdict:
    """Return the failed verdict on learning rates that differ after a resume, with the script line that sets them.

    Args:
        resumed: Resumed run.
        update: First update of the resumed run whose learning rates differ.
        rates: Learning rates of one parameter group: in the uninterrupted run, and in the resumed run.
        where: Description of the update, such as "update 5, the first after the resume".
    """
    lines = update.rate_lines or [line for each in resumed.rank0_updates.values() for line in each.rate_lines]
    set_at = f", set at {join_names(lines[-2:], 3)}" if lines else ""
    return _PROOF.report_failure(
        f"{where}: the learning rate is {rates[1]:.6g} instead of {rates[0]:.6g}{set_at}",
        advice="what sets it is not in the checkpoint: prepare the scheduler, or compute the rate from accelerator.num_updates",
        page="schedules.md",
    )


def _explain_step(resumed: RunRecord, ours: UpdateRecord, theirs: UpdateRecord, name: str, where: str) -> Verdict:
    """Return the failed verdict on a parameter that differs after a resume, although gradients and rates are equal.

    Args:
        resumed: Resumed run.
        ours: Update of the run that was not interrupted.
        theirs: Update with the same number in the resumed run.
        name: Name of the parameter.
        where: Description of the update, such as "update 5, the first after the resume".
    """
    reason = f"{where}: {name} differs after the step, although the gradients are equal"
    if resumed.rank0_facts.lost_optimizer_state:
        optimizer_lines = [each["line"] for each in resumed.rank0_facts.optimizers if each["line"]]
        return _PROOF.report_failure(
            f"{reason}: the script empties the optimizer's state after resume()",
            details=tuple(f"the optimizer is created at {line}" for line in optimizer_lines),
            advice="change nothing in the optimizer's state after resume(); set a new learning rate in its parameter groups only",
        )
    our_lines, their_lines = ours.write_lines.get(name, []), theirs.write_lines.get(name, [])
    lone_lines = [line for line in (*our_lines, *their_lines) if (line in our_lines) != (line in their_lines)]
    if lone_lines or our_lines:
        change = f"{lone_lines[0]} in only one of the two runs" if lone_lines else our_lines[0]
        return _PROOF.report_failure(
            f"{reason}: the script changes it at {change}",
            advice="what decides about this change, such as a counter, is not in the checkpoint: add it to the state_dict() of a "
            "registered object",
        )
    return _PROOF.report_failure(
        reason,
        advice="the state of the optimizer is not the saved one: prepare the optimizer, and set nothing in it after resume()",
    )


class _ResumedOnSeveral(NamedTuple):
    """Result of resuming on several processes. Both fields are empty if nothing could be compared.

    Attributes:
        remark: Text to append to the reason of the verdict, if the runs agree.
        failure: Failed verdict, if they do not.
    """

    remark: str = ""
    failure: Verdict | None = None


def _check_resumed_on_several(runs: RunSet, saved_update: int) -> _ResumedOnSeveral:
    """Compare the run that was resumed on several processes with the run that was not interrupted.

    Args:
        runs: Records of all runs.
        saved_update: Number of the update after which the checkpoint was saved.
    """
    resumed, reference = runs.resumed_on_several, runs.baseline
    # The reference is another run if draws or the order of samples depend on the number of processes by design.
    if resumed is None or runs.reference is not runs.baseline:
        return _ResumedOnSeveral()
    if not resumed.is_complete or not resumed.rank0_facts.loads:
        if resumed.code in (0, None):
            return _ResumedOnSeveral()
        reason = describe_failure(resumed)
        if "UnsupportedError" in reason or "ConfigError" in reason or "split" in reason:
            return _ResumedOnSeveral()
        text = f"resumed on {resumed.num_processes} processes, the script fails: {reason}"
        return _ResumedOnSeveral(failure=_PROOF.report_failure(text))
    comparison = find_first_difference(reference, resumed, runs.reordered, saved_update + 1)
    run_difference = comparison.first_difference
    if not comparison.num_updates:
        return _ResumedOnSeveral()
    if run_difference is None:
        return _ResumedOnSeveral(remark=f"; on {resumed.num_processes} processes within the order of summation")
    if _is_result_different(runs):
        return _ResumedOnSeveral()
    failure = _PROOF.report_failure(
        f"update {run_difference.difference.update}: resumed on {resumed.num_processes} processes, the run trains differently",
        details=(
            f"gradients differ by {run_difference.difference.gradient:.2g} of their size",
            f"first parameter: {run_difference.first_parameter}",
        ),
        advice="the number of samples per update must not change: let prepare() share out the data",
        page="elastic.md",
    )
    return _ResumedOnSeveral(failure=failure)


def _is_result_different(runs: RunSet) -> bool:
    """Whether the result depends on the number of processes even without a resume. Also True if this is unknown.

    The resume is not blamed for such a dependence, which another proof reports.
    """
    if runs.several is None or not runs.several.is_complete or runs.reference is None:
        return True
    return find_first_difference(runs.reference, runs.several, runs.reordered).first_difference is not None


def _format_ordinal(number: int) -> str:
    """Return a positive number as text: "the first", "the second", "the third", "the 4th" and so on."""
    return {1: "the first", 2: "the second", 3: "the third"}.get(number, f"the {number}th")
