"""Proof that a run is repeatable: two runs of the same command compute the same numbers, bit by bit."""

from collections.abc import Sequence

from headway.verify.blame import blame_repeat
from headway.verify.causes import explain_repeat
from headway.verify.compare import are_equal, count_samples, find_other_norms
from headway.verify.records import RunRecord
from headway.verify.verdict import RunSet, Verdict, describe_failure, join

KEY, TITLE = "repeat", "a run repeats itself"
_SEED = "call set_seed(0) (headway or accelerate) before the dataset and the model are created"


def check_repeat(runs: RunSet) -> Verdict:
    """Return the verdict of the comparison between two single-process runs, which must be equal bit by bit."""
    first, again = runs.first, runs.repeat
    if again is None:
        return Verdict(KEY, TITLE, "NOT CHECKED", "the run was not repeated")
    shared = sorted(set(first.first) & set(again.first))
    if not shared:
        return Verdict(KEY, TITLE, "FAIL", f"the second run failed: {describe_failure(again)}")
    for update in shared:
        found = _find_difference(first, again, update)
        if found is not None:
            return found
    return Verdict(KEY, TITLE, "PASS", f"{len(shared)} updates, equal bit by bit")


def _find_difference(first: RunRecord, again: RunRecord, update: int) -> Verdict | None:
    ours, theirs = first.first[update], again.first[update]
    if count_samples(first, update, "rows") != count_samples(again, update, "rows"):
        what = "order" if _has_same_contents(first, again) else "data"
        reason = f"update {update}: the two runs trained on different samples ({what})"
        return _explain_difference(first, again, update, reason, ())
    if update == min(first.first) and first.fact.get("initial") != again.fact.get("initial"):
        name = _find_name(first.fact["initial"], again.fact["initial"])
        return _explain_difference(
            first, again, update, "the two runs start from different weights", (f"first differing value: {name}",)
        )
    if not are_equal(ours.losses, theirs.losses):
        pair = f"({ours.losses[0]:.6g}, {theirs.losses[0]:.6g})" if ours.losses and theirs.losses else ""
        return _explain_difference(
            first, again, update, f"update {update}: the loss differs on the same samples and weights {pair}", ()
        )
    names = find_other_norms(ours, theirs)
    if names:
        return _make_failure(
            f"update {update}: gradients differ although the losses are equal",
            [f"first differing gradient: {names[0]}"],
            "an operation is not deterministic: set_seed(0, deterministic=True) names it",
        )
    if ours.hashes != theirs.hashes or ours.buffers != theirs.buffers:
        name = _find_name(ours.hashes | ours.buffers, theirs.hashes | theirs.buffers)
        lines = [f"{name} is changed at {line}" for line in ours.written.get(name, ())]
        return _explain_difference(
            first, again, update, f"update {update}: {name} differs after the step, although gradients are equal", lines
        )
    return None


