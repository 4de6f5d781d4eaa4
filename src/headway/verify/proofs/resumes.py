"""Proof that a resumed run is exact: after a SIGKILL, it continues from its checkpoint with the same numbers."""

from headway.verify.blame import blame_repeat
from headway.verify.causes import explain_repeat
from headway.verify.compare import are_equal, count_samples, find_first_difference, find_other_norms
from headway.verify.records import RunRecord, UpdateRecord
from headway.verify.verdict import RunSet, Verdict, describe_failure, join

KEY, TITLE = "resume", "resume is exact"
PAGE = "checkpoints.md"


def check_resume(runs: RunSet) -> Verdict:
    """Return the verdict of the comparison between a resumed run and the run that was not interrupted."""
    first, killed, resumed = runs.first, runs.repeat, runs.resumed
    if killed is None or not killed.fact.get("saved"):
        why = describe_failure(killed) if killed is not None and killed.code not in (0, -9, 137, 9) else ""
        if why:
            return Verdict(KEY, TITLE, "NOT CHECKED", f"no checkpoint could be saved: {why}")
        num = len(first.first)
        return Verdict(
            KEY, TITLE, "NOT CHECKED",
            f"the script saves no checkpoint in {num} updates; with automatic_checkpoint_naming=True verify saves one",
        )  # fmt: skip
    if resumed is None:
        return Verdict(KEY, TITLE, "NOT CHECKED", "the run was not resumed")
    if not resumed.fact.get("loaded"):
        if resumed.code not in (0, None) and not resumed.first:
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
    saved = resumed.fact["loaded"][-1][0]
    shared = [each for each in sorted(resumed.first) if each in first.first and each > saved]
    if not shared:
        if resumed.code not in (0, None):
            return Verdict(KEY, TITLE, "FAIL", f"the resumed run fails: {describe_failure(resumed)}", (), "", PAGE)
        what = f"the resumed run made no update after update {saved}, as the uninterrupted run did"
        if resumed.first:
            what = f"the resumed run continues with update {min(resumed.first)} instead of {saved + 1}"
        return Verdict(KEY, TITLE, "FAIL", what, (), "loop over accelerator.epochs(num_epochs), not range()", PAGE)
    found = _find_other_parameters(first, resumed)
    for update in shared:
        found = found or _find_difference(first, resumed, update, saved)
        if found is not None:
            return found
    more, failure = _check_several(runs, saved)
    if failure is not None:
        return failure
    return Verdict(
        KEY,
        TITLE,
        "PASS",
        f"killed (SIGKILL) and resumed after update {saved}: {len(shared)} updates equal bit by bit{more}",
    )


def _find_other_parameters(first: RunRecord, resumed: RunRecord) -> Verdict | None:
    """Return a FAIL verdict if the names of the parameters differ between the two runs, else None.

    For example, a model has an additional parameter after the resume if weights are no longer tied.

    Args:
        first: Record of the run that was not interrupted.
        resumed: Record of the run that was killed and resumed.
    """
    ours, theirs = (set(run.fact.get("trainable", ())) | set(run.fact.get("frozen", ())) for run in (first, resumed))
    more, fewer = sorted(theirs - ours), sorted(ours - theirs)
    if not ours or not theirs or not (more or fewer):
        return None
    optimized = resumed.fact.get("in_optimizer", more)
    if more:
        what = f"the model has a parameter {join(more)} that it does not have without the kill, such as an untied copy"
        what += "" if more[0] in optimized else ", and no optimizer trains it"
    else:
        what = f"the model has no parameter {join(fewer)} of its own, unlike without the kill"
    return _make_failure(
        f"after the resume, {what}", (),
        "build the model alike before and after a resume: tie weights before prepare(), and copy values into existing parameters",
        PAGE,
    )  # fmt: skip


