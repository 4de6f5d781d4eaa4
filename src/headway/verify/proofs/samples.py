"""Proof that every sample is trained on once: all ranks together train on exactly the samples of a single process."""

from collections import Counter
from itertools import pairwise
from typing import Any

from headway.verify.compare import count_samples
from headway.verify.records import RunRecord
from headway.verify.verdict import RunSet, Verdict, describe_failure

KEY, TITLE = "samples", "every sample once"
PAGE = "data.md"


def check_samples(runs: RunSet) -> Verdict:
    """Return the verdict on whether all ranks together train on exactly the samples of the single-process run."""
    reference, several = runs.reference, runs.several
    restarted = _find_restarts(runs.first)
    if restarted is not None:
        return restarted
    doubled = _find_doubled_streams(runs.first)
    if doubled is not None:
        return doubled
    if reference is None or several is None:
        return Verdict(KEY, TITLE, "NOT CHECKED", "the script did not run on several processes")
    if not several.first and _is_error_of_data(several):
        return Verdict(
            KEY, TITLE, "FAIL", f"{several.num_processes} processes: {describe_failure(several)}", (),
            "give every rank the same whole dataset, in the same order, and let prepare() share it out", PAGE,
        )  # fmt: skip
    if not several.first:
        return Verdict(KEY, TITLE, "NOT CHECKED", f"{several.num_processes} processes: {describe_failure(several)}")
    if several.fact.get("undivided"):
        return Verdict(KEY, TITLE, "NOT CHECKED", f"the batch size is not a multiple of {several.num_processes}")
    shared = [each for each in sorted(reference.first) if all(each in updates for updates in several.updates)]
    total = {key: _add_up(several, shared, key) for key in ("rows", "loose", "indices")}
    if not total["rows"]:
        return Verdict(KEY, TITLE, "NOT CHECKED", "no batch with rows was seen: the loop reads no prepared loader")
    for key in ("rows", "loose"):
        if all(count_samples(reference, each, key) == count_samples(several, each, key) for each in shared):
            return _make_pass(total[key], shared, several)
    copied = _find_copies(several, shared)
    if copied is not None:
        return copied
    if _add_up(reference, shared, "rows") == total["rows"]:
        return Verdict(
            KEY, TITLE, "PASS", f"{sum(total['rows'].values())} samples, in another order than on one process"
        )
    return _explain_difference(reference, several, shared, total)


def _is_error_of_data(several: RunRecord) -> bool:
    text = describe_failure(several)
    return any(each in text for each in ("DataError", "sampler", "dataset", "DataLoader"))


def _find_restarts(first: RunRecord) -> Verdict | None:
    """Return the failed verdict if every batch is the first of a new pass over the data, else None."""
    batches = [batch for number in sorted(first.first) for batch in first.first[number].batches if batch["loader"] >= 0]
    if len(batches) < 4 or any(batch.get("position", 1) for batch in batches):
        return None
    about = first.fact.get("loaders", {}).get(str(batches[0]["loader"]), {})
    rows = batches[0].get("num_rows") or 0
    if about.get("length", 0) < 2 * rows or len({batch["loader"] for batch in batches}) > 1:
        return None
    return Verdict(
        KEY, TITLE, "FAIL", f"each of {len(batches)} batches is the first of a new pass over the data", (
            f"the {about['dataset']} has {about['length']} samples, and a pass ends after {rows}",
        ), "make one iterator and keep it: next(iter(loader)) begins a new pass at each call", PAGE,
    )  # fmt: skip