def _explain_difference(
    first: RunRecord, again: RunRecord, update: int, reason: str, details: Sequence[str]
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
        first: First run.
        again: Repeated run.
        update: Number of the first update that differs.
        reason: Difference in one line.
        details: Lines that describe the difference.
    """
    facts, there = first.fact, again.fact
    unseeded = _list_unseeded(first, again)
    lines = list(details)
    seeds = [line for line, seed in facts.get("seeds", {}).items() if there.get("seeds", {}).get(line, seed) != seed]
    blame = blame_repeat(first.trace(0, update), again.trace(0, update))
    suspects = facts.get("suspects", {})
    reads = {**facts.get("clocks", {}), **suspects.get("outside", {})}
    clocks = [f"{name}() at {line}" for line, name in sort_by_distance(reads, blame.line if blame is not None else "")]
    if seeds:
        read = [f"the clock is read: {each}" for each in clocks[:2]]
        return _make_failure(
            f"{reason}: the seed at {seeds[0]} is another one in each run",
            [*lines, *read],
            "use a constant seed, such as set_seed(0)",
        )
    if unseeded:
        draws = [
            f"{name}() at {line}" for line, name in facts.get("draws", {}).items() if name.split(".")[0] in unseeded
        ]
        by_seed = f"the generator of {join(unseeded)} starts from another seed in each run"
        return _make_failure(
            f"{reason}: no seed is set", [*lines, by_seed, *(f"drawn by {each}" for each in draws[:3])], _SEED
        )
    own = [f"{name} at {line}" for line, name in facts.get("unseeded", {}).items()]
    if own:
        return _make_failure(
            f"{reason}: {own[0]} has no seed", [*lines, *own[1:3]],
            "give the generator a seed, such as numpy.random.default_rng(0): set_seed() does not reach it",
        )  # fmt: skip
    guessed = [f"{name}() at {line}" for line, name in suspects.get("unseeded", {}).items()]
    if guessed:  # workers and types of numpy create generators that are only seen in the source
        return _make_failure(
            f"{reason}: {guessed[0]} has no seed", [*lines, *guessed[1:3]],
            "give the generator a seed that depends on the sample, such as numpy.random.default_rng(index)",
        )  # fmt: skip
    listed = there.get("listed", [])
    if listed:
        return _make_failure(
            f"{reason}: they follow the order of a folder's files",
            [*lines, f"the second run got the files in reverse order, at {join(listed)}"],
            "sort the names: sorted(os.listdir(folder))",
        )  # fmt: skip
    where = explain_repeat(blame) if blame is not None and not _is_batch(blame.call, reason) else ""
    if where:
        lines.append(where)
    if clocks:
        return _make_failure(
            f"{reason}: the script reads the clock or another value from outside, {clocks[0]}", [*lines, *clocks[1:3]],
            "let no result depend on the time: count steps instead",
        )  # fmt: skip
    drawn = [f"{name}() at {line}" for line, name in {**facts.get("draws", {}), **facts.get("drawn", {})}.items()]
    if where or drawn:
        return _make_failure(
            reason, [*lines, *(f"random numbers are drawn by {each}" for each in drawn[:3])],
            "look for what changes between runs at this line: a generator without seed, or a value from outside",
        )  # fmt: skip
    return _make_failure(
        f"{reason}: neither a seed, the clock nor a folder differs, so the order of a set or hash() is left",
        [
            *lines,
            "the two runs had another PYTHONHASHSEED, which changes hash() of a string and the order of a set of strings",
        ],
        "sort the set before it gives an order: sorted(words); use hashlib instead of hash()",
    )


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
    file, _, rest = place.partition(" ")[0].rpartition(":")
    return file, int(rest) if rest.isdigit() else 0


def _is_batch(call: str, reason: str) -> bool:
    """Whether two runs differ first in the contents of their batches, and not in what they compute from them.

    Args:
        call: Name of the first torch call that differs.
        reason: Difference between the runs in one line.
    """
    return call == "input" and "samples" in reason


def _make_failure(reason: str, details: list[str], advice: str) -> Verdict:
    return Verdict(KEY, TITLE, "FAIL", reason, tuple(details), advice, "verify.md#a-run-repeats-itself")


def _list_unseeded(first: RunRecord, again: RunRecord) -> list[str]:
    """Return the libraries whose random number generators had different states in the two runs when training began."""
    ours, theirs = first.fact.get("seeds_at_start") or {}, again.fact.get("seeds_at_start") or {}
    return [name for name in ours if ours[name] != theirs.get(name)]


def _has_same_contents(first: RunRecord, again: RunRecord) -> bool:
    """Whether two runs have samples in common. If so, they probably differ only in the order of their samples."""
    shared = set(first.first) & set(again.first)
    ours = {row for update in shared for row in count_samples(first, update, "rows")}
    theirs = {row for update in shared for row in count_samples(again, update, "rows")}
    return bool(ours & theirs)


def _find_name(ours: dict[str, str], theirs: dict[str, str]) -> str:
    return next((name for name in ours if ours[name] != theirs.get(name)), "")
