"""Proof that every sample is trained on once: all ranks together train on exactly the samples of a single process."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from headway.verify.record_types import LoaderEntry, SampleKey
from headway.verify.records import RunRecord
from headway.verify.sample_counts import count_samples
from headway.verify.verdict import Proof, RunSet, Verdict, describe_failure

_PROOF = Proof("samples", title="every sample once", page="data.md")


def check_samples(runs: RunSet) -> Verdict:
    """Return the verdict on whether all ranks together train on exactly the samples of the single-process run."""
    reference, several = runs.reference, runs.several
    failure = _find_restarts(runs.baseline) or _find_repeating_workers(runs.baseline)
    if failure is not None:
        return failure
    if reference is None or several is None:
        return _PROOF.report_unchecked("the script did not run on several processes")
    if not several.rank0_updates and _is_data_error(several):
        return _PROOF.report_failure(
            f"{several.num_processes} processes: {describe_failure(several)}",
            advice="give every rank the same whole dataset, in the same order, and let prepare() share it out",
        )
    if not several.rank0_updates:
        return _PROOF.report_unchecked(f"{several.num_processes} processes: {describe_failure(several)}")
    if several.rank0_facts.indivisible_batch_size:
        return _PROOF.report_unchecked(f"the batch size is not a multiple of {several.num_processes}")
    updates = list_common_updates(reference, several)
    row_counts = _sum_counts(several, updates, "row_hashes")
    if not row_counts:
        return _PROOF.report_unchecked("no batch with rows was seen: the loop reads no prepared loader")
    num_samples = sum(row_counts.values())
    if have_equal_contents(reference, several, updates):
        return _PROOF.report_pass(
            f"{num_samples} samples in {len(updates)} updates on {several.num_processes} processes are those of one process"
        )
    failure = _find_copies(several, updates)
    if failure is not None:
        return failure
    if _sum_counts(reference, updates, "row_hashes") == row_counts:
        return _PROOF.report_pass(f"{num_samples} samples, in another order than on one process")
    return _explain_difference(reference, several, updates)


def list_common_updates(reference: RunRecord, several: RunRecord) -> list[int]:
    """Return the numbers of the updates that a single-process run and all ranks of another run have made, in order."""
    return [
        number
        for number in sorted(reference.rank0_updates)
        if all(number in updates for updates in several.updates_by_rank)
    ]


def have_equal_contents(reference: RunRecord, other: RunRecord, updates: Iterable[int]) -> bool:
    """Whether two runs trained on samples with equal contents in each of the updates.

    Padding is ignored if the contents with padding differ, because its length can depend on the number of rows.

    Args:
        reference: Single-process run.
        other: Run to compare with it.
        updates: Numbers of the updates.
    """
    keys: tuple[SampleKey, ...] = ("row_hashes", "unpadded_hashes")
    return any(
        all(count_samples(reference, each, key) == count_samples(other, each, key) for each in updates) for key in keys
    )


def _is_data_error(several: RunRecord) -> bool:
    """Whether the error of a failed run is about its dataset, sampler or loader."""
    text = describe_failure(several)
    return any(each in text for each in ("DataError", "sampler", "dataset", "DataLoader"))


def _get_loader(record: RunRecord, number: int) -> LoaderEntry | None:
    """Return what rank 0 has recorded about the prepared loader with this index, or None if it recorded nothing."""
    return record.rank0_facts.loaders.get(str(number))


def _find_restarts(baseline: RunRecord) -> Verdict | None:
    """Return the failed verdict if every batch is the first of a new pass over the data, else None."""
    updates = [baseline.rank0_updates[number] for number in sorted(baseline.rank0_updates)]
    batches = [batch for update in updates for batch in update.batches if batch["loader"] >= 0]
    if len(batches) < 4 or any(batch.get("position", 1) for batch in batches):
        return None
    loader = _get_loader(baseline, batches[0]["loader"])
    num_rows = batches[0].get("num_rows") or 0
    # A pass over a dataset of one batch always ends after this batch.
    if loader is None or loader["length"] < 2 * num_rows or len({batch["loader"] for batch in batches}) > 1:
        return None
    return _PROOF.report_failure(
        f"each of {len(batches)} batches is the first of a new pass over the data",
        details=(f"the {loader['dataset']} has {loader['length']} samples, and a pass ends after {num_rows}",),
        advice="make one iterator and keep it: next(iter(loader)) begins a new pass at each call",
    )


def _find_repeating_workers(baseline: RunRecord) -> Verdict | None:
    """Return the failed verdict if each worker process of a loader yields all samples of an iterable dataset.

    Each batch then occurs as many times in succession as there are workers, because the loader takes one batch from
    each worker in turn. Only batches of the first recorded epoch are examined. Return None if no loader does this.
    """
    updates = [baseline.rank0_updates[number] for number in sorted(baseline.rank0_updates)]
    batches = [batch for update in updates for batch in update.batches]
    batches_by_loader: dict[int, list[list[str] | None]] = {}  # row hashes of each batch
    for batch in batches:
        if batch.get("epoch", 0) == batches[0].get("epoch", 0):
            batches_by_loader.setdefault(batch["loader"], []).append(batch.get("row_hashes"))
    for number, row_hashes in batches_by_loader.items():
        loader = _get_loader(baseline, number)
        if loader is not None and _is_repeated_by_workers(row_hashes, loader["workers"]):
            workers = loader["workers"]
            at = f" (loader at {loader['line']})" if loader.get("line") else ""
            return _PROOF.report_failure(
                f"each of {workers} workers yields the whole stream {loader['dataset']}, so every sample comes {workers} times{at}",
                advice="let __iter__ yield only the worker's part, by torch.utils.data.get_worker_info(), or use num_workers=1",
            )
    return None


def _is_repeated_by_workers(batches: list[list[str] | None], num_workers: int) -> bool:
    """Whether each batch of a loader occurs `num_workers` times in succession, once from each worker process.

    Args:
        batches: Row hashes of each batch, in the order of the loader. A batch without rows is None.
        num_workers: Number of worker processes of the loader.
    """
    if num_workers < 2:
        return False
    num_rounds = len(batches) // num_workers
    rounds = [batches[index * num_workers : (index + 1) * num_workers] for index in range(num_rounds)]
    if len(rounds) < 2:
        return False
    for first, *others in rounds:
        if not first or any(each != first for each in others):
            return False
    # A dataset whose batches are all equal is no evidence.
    return all(one[0] != following[0] for one, following in pairwise(rounds))


def _find_copies(several: RunRecord, updates: list[int]) -> Verdict | None:
    """Return the failed verdict if all ranks trained on equal samples in their first common update, else None.

    Return None also if the layout assigns the same data shard to all ranks.

    Args:
        several: Run on several processes.
        updates: Numbers of the updates that all ranks and the single-process run have made, in order.
    """
    if len({facts.data_shard_index for facts in several.facts_by_rank}) < 2:
        return None
    update = updates[0]
    counts_by_rank = [
        Counter(row for batch in by_number[update].batches for row in batch.get("row_hashes", ()))
        for by_number in several.updates_by_rank
    ]
    if not counts_by_rank[0] or any(each != counts_by_rank[0] for each in counts_by_rank):
        return None
    is_prepared = all(batch["loader"] >= 0 for batch in several.rank0_updates[update].batches)
    advice = (
        "the dataset or its sampler gives every rank the same rows: leave out sampling by hand, and let prepare() share the data"
        if is_prepared
        else "pass the DataLoader to accelerator.prepare(), which gives each rank its own part"
    )
    num_samples = sum(counts_by_rank[0].values())
    return _PROOF.report_failure(
        f"update {update}: all {len(counts_by_rank)} ranks trained on the same {num_samples} samples",
        details=() if is_prepared else ("the loop reads a DataLoader that was not prepared",),
        advice=advice,
    )


def _explain_difference(reference: RunRecord, several: RunRecord, updates: list[int]) -> Verdict:
    """Return the verdict on samples that differ from those of the single-process run, with the likely cause.

    The verdict is PASS only if both runs used equal dataset indices, and random draws such as augmentations can explain
    the different contents.

    Args:
        reference: Single-process run.
        several: Run on several processes.
        updates: Numbers of the updates that all ranks of both runs made.
    """
    length_differences = _compare_lengths(reference, several)
    if _has_same_indices(reference, several, updates) and not length_differences:
        return _judge_contents(reference, several, updates)
    update = next(
        each
        for each in updates
        if count_samples(reference, each, "row_hashes") != count_samples(several, each, "row_hashes")
    )
    # Without padding, samples of both runs can be recognized even if the runs pad them to different lengths.
    key: SampleKey = "unpadded_hashes"
    expected, counts = _sum_counts(reference, updates, key), _sum_counts(several, updates, key)
    if expected.keys().isdisjoint(counts):
        key = "row_hashes"
        expected, counts = _sum_counts(reference, updates, key), _sum_counts(several, updates, key)
    extra, missing = counts - expected, expected - counts
    num_repeated = sum(count for row, count in extra.items() if row in expected or count > 1)
    details = [f"first in update {update}", *length_differences]
    if num_repeated:
        details.append(f"{num_repeated} samples were trained on more often than on one process")
    if missing:
        details.append(f"{sum(missing.values())} samples of one process were trained on by no rank")
    for rank, number in sorted(_count_extra_rows(several, updates, key, extra).items()):
        details.append(f"rank {rank}: {number} samples that one process does not train on in these updates")

    if length_differences:
        cause = "the ranks give prepare() different parts of the data"
        advice = "give every rank the whole dataset, and let prepare() share it out"
    elif num_repeated and missing:
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
    where = _describe_loader(reference, several, updates)
    return _PROOF.report_failure(
        f"{sum(missing.values())} samples are missing and {sum(extra.values())} are others or repeated, "
        f"of {sum(expected.values())} in {len(updates)} updates: {cause}{where}",
        details=tuple(details),
        advice=advice,
    )


def _judge_contents(reference: RunRecord, several: RunRecord, updates: list[int]) -> Verdict:
    """Return the verdict on samples with equal dataset indices, but other contents than in the single-process run.

    Args:
        reference: Single-process run.
        several: Run on several processes.
        updates: Numbers of the updates that all ranks of both runs made.
    """
    reason = explain_other_contents(reference, several)
    if reason is not None:
        num_samples = sum(_sum_counts(several, updates, "indices").values())
        return _PROOF.report_pass(f"{num_samples} samples, recognized by index: their contents vary ({reason})")
    return _PROOF.report_failure(
        "the same indices have other contents than on one process",
        details=("the dataset is not the same on every rank",),
        advice="create the dataset from a seed that does not depend on the rank",
    )


def _describe_loader(reference: RunRecord, several: RunRecord, updates: list[int]) -> str:
    """Return a phrase about the loader that the script reads, to append to a cause; "" if nothing is known about it."""
    if all(batch["loader"] < 0 for each in updates for batch in several.rank0_updates[each].batches):
        return ", in a loader that was not prepared"
    loader = next(iter(reference.rank0_facts.loaders.values()), None)
    return f" (loader at {loader['line']})" if loader is not None and loader.get("line") else ""


def _has_same_indices(reference: RunRecord, several: RunRecord, updates: list[int]) -> bool:
    """Whether both runs are known to have trained on the same indices of the dataset in the given updates."""
    counts = _sum_counts(several, updates, "indices")
    return bool(counts) and _sum_counts(reference, updates, "indices") == counts


def explain_other_contents(reference: RunRecord, several: RunRecord) -> str | None:
    """Return why samples with the same indices may have other contents on several processes than in a single process.

    Random draws while samples are fetched, such as augmentation, are a reason. Return None if the runs trained on other
    indices, if the dataset of any rank has another length, or if no reason is known.

    Args:
        reference: Single-process run.
        several: Run on several processes.
    """
    updates = list_common_updates(reference, several)
    if not _has_same_indices(reference, several, updates) or _compare_lengths(reference, several):
        return None
    generators = list_fetch_generators(reference, updates)
    if generators:
        return f"fetching draws random numbers from {', '.join(generators)}"
    has_workers = any(each["workers"] for each in reference.rank0_facts.loaders.values())
    return "workers may draw random numbers" if has_workers else None


def list_fetch_generators(reference: RunRecord, updates: Iterable[int]) -> list[str]:
    """Return the libraries whose global random number generators changed while batches of the updates were fetched.

    The names, such as "numpy", are sorted.
    """
    batches = [batch for each in updates for batch in reference.rank0_updates[each].batches]
    return sorted({name for batch in batches for name in batch.get("advanced_generators", ())})


def _compare_lengths(reference: RunRecord, several: RunRecord) -> list[str]:
    """Return a line of text for each rank whose dataset has a different length than in the single-process run."""
    lines = []
    for number, loader in reference.rank0_facts.loaders.items():
        for facts in several.facts_by_rank:
            same_loader = facts.loaders.get(number)
            if same_loader is not None and same_loader["length"] != loader["length"]:
                lines.append(
                    f"the {loader['dataset']} has {same_loader['length']} samples on rank {facts.rank}, "
                    f"and {loader['length']} on one process"
                )
    return lines


def _count_extra_rows(several: RunRecord, updates: list[int], key: SampleKey, extra: Counter[Any]) -> dict[int, int]:
    """Return, by rank, the number of rows whose hash is in `extra`. Ranks without such rows are left out.

    Args:
        several: Run on several processes.
        updates: Numbers of the updates to examine.
        key: Kind of hash: "row_hashes" or "unpadded_hashes" (without padding).
        extra: By hash, how many times more often each sample was trained on than in the single-process run. Only
            samples with a positive number are contained.
    """
    numbers: dict[int, int] = {}
    for rank, by_number in enumerate(several.updates_by_rank):
        rows = [row for each in updates for batch in by_number[each].batches for row in batch.get(key, ())]
        number = sum(row in extra for row in rows)
        if number:
            numbers[rank] = number
    return numbers


def _sum_counts(record: RunRecord, updates: list[int], key: SampleKey) -> Counter[Any]:
    """Return how often each sample was trained on in all given updates together."""
    total: Counter[Any] = Counter()
    for each in updates:
        total += count_samples(record, each, key)
    return total