def _find_difference(first: RunRecord, resumed: RunRecord, update: int, saved: int) -> Verdict | None:
    ours, theirs = first.first[update], resumed.first[update]
    where = f"update {update}, {_format_ordinal(update - saved)} after the resume"
    if count_samples(first, update, "rows") != count_samples(resumed, update, "rows"):
        return _explain_samples(first, resumed, update, where)
    if not are_equal(ours.losses, theirs.losses):
        begins = first.first.get(update - 1)
        initial = resumed.fact.get("initial", {})
        is_first = begins is not None and update == min(resumed.first)
        before = begins.hashes if begins is not None and is_first else {}
        changed = [name for name, value in before.items() if initial.get(name) != value]
        if changed:
            lines = [line for name in changed for line in resumed.first[update].written.get(name, ())]
            return _make_failure(
                f"{where}: {join(changed)} has another value than before the kill",
                tuple(f"it is changed at {line}" for line in lines[:2]),
                "call resume() after prepare(), and change no weights after it", PAGE,
            )  # fmt: skip
        return _explain_loss(first, resumed, update, where)
    names = find_other_norms(ours, theirs)
    if names:
        return _make_failure(
            f"{where}: the gradient of {names[0]} differs, although the losses are equal", (), "", PAGE
        )
    names = [name for name, value in ours.hashes.items() if theirs.hashes.get(name) != value]
    if names and ours.rates != theirs.rates:
        return _explain_rates(resumed, ours, theirs, where)
    if names:
        return _explain_step(resumed, ours, theirs, names[0], where)
    names = [name for name, value in ours.buffers.items() if theirs.buffers.get(name) != value]
    if names:
        lines = [f"it is changed at {line}" for line in ours.written.get(names[0], ())]
        return _make_failure(
            f"{where}: the buffer {names[0]} differs",
            tuple(lines),
            "register it as persistent: register_buffer(name, value)",
            PAGE,
        )
    others = [name for name, value in ours.others.items() if theirs.others.get(name, value) != value]
    if others and update == max(set(first.first) & set(resumed.first)):
        return _make_failure(
            f"{where}: all losses agree, but a model outside of prepare() has other weights than without the kill: {others[0]}", (),
            "put it into the checkpoint: accelerator.register_for_checkpointing(model), before resume()", PAGE,
        )  # fmt: skip
    return None


