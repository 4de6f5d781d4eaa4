"""Proof that a resumed run is exact: after a SIGKILL, it continues from its checkpoint with the same numbers."""

from typing import Any

from headway.common.text import join_names
from headway.verify.blame import blame_repeat
from headway.verify.causes import explain_repeat
from headway.verify.compare import are_equal, find_different_norms, find_different_numbers, find_first_difference
from headway.verify.records import RunRecord, UpdateRecord
from headway.verify.sample_counts import count_samples
from headway.verify.verdict import RunSet, Verdict, describe_failure

KEY, TITLE = "resume", "resume is exact"
PAGE = "checkpoints.md"


def check_resume(runs: RunSet) -> Verdict:
    """Return the verdict of the comparison between a resumed run and the run that was not interrupted."""
    baseline, killed, resumed = runs.baseline, runs.repeat, runs.resumed
    if killed is None or not killed.rank0_facts.get("saves"):
        why = describe_failure(killed) if killed is not None and killed.code not in (0, -9, 137, 9) else ""
        if why:
            return Verdict(KEY, TITLE, "NOT CHECKED", f"no checkpoint could be saved: {why}")
        num = len(baseline.rank0_updates)
        return Verdict(
            KEY, TITLE, "NOT CHECKED",
            f"the script saves no checkpoint in {num} updates; with automatic_checkpoint_naming=True verify saves one",
        )  # fmt: skip
    if resumed is None:
        return Verdict(KEY, TITLE, "NOT CHECKED", "the run was not resumed")
    if not resumed.rank0_facts.get("loads"):
        if resumed.code not in (0, None) and not resumed.rank0_updates:
            return Verdict(
                KEY,
                TITLE,
                "FAIL",
                f"the restarted script fails: {describe_failure(resumed)}",
                (),
                "start it twice in one folder",
                PAGE,
            )
        return Verdict(
            KEY, TITLE, "NOT CHECKED",
            "the script, started again, loads no checkpoint; if it needs arguments for that, give them with --resume_args", (),
            'set ProjectConfiguration(folder, automatic_checkpoint_naming=True) and call accelerator.resume("latest")', PAGE,
        )  # fmt: skip
    saved_update = resumed.rank0_facts["loads"][-1]["update"]
    updates = [
        number for number in sorted(resumed.rank0_updates) if number in baseline.rank0_updates and number > saved_update
    ]
    if not updates:
        if resumed.code not in (0, None):
            return Verdict(KEY, TITLE, "FAIL", f"the resumed run fails: {describe_failure(resumed)}", (), "", PAGE)
        reason = f"the resumed run made no update after update {saved_update}, as the uninterrupted run did"
        if resumed.rank0_updates:
            first_update = min(resumed.rank0_updates)
            reason = f"the resumed run continues with update {first_update} instead of {saved_update + 1}"
        return Verdict(KEY, TITLE, "FAIL", reason, (), "loop over accelerator.epochs(num_epochs), not range()", PAGE)
    failure = _compare_parameter_names(baseline, resumed)
    for update in updates:
        failure = failure or _compare_update(baseline, resumed, update, saved_update)
        if failure is not None:
            return failure
    remark, failure = _check_resumed_on_several(runs, saved_update)
    if failure is not None:
        return failure
    return Verdict(
        KEY,
        TITLE,
        "PASS",
        f"killed (SIGKILL) and resumed after update {saved_update}: {len(updates)} updates equal bit by bit{remark}",
    )


def _compare_parameter_names(baseline: RunRecord, resumed: RunRecord) -> Verdict | None:
    """Return a FAIL verdict if the names of the parameters differ between the two runs, else None.

    For example, a model has an additional parameter after the resume if weights are no longer tied.

    Args:
        baseline: Run that was not interrupted.
        resumed: Resumed run.
    """
    ours, theirs = (
        {*run.rank0_facts.get("trainable_parameters", ()), *run.rank0_facts.get("frozen_parameters", ())}
        for run in (baseline, resumed)
    )
    added, missing = sorted(theirs - ours), sorted(ours - theirs)
    if not ours or not theirs or not (added or missing):
        return None
    if added:
        what = f"the model has a parameter {join_names(added, 3)} that it does not have without the kill, such as an untied copy"
        what += (
            "" if added[0] in resumed.rank0_facts.get("optimized_parameters", added) else ", and no optimizer trains it"
        )
    else:
        what = f"the model has no parameter {join_names(missing, 3)} of its own, unlike without the kill"
    return _make_failure(
        f"after the resume, {what}", (),
        "build the model alike before and after a resume: tie weights before prepare(), and copy values into existing parameters",
        PAGE,
    )  # fmt: skip


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
        return _make_failure(
            f"{where}: the gradient of {names[0]} differs, although the losses are equal", (), "", PAGE
        )
    names = _list_different_keys(ours.parameter_hashes, theirs.parameter_hashes)
    rates = find_different_numbers(ours.learning_rates, theirs.learning_rates)
    if names and rates is not None:
        return _explain_rates(resumed, theirs, rates, where)
    if names:
        return _explain_step(resumed, ours, theirs, names[0], where)
    names = _list_different_keys(ours.buffer_hashes, theirs.buffer_hashes)
    if names:
        return _make_failure(
            f"{where}: the buffer {names[0]} differs",
            tuple(f"it is changed at {line}" for line in ours.write_lines.get(names[0], ())),
            "register it as persistent: register_buffer(name, value)",
            PAGE,
        )
    models = [
        name for name, value in ours.unprepared_hashes.items() if theirs.unprepared_hashes.get(name, value) != value
    ]
    # A model that differs also makes a later loss differ if the loss depends on it. That loss explains more, so the
    # model is reported only in the last update.
    if models and update == max(set(baseline.rank0_updates) & set(resumed.rank0_updates)):
        return _make_failure(
            f"{where}: all losses agree, but a model outside of prepare() has other weights than without the kill: {models[0]}", (),
            "put it into the checkpoint: accelerator.register_for_checkpointing(model), before resume()", PAGE,
        )  # fmt: skip
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
    names = _list_different_keys(previous.parameter_hashes, resumed.rank0_facts.get("initial_hashes", {}))
    if not names:
        return None
    lines = [line for name in names for line in resumed.rank0_updates[update].write_lines.get(name, ())]
    return _make_failure(
        f"{where}: {join_names(names, 3)} has another value than before the kill",
        tuple(f"it is changed at {line}" for line in lines[:2]),
        "call resume() after prepare(), and change no weights after it", PAGE,
    )  # fmt: skip