def _find_doubled_streams(first: RunRecord) -> Verdict | None:
    """Return the failed verdict if each worker process of a loader yields all samples of an iterable dataset.

    Each batch then occurs as many times in succession as there are workers, because the loader takes one batch from
    each worker in turn. Return None if no loader does this.
    """
    batches_read = [batch for number in sorted(first.first) for batch in first.first[number].batches]
    by_loader: dict[int, list[Any]] = {}
    for batch in batches_read:
        if batch.get("epoch", 0) == batches_read[0].get("epoch", 0):
            by_loader.setdefault(batch["loader"], []).append(batch.get("rows"))
    for number, batches in by_loader.items():
        about = first.fact.get("loaders", {}).get(str(number), {})
        workers = about.get("workers", 0)
        groups = (
            [batches[at : at + workers] for at in range(0, len(batches) - workers + 1, workers)] if workers > 1 else []
        )
        is_doubled = len(groups) > 1 and all(group[0] and all(each == group[0] for each in group) for group in groups)
        if is_doubled and all(one[0] != other[0] for one, other in pairwise(groups)):
            at = f" (loader at {about['line']})" if about.get("line") else ""
            return Verdict(
                KEY, TITLE, "FAIL", f"each of {workers} workers yields the whole stream {about['dataset']}, so every sample "
                f"comes {workers} times{at}", (),
                "let __iter__ yield only the worker's part, by torch.utils.data.get_worker_info(), or use num_workers=1", PAGE,
            )  # fmt: skip
    return None


def _make_pass(total: Counter[Any], shared: list[int], several: RunRecord) -> Verdict:
    return Verdict(
        KEY, TITLE, "PASS",
        f"{sum(total.values())} samples in {len(shared)} updates on {several.num_processes} processes are those of one process",
    )  # fmt: skip


def _find_copies(several: RunRecord, shared: list[int]) -> Verdict | None:
    """Return the failed verdict if all ranks trained on equal samples in their first common update, else None.

    Return None also if the layout assigns the same data shard to all ranks.

    Args:
        several: Run on several processes.
        shared: Numbers of the updates that all ranks and the single-process run have made.
    """
    if not _reads_apart(several):
        return None
    update = shared[0]
    by_rank = [
        Counter(row for batch in updates[update].batches for row in batch.get("rows") or ())
        for updates in several.updates
    ]
    if not by_rank[0] or any(each != by_rank[0] for each in by_rank):
        return None
    is_prepared = all(batch["loader"] >= 0 for batch in several.first[update].batches)
    advice = (
        "the dataset or its sampler gives every rank the same rows: leave out sampling by hand, and let prepare() share the data"
        if is_prepared
        else "pass the DataLoader to accelerator.prepare(), which gives each rank its own part"
    )
    return Verdict(
        KEY, TITLE, "FAIL", f"update {update}: all {len(by_rank)} ranks trained on the same {sum(by_rank[0].values())} samples",
        () if is_prepared else ("the loop reads a DataLoader that was not prepared",), advice, PAGE,
    )  # fmt: skip


def _reads_apart(several: RunRecord) -> bool:
    """Whether the layout gives different data shards to different ranks."""
    return len({tuple(facts["shard"]) for facts in several.facts}) > 1


def _explain_difference(
    reference: RunRecord, several: RunRecord, shared: list[int], total: dict[str, Counter[Any]]
) -> Verdict:
    """Return the verdict on samples that differ from those of the single-process run, with the likely cause.

    The verdict is PASS only if both runs used equal dataset indices, and random draws such as augmentations can explain
    the different contents.

    Args:
        reference: Single-process run.
        several: Run on several processes.
        shared: Numbers of the updates that all ranks of both runs made.
        total: How often each sample occurs on all ranks in these updates, by the kind of fingerprint.
    """
    expected = _add_up(reference, shared, "rows")
    lengths = _compare_lengths(reference, several)
    if _has_same_indices(reference, several, shared) and not lengths:
        varying = explain_other_contents(reference, several)
        if varying is not None:
            num = sum(total["indices"].values())
            return Verdict(KEY, TITLE, "PASS", f"{num} samples, recognized by index: their contents vary ({varying})")
        return Verdict(
            KEY, TITLE, "FAIL", "the same indices have other contents than on one process",
            ("the dataset is not the same on every rank",),
            "create the dataset from a seed that does not depend on the rank", PAGE,
        )  # fmt: skip
    update = next(
        each for each in shared if count_samples(reference, each, "rows") != count_samples(several, each, "rows")
    )
    key = "loose" if _add_up(reference, shared, "loose").keys() & total["loose"].keys() else "rows"
    expected, found = _add_up(reference, shared, key), total[key]
    extra, missing = found - expected, expected - found
    num_twice = sum(count for row, count in extra.items() if row in expected or count > 1)
    details = [f"first in update {update}", *lengths]
    if num_twice:
        details.append(f"{num_twice} samples were trained on more often than on one process")
    if missing:
        details.append(f"{sum(missing.values())} samples of one process were trained on by no rank")
    for rank, number in sorted(_count_extra_rows(several, shared, key, extra).items()):
        details.append(f"rank {rank}: {number} samples that one process does not train on in these updates")
    about: dict[str, Any] = next(iter(reference.fact.get("loaders", {}).values()), {})
    made = f" (loader at {about['line']})" if about.get("line") else ""
    is_own = all(batch["loader"] < 0 for each in shared for batch in several.first[each].batches)
    where = ", in a loader that was not prepared" if is_own else made
    if lengths:
        cause = "the ranks give prepare() different parts of the data"
        advice = "give every rank the whole dataset, and let prepare() share it out"
    elif num_twice and missing:
        cause = "each rank draws its own order, so the ranks' parts overlap"
        advice = (
            "draw the order from one seed on all ranks, or leave the sampler out and let prepare() share out the data"
        )
    elif missing and not extra:
        cause = "no rank reads them: the parts of the ranks leave out the end of the data"
        advice = "leave sharding by rank to prepare(); a part of len // num_processes rows drops the rest"
    else:
        cause = "the ranks share out the data otherwise than prepare() does"
        advice = "leave sharding by rank to prepare(): no DistributedSampler, no shard() or islice() by process_index"
    return Verdict(
        KEY, TITLE, "FAIL",
        f"{sum(missing.values())} samples are missing and {sum(extra.values())} are others or repeated, "
        f"of {sum(expected.values())} in {len(shared)} updates: {cause}{where}",
        tuple(details), advice, PAGE,
    )  # fmt: skip