def _explain_samples(first: RunRecord, resumed: RunRecord, update: int, where: str) -> Verdict:
    """Return the failed verdict on a resumed run whose samples differ from those of the uninterrupted run.

    The verdict names the part of the data loading that has no saved state.

    Args:
        first: Run that was not interrupted.
        resumed: Resumed run.
        update: Number of the update.
        where: Description of the update, such as "update 5, the first after the resume".
    """
    details = list(_describe_samples(first, resumed, update))
    batches = resumed.first[update].batches
    number = batches[0]["loader"] if batches else -1
    about = resumed.fact.get("loaders", {}).get(str(number), {})
    made = f" of the loader at {about['line']}" if about.get("line") else ""
    reason = f"{where}: the resumed run trains on other samples"
    page = "data.md"
    if number < 0:
        line = next((each["line"] for each in resumed.trace(0, update)), "")
        at = f", used at {line}" if line else ""
        return _make_failure(
            f"{reason}: the script picks them itself{at}, by a position that is not in the checkpoint", tuple(details),
            "compute the position from accelerator.num_updates, or register it with accelerator.register_for_checkpointing()", page,
        )  # fmt: skip
    same = count_samples(first, update, "indices") == count_samples(resumed, update, "indices")
    if about.get("is_stream") and not about.get("has_state"):
        return _make_failure(
            f"{reason}: the stream {about['dataset']}{made} has no state_dict(), so its position is not in the checkpoint",
            tuple(details),
            "give the stream a state_dict() and a load_state_dict() with its position", page,
        )  # fmt: skip
    changed = [name for each in (first, resumed) for name in each.fact.get("changed_data", {}).get(str(number), ())]
    if same and changed:
        return _make_failure(
            f"{reason}: the dataset{made} writes into its own tensor {changed[0]} while samples are fetched, and the resumed run "
            "starts with the original", tuple(details),
            "let __getitem__ change a copy, such as x = self.images[index].clone()", page,
        )  # fmt: skip
    own = about.get("generators", [])
    is_known = bool(count_samples(resumed, update, "indices"))
    if (same and is_known) or (own and not is_known):
        what = f"by the generator {join(own)}" if own else "at random while they are fetched"
        if not own and not about.get("workers") and not any(batch.get("drew") for batch in batches):
            what = "from a state that the dataset keeps"
        by = f" in {about['workers']} workers, whose state is lost" if about.get("workers") else ""
        return _make_failure(
            f"{reason}: the contents of the samples{made} are made {what}{by}", tuple(details),
            "draw from a generator that is seeded with the index of the sample, or from torch's global one; if the dataset "
            "already does so, let __getitem__ change copies only", page,
        )  # fmt: skip
    ended = first.first[update].batches[-1].get("epoch", 0) if first.first[update].batches else 0
    epoch = batches[-1].get("epoch", 0)
    if ended > epoch:
        num = sum(each.batches[-1].get("epoch", 0) == epoch for each in first.first.values() if each.batches)
        return _make_failure(
            f"{reason}: it goes on with a pass{made} that the run without the kill ends after {num} updates", tuple(details),
            "end the pass by a count that survives a resume: limit the loader itself, or count with accelerator.num_updates", page,
        )  # fmt: skip
    if details and "update 1" in details[0]:
        return _make_failure(
            f"{reason}: the pass over the data{made} begins anew after the resume", tuple(details),
            "skip the batches that were trained on: accelerator.skip_first_batches(loader, n), or call resume() and loop over "
            "accelerator.epochs()", page,
        )  # fmt: skip
    return _make_failure(
        reason, tuple(details),
        "prepare the DataLoader; give a stream of your own state_dict() and load_state_dict(), and use num_workers=0 or a "
        "StatefulDataLoader for it; seed random numbers that the dataset draws",
        page,
    )  # fmt: skip


def _explain_loss(first: RunRecord, resumed: RunRecord, update: int, where: str) -> Verdict:
    """Return the failed verdict on a loss that differs after a resume, although samples and weights are equal.

    The verdict names the first torch call that differs.

    Args:
        first: Run that was not interrupted.
        resumed: Resumed run.
        update: Number of the update.
        where: Description of the update, such as "update 5, the first after the resume".
    """
    ours, theirs = first.first[update], resumed.first[update]
    reason = (
        f"{where}: the loss is {theirs.losses[0]:.8g} instead of {ours.losses[0]:.8g}, on the same samples and weights"
    )
    blame = blame_repeat(first.trace(0, update), resumed.trace(0, update))
    register = "register it with accelerator.register_for_checkpointing()"
    if blame is None:
        drawn = [f"{name}() at {line}" for line, name in resumed.fact.get("drawn", {}).items()]
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
        "own": "load the checkpoint after prepare(), and change no weights or buffers after resume()",
        "draw": f"the generator that draws{at} is not in the checkpoint: {register}, with its get_state()",
        "path": f"a value that decides the path{at} is not in the checkpoint: {register}",
        "call": f"what the script keeps and uses{at} is not in the checkpoint: {register}",
    }[blame.kind]  # fmt: skip
    return _make_failure(reason, (), advice, PAGE)