def _explain_samples(baseline: RunRecord, resumed: RunRecord, update: int, where: str) -> Verdict:
    """Return the failed verdict on a resumed run whose samples differ from those of the uninterrupted run.

    The verdict names the part of the data loading that has no saved state.

    Args:
        baseline: Run that was not interrupted.
        resumed: Resumed run.
        update: Number of the update.
        where: Description of the update, such as "update 5, the first after the resume".
    """
    page = "data.md"
    reason = f"{where}: the resumed run trains on other samples"
    same_update = _find_same_samples(baseline, resumed, update)
    details = () if same_update is None else (f"they are the samples of update {same_update}",)
    batches = resumed.rank0_updates[update].batches
    number = batches[0]["loader"] if batches else -1
    if number < 0:
        line = next((each["line"] for each in resumed.trace(0, update)), "")
        at = f", used at {line}" if line else ""
        return _make_failure(
            f"{reason}: the script picks them itself{at}, by a position that is not in the checkpoint", details,
            "compute the position from accelerator.num_updates, or register it with accelerator.register_for_checkpointing()", page,
        )  # fmt: skip
    loader: dict[str, Any] = {**resumed.rank0_facts.get("loaders", {}).get(str(number), {})}
    of_loader = f" of the loader at {loader['line']}" if loader.get("line") else ""
    if loader.get("is_stream") and not loader.get("has_state"):
        return _make_failure(
            f"{reason}: the stream {loader['dataset']}{of_loader} has no state_dict(), so its position is not in the checkpoint",
            details, "give the stream a state_dict() and a load_state_dict() with its position", page,
        )  # fmt: skip
    tensors = [
        name
        for run in (baseline, resumed)
        for name in run.rank0_facts.get("changed_dataset_tensors", {}).get(str(number), ())
    ]
    indices = count_samples(resumed, update, "indices")
    has_same_indices = count_samples(baseline, update, "indices") == indices
    if has_same_indices and tensors:
        return _make_failure(
            f"{reason}: the dataset{of_loader} writes into its own tensor {tensors[0]} while samples are fetched, and the resumed "
            "run starts with the original", details,
            "let __getitem__ change a copy, such as x = self.images[index].clone()", page,
        )  # fmt: skip
    generators, workers = loader.get("generators", []), loader.get("workers", 0)
    if (has_same_indices and indices) or (generators and not indices):
        is_random = workers or any(batch.get("advanced_generators") for batch in batches)
        what = "at random while they are fetched" if is_random else "from a state that the dataset keeps"
        what = f"by the generator {join_names(generators, 3)}" if generators else what
        by = f" in {workers} workers, whose state is lost" if workers else ""
        return _make_failure(
            f"{reason}: the contents of the samples{of_loader} are made {what}{by}", details,
            "draw from a generator that is seeded with the index of the sample, or from torch's global one; if the dataset "
            "already does so, let __getitem__ change copies only", page,
        )  # fmt: skip
    epoch = batches[-1].get("epoch", 0)
    if _get_last_epoch(baseline.rank0_updates[update]) > epoch:
        num_updates = sum(_get_last_epoch(each) == epoch for each in baseline.rank0_updates.values() if each.batches)
        return _make_failure(
            f"{reason}: it goes on with a pass{of_loader} that the run without the kill ends after {num_updates} updates", details,
            "end the pass by a count that survives a resume: limit the loader itself, or count with accelerator.num_updates", page,
        )  # fmt: skip
    if same_update == 1:
        return _make_failure(
            f"{reason}: the pass over the data{of_loader} begins anew after the resume", details,
            "skip the batches that were trained on: accelerator.skip_first_batches(loader, n), or call resume() and loop over "
            "accelerator.epochs()", page,
        )  # fmt: skip
    return _make_failure(
        reason, details,
        "prepare the DataLoader; give a stream of your own state_dict() and load_state_dict(), and use num_workers=0 or a "
        "StatefulDataLoader for it; seed random numbers that the dataset draws",
        page,
    )  # fmt: skip


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
    what = (
        "the number of losses differs" if losses is None else f"the loss is {losses[1]:.8g} instead of {losses[0]:.8g}"
    )
    reason = f"{where}: {what}, on the same samples and weights"
    blame = blame_repeat(baseline.trace(0, update), resumed.trace(0, update))
    register = "register it with accelerator.register_for_checkpointing()"
    if blame is None:
        drawn = [f"{name}() at {line}" for line, name in resumed.rank0_facts.get("draw_lines", {}).items()]
        return _make_failure(
            reason, tuple(f"draws random numbers: {each}" for each in drawn[:2]),
            f"a value that the loop keeps is not in the checkpoint: {register}, or compute it from accelerator.num_updates", PAGE,
        )  # fmt: skip
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
    return _make_failure(reason, (), advice, PAGE)


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
    return _make_failure(
        f"{where}: the learning rate is {rates[1]:.6g} instead of {rates[0]:.6g}{set_at}", (),
        "what sets it is not in the checkpoint: prepare the scheduler, or compute the rate from accelerator.num_updates",
        "schedules.md",
    )  # fmt: skip


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
    if resumed.rank0_facts.get("lost_optimizer_state"):
        made = [each["line"] for each in resumed.rank0_facts.get("optimizers", []) if each["line"]]
        return _make_failure(
            f"{reason}: the script empties the optimizer's state after resume()",
            tuple(f"the optimizer is created at {line}" for line in made),
            "change nothing in the optimizer's state after resume(); set a new learning rate in its parameter groups only", PAGE,
        )  # fmt: skip
    our_lines, their_lines = ours.write_lines.get(name, []), theirs.write_lines.get(name, [])
    lone_lines = [line for line in (*our_lines, *their_lines) if (line in our_lines) != (line in their_lines)]
    if lone_lines or our_lines:
        where = f"{lone_lines[0]} in only one of the two runs" if lone_lines else our_lines[0]
        return _make_failure(
            f"{reason}: the script changes it at {where}", (),
            "what decides about this change, such as a counter, is not in the checkpoint: add it to the state_dict() of a "
            "registered object", PAGE,
        )  # fmt: skip
    return _make_failure(
        reason,
        (),
        "the state of the optimizer is not the saved one: prepare the optimizer, and set nothing in it after resume()",
        PAGE,
    )