def _has_same_indices(reference: RunRecord, several: RunRecord, shared: list[int]) -> bool:
    """Whether both runs are known to have trained on the same indices of the dataset in the updates `shared`."""
    found = _add_up(several, shared, "indices")
    return bool(found) and _add_up(reference, shared, "indices") == found


def explain_other_contents(reference: RunRecord, several: RunRecord) -> str | None:
    """Return why samples with the same indices may have other contents on several processes than in a single process.

    Random draws while samples are fetched, such as augmentation, are a reason. Return None if the runs trained on other
    indices, if the dataset of any rank has another length, or if no reason is known.

    Args:
        reference: Single-process run.
        several: Run on several processes.
    """
    shared = [each for each in sorted(reference.first) if all(each in updates for updates in several.updates)]
    if not _has_same_indices(reference, several, shared) or _compare_lengths(reference, several):
        return None
    drew = sorted(
        {name for each in shared for batch in reference.first[each].batches for name in batch.get("drew", ())}
    )
    if drew:
        return f"fetching draws random numbers from {', '.join(drew)}"
    has_workers = any(each["workers"] for each in reference.fact.get("loaders", {}).values())
    return "workers may draw random numbers" if has_workers else None


def _compare_lengths(reference: RunRecord, several: RunRecord) -> list[str]:
    """Return a line of text for each rank whose dataset has a different length than in the single-process run."""
    lines = []
    for number, about in reference.fact.get("loaders", {}).items():
        for facts in several.facts:
            there = facts.get("loaders", {}).get(number)
            if there is not None and there["length"] != about["length"]:
                lines.append(
                    f"the {about['dataset']} has {there['length']} samples on rank {facts['rank']}, "
                    f"and {about['length']} on one process"
                )
    return lines


def _count_extra_rows(several: RunRecord, shared: list[int], key: str, extra: Counter[Any]) -> dict[int, int]:
    """Return, by rank, the number of rows whose fingerprint is in `extra`. Ranks without such rows are left out.

    Args:
        several: Run on several processes.
        shared: Numbers of the updates to examine.
        key: Kind of fingerprint: "rows" or "loose" (without padding).
        extra: By fingerprint, how many times more often each sample was trained on than in the single-process run. Only
            samples with a positive number are contained.
    """
    found: dict[int, int] = {}
    for rank, updates in enumerate(several.updates):
        rows = [row for each in shared for batch in updates[each].batches for row in batch.get(key) or ()]
        number = sum(row in extra for row in rows)
        if number:
            found[rank] = number
    return found


def _add_up(record: RunRecord, updates: list[int], key: str) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for each in updates:
        total += count_samples(record, each, key)
    return total
