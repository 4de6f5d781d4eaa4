"""Proof that a run is repeatable: two runs of the same command compute the same numbers, bit by bit."""

from collections.abc import Sequence

from headway.common.text import join_names
from headway.verify.blame import blame_repeat
from headway.verify.causes import explain_repeat
from headway.verify.compare import are_equal, find_different_norms, find_different_numbers
from headway.verify.records import RunRecord
from headway.verify.sample_counts import count_samples
from headway.verify.verdict import Proof, RunSet, Verdict, describe_failure

_PROOF = Proof("repeat", title="a run repeats itself", page="verify.md#a-run-repeats-itself")
_SEED = "call set_seed(0) (headway or accelerate) before the dataset and the model are created"


def check_repeat(runs: RunSet) -> Verdict:
    """Compare a single-process run with its repetition, update by update, bit by bit.

    The repetition may be shorter, because it is also killed for another proof.

    Returns:
        "PASS" if all updates that both runs recorded are equal. "FAIL" with the first difference, or if there are no such
            updates. "NOT CHECKED" if the run was not repeated.
    """
    baseline, repeat = runs.baseline, runs.repeat
    if repeat is None:
        return _PROOF.report_unchecked("the run was not repeated")
    updates = sorted(set(baseline.rank0_updates) & set(repeat.rank0_updates))
    if not updates:
        return _PROOF.report_failure(f"the second run failed: {describe_failure(repeat)}", page="")
    for update in updates:
        failure = _compare_update(baseline, repeat, update)
        if failure is not None:
            return failure
    return _PROOF.report_pass(f"{len(updates)} updates, equal bit by bit")


def _compare_update(baseline: RunRecord, repeat: RunRecord, update: int) -> Verdict | None:
    """Return the failed verdict if an update differs between the two runs, else None.

    Values are compared in the order in which they are computed, so that the first difference is near its cause: samples,
    initial weights, losses, gradients, and values after the step.

    Args:
        baseline: Single-process run.
        repeat: Repeated run.
        update: Number of the update.
    """
    ours, theirs = baseline.rank0_updates[update], repeat.rank0_updates[update]
    if count_samples(baseline, update, "row_hashes") != count_samples(repeat, update, "row_hashes"):
        aspect = "order" if _have_common_samples(baseline, repeat) else "data"
        reason = f"update {update}: the two runs trained on different samples ({aspect})"
        return _explain_difference(baseline, repeat, update, reason, ())
    our_start = baseline.rank0_facts.initial_hashes
    their_start = repeat.rank0_facts.initial_hashes
    if update == min(baseline.rank0_updates) and our_start != their_start:
        detail = f"first differing value: {_find_different_key(our_start, their_start)}"
        return _explain_difference(baseline, repeat, update, "the two runs start from different weights", (detail,))
    if not are_equal(ours.losses, theirs.losses):
        losses = find_different_numbers(ours.losses, theirs.losses)
        pair = "" if losses is None else f"({losses[0]:.6g}, {losses[1]:.6g})"
        reason = f"update {update}: the loss differs on the same samples and weights {pair}"
        return _explain_difference(baseline, repeat, update, reason, ())
    names = find_different_norms(ours, theirs)
    if names:
        return _PROOF.report_failure(
            f"update {update}: gradients differ although the losses are equal",
            details=[f"first differing gradient: {names[0]}"],
            advice="an operation is not deterministic: set_seed(0, deterministic=True) names it",
        )
    our_values, their_values = (
        ours.parameter_hashes | ours.buffer_hashes,
        theirs.parameter_hashes | theirs.buffer_hashes,
    )
    if our_values != their_values:
        name = _find_different_key(our_values, their_values)
        lines = [f"{name} is changed at {line}" for line in ours.write_lines.get(name, ())]
        reason = f"update {update}: {name} differs after the step, although gradients are equal"
        return _explain_difference(baseline, repeat, update, reason, lines)
    return None


def _explain_difference(
    baseline: RunRecord, repeat: RunRecord, update: int, reason: str, details: Sequence[str]
) -> Verdict:
    """Return the failed verdict for two runs that differ, with the likely cause.

    Possible causes are examined in this order, and the first one with evidence in the records is reported:

    - seeds that differ
    - global random number generators without a seed
    - other generators without a seed
    - the order of a folder's files
    - the clock
    - the first torch call that differs, or a random draw

    If there is no evidence, the order of a set is reported.

    Args:
        baseline: Single-process run.
        repeat: Repeated run.
        update: Number of the first update that differs.
        reason: Difference in one line.
        details: Lines that describe the difference.
    """
    facts = baseline.rank0_facts
    blame = blame_repeat(baseline.trace(0, update), repeat.trace(0, update))
    suspects = facts.suspects
    read_lines = {**facts.clock_lines, **suspects.get("outside", {})}
    nearest = sort_by_distance(read_lines, "" if blame is None else blame.line)
    clocks = [f"{name}() at {line}" for line, name in nearest]
    failure = _check_seeds(baseline, repeat, reason, details, clocks)
    if failure is not None:
        return failure
    listing_lines = repeat.rank0_facts.reversed_listing_lines
    if listing_lines:
        return _PROOF.report_failure(
            f"{reason}: they follow the order of a folder's files",
            details=[*details, f"the second run got the files in reverse order, at {join_names(listing_lines, 3)}"],
            advice="sort the names: sorted(os.listdir(folder))",
        )
    # If the samples themselves differ, the first call that differs is the one that reads them, which explains nothing.
    is_explained = blame is not None and not (blame.call == "input" and "samples" in reason)
    lines = [*details, explain_repeat(blame)] if blame is not None and is_explained else [*details]
    if clocks:
        return _PROOF.report_failure(
            f"{reason}: the script reads the clock or another value from outside, {clocks[0]}",
            details=[*lines, *clocks[1:3]],
            advice="let no result depend on the time: count steps instead",
        )
    draw_lines = {**facts.global_draw_lines, **facts.draw_lines}
    draws = [f"random numbers are drawn by {name}() at {line}" for line, name in draw_lines.items()]
    if is_explained or draws:
        return _PROOF.report_failure(
            reason,
            details=[*lines, *draws[:3]],
            advice="look for what changes between runs at this line: a generator without seed, or a value from outside",
        )
    return _PROOF.report_failure(
        f"{reason}: neither a seed, the clock nor a folder differs, so the order of a set or hash() is left",
        details=[
            *lines,
            "the two runs had another PYTHONHASHSEED, which changes hash() of a string and the order of a set of strings",
        ],
        advice="sort the set before it gives an order: sorted(words); use hashlib instead of hash()",
    )