def _check_resumed_on_several(runs: RunSet, saved_update: int) -> tuple[str, Verdict | None]:
    """Compare the run that was resumed on several processes with the run that was not interrupted.

    Args:
        runs: Records of all runs.
        saved_update: Number of the update after which the checkpoint was saved.

    Returns:
        Tuple of (text to append to the reason of the verdict, or "" if nothing could be compared; failed verdict or
        None).
    """
    resumed, reference = runs.resumed_on_several, runs.baseline
    # The reference is another run if draws or the order of samples depend on the number of processes by design.
    if resumed is None or runs.reference is not runs.baseline:
        return "", None
    if not resumed.is_complete or not resumed.rank0_facts.get("loads"):
        if resumed.code in (0, None):
            return "", None
        reason = describe_failure(resumed)
        if "UnsupportedError" in reason or "ConfigError" in reason or "split" in reason:
            return "", None
        return "", _make_failure(
            f"resumed on {resumed.num_processes} processes, the script fails: {reason}", (), "", PAGE
        )
    found, num_updates, _ = find_first_difference(reference, resumed, runs.reordered, saved_update + 1)
    if not num_updates:
        return "", None
    if found is None:
        return f"; on {resumed.num_processes} processes within the order of summation", None
    if _is_result_different(runs):
        return "", None
    return "", _make_failure(
        f"update {found.difference.update}: resumed on {resumed.num_processes} processes, the run trains differently",
        (
            f"gradients differ by {found.difference.gradient:.2g} of their size",
            f"first parameter: {found.first_parameter}",
        ),
        "the number of samples per update must not change: let prepare() share out the data",
        "elastic.md",
    )


def _is_result_different(runs: RunSet) -> bool:
    """Whether the result depends on the number of processes even without a resume. Also True if this is unknown.

    The resume is not blamed for such a dependence, which another proof reports.
    """
    if runs.several is None or not runs.several.is_complete or runs.reference is None:
        return True
    return find_first_difference(runs.reference, runs.several, runs.reordered).first_difference is not None


def _format_ordinal(number: int) -> str:
    return {1: "the first", 2: "the second", 3: "the third"}.get(number, f"the {number}th")


def _make_failure(reason: str, details: tuple[str, ...], advice: str, page: str) -> Verdict:
    return Verdict(KEY, TITLE, "FAIL", reason, details, advice, page)