def _explain_rates(resumed: RunRecord, ours: UpdateRecord, theirs: UpdateRecord, where: str) -> Verdict:
    """Return the failed verdict on learning rates that differ after a resume, with the script line that sets them.

    Args:
        resumed: Resumed run.
        ours: Update of the run that was not interrupted.
        theirs: Update with the same number in the resumed run.
        where: Description of the update, such as "update 5, the first after the resume".
    """
    lines = theirs.rate_lines or [line for each in resumed.first.values() for line in each.rate_lines]
    set_at = f", set at {join(lines[-2:])}" if lines else ""
    return _make_failure(
        f"{where}: the learning rate is {theirs.rates[0]:.6g} instead of {ours.rates[0]:.6g}{set_at}", (),
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
    if resumed.fact.get("state_emptied"):
        made = [each["line"] for each in resumed.fact.get("optimizers", []) if each["line"]]
        return _make_failure(
            f"{reason}: the script empties the optimizer's state after resume()",
            tuple(f"the optimizer is created at {line}" for line in made),
            "change nothing in the optimizer's state after resume(); set a new learning rate in its parameter groups only", PAGE,
        )  # fmt: skip
    mine, yours = ours.written.get(name, []), theirs.written.get(name, [])
    lines = [line for line in (*mine, *yours) if (line in mine) != (line in yours)] or mine
    if lines:
        return _make_failure(
            f"{reason}: the script changes it at {lines[0]}" + ("" if lines is mine else " in only one of the two runs"), (),
            "what decides about this change, such as a counter, is not in the checkpoint: add it to the state_dict() of a "
            "registered object", PAGE,
        )  # fmt: skip
    return _make_failure(
        reason,
        (),
        "the state of the optimizer is not the saved one: prepare the optimizer, and set nothing in it after resume()",
        PAGE,
    )


def _describe_samples(first: RunRecord, resumed: RunRecord, update: int) -> tuple[str, ...]:
    theirs = count_samples(resumed, update, "rows")
    for earlier in sorted(first.first):
        if earlier != update and theirs and count_samples(first, earlier, "rows") == theirs:
            return (f"they are the samples of update {earlier}",)
    return ()


def _check_several(runs: RunSet, saved: int) -> tuple[str, Verdict | None]:
    """Compare the run that was resumed on several processes with the run that was not interrupted.

    Args:
        runs: Records of all runs.
        saved: Number of the update after which the checkpoint was saved.

    Returns:
        Tuple of (text to append to the result, or "" if nothing could be compared; failed verdict or None).
    """
    other, reference = runs.resumed_on_several, runs.first
    if other is None or runs.reference is not runs.first:
        return "", None
    if not other.is_complete or not other.fact.get("loaded"):
        if other.code in (0, None):
            return "", None
        reason = describe_failure(other)
        if "UnsupportedError" in reason or "ConfigError" in reason or "split" in reason:
            return "", None
        return "", _make_failure(
            f"resumed on {other.num_processes} processes, the script fails: {reason}", (), "", PAGE
        )
    found, num, _ = find_first_difference(reference, other, runs.reordered, saved + 1)
    if not num:
        return "", None
    if found is None:
        return f"; on {other.num_processes} processes within the order of summation", None
    if _is_result_different(runs):
        return "", None
    return "", _make_failure(
        f"update {found.difference.update}: resumed on {other.num_processes} processes, the run trains differently",
        (f"gradients differ by {found.difference.gradient:.2g} of their size", f"first parameter: {found.parameter}"),
        "the number of samples per update must not change: let prepare() share out the data",
        "elastic.md",
    )


def _is_result_different(runs: RunSet) -> bool:
    """Whether the result depends on the number of processes even without a resume. Also True if this is unknown.

    The resume is not blamed for such a dependence, which another proof reports.
    """
    if runs.several is None or not runs.several.is_complete or runs.reference is None:
        return True
    return find_first_difference(runs.reference, runs.several, runs.reordered)[0] is not None


def _format_ordinal(number: int) -> str:
    return {1: "the first", 2: "the second", 3: "the third"}.get(number, f"the {number}th")


def _make_failure(reason: str, details: tuple[str, ...], advice: str, page: str) -> Verdict:
    return Verdict(KEY, TITLE, "FAIL", reason, details, advice, page)