def _check_seeds(
    baseline: RunRecord, repeat: RunRecord, reason: str, details: Sequence[str], clocks: Sequence[str]
) -> Verdict | None:
    """Return the failed verdict if a seed differs between two runs that differ, or if a generator has no seed.

    Return None otherwise.

    Args:
        baseline: Single-process run.
        repeat: Repeated run.
        reason: Difference between the runs in one line.
        details: Lines that describe the difference.
        clocks: Reads of the clock, such as "time.time() at train.py:3".
    """
    facts = baseline.rank0_facts
    their_seeds = repeat.rank0_facts.seed_lines
    seed_lines = [line for line, seed in facts.seed_lines.items() if their_seeds.get(line, seed) != seed]
    if seed_lines:
        return _PROOF.report_failure(
            f"{reason}: the seed at {seed_lines[0]} is another one in each run",
            details=[*details, *(f"the clock is read: {each}" for each in clocks[:2])],
            advice="use a constant seed, such as set_seed(0)",
        )
    libraries = _list_unseeded_libraries(baseline, repeat)
    if libraries:
        draws = [
            f"drawn by {name}() at {line}"
            for line, name in facts.global_draw_lines.items()
            if name.split(".")[0] in libraries
        ]
        detail = f"the generator of {join_names(libraries, 3)} starts from another seed in each run"
        return _PROOF.report_failure(f"{reason}: no seed is set", details=[*details, detail, *draws[:3]], advice=_SEED)
    generators = [f"{name} at {line}" for line, name in facts.unseeded_lines.items()]
    if generators:
        return _PROOF.report_failure(
            f"{reason}: {generators[0]} has no seed",
            details=[*details, *generators[1:3]],
            advice="give the generator a seed, such as numpy.random.default_rng(0): set_seed() does not reach it",
        )
    # Generators that are created in workers, or by types of numpy, are only found in the source.
    suspects = [f"{name}() at {line}" for line, name in facts.suspects.get("unseeded", {}).items()]
    if suspects:
        return _PROOF.report_failure(
            f"{reason}: {suspects[0]} has no seed",
            details=[*details, *suspects[1:3]],
            advice="give the generator a seed that depends on the sample, such as numpy.random.default_rng(index)",
        )
    return None


def sort_by_distance(lines: dict[str, str], place: str) -> list[tuple[str, str]]:
    """Return pairs of (line of the script, value), the line nearest to a place first. Lines of other files come last.

    Args:
        lines: Value of each line. The keys are lines such as "train.py:12 in main".
        place: Line from which distances are measured; "" to keep the order.
    """
    file, number = _split_line(place)

    def measure_distance(item: tuple[str, str]) -> int:
        there, line = _split_line(item[0])
        return abs(line - number) if there == file else 1 << 30

    return sorted(lines.items(), key=measure_distance)


def _split_line(place: str) -> tuple[str, int]:
    """Return the file and the line number of a text such as "train.py:12 in main". The number is 0 if there is none."""
    file, _, rest = place.partition(" ")[0].rpartition(":")
    return file, int(rest) if rest.isdigit() else 0


def _list_unseeded_libraries(baseline: RunRecord, repeat: RunRecord) -> list[str]:
    """Return the libraries whose random number generators had different states in the two runs when training began.

    The names are "torch", "random" and "numpy".
    """
    ours = baseline.rank0_facts.generator_hashes
    theirs = repeat.rank0_facts.generator_hashes
    return [name for name in ours if ours[name] != theirs.get(name)]


def _have_common_samples(baseline: RunRecord, repeat: RunRecord) -> bool:
    """Whether two runs have samples in common. If so, they probably differ only in the order of their samples."""
    updates = set(baseline.rank0_updates) & set(repeat.rank0_updates)
    ours = {row for update in updates for row in count_samples(baseline, update, "row_hashes")}
    theirs = {row for update in updates for row in count_samples(repeat, update, "row_hashes")}
    return bool(ours & theirs)


def _find_different_key(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return the first key of `ours` whose value differs in `theirs` or is missing there; "" if there is none."""
    return next((key for key in ours if ours[key] != theirs.get(key)), "")
