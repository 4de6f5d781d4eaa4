"""Count how often samples occur in the recorded updates of a run."""

from collections import Counter
from typing import Any

from headway.verify.record_types import SampleKey
from headway.verify.records import RunRecord


def count_samples(record: RunRecord, update: int, key: SampleKey) -> Counter[Any]:
    """Return how often each sample was trained on in an update. Ranks that share a data shard are counted once.

    Args:
        record: Records of the run.
        update: Number of the update.
        key: Property by which samples are recognized: "row_hashes" (hash of the contents), "unpadded_hashes" (hash of
            the contents without padding) or "indices" (index in the dataset).
    """
    counts: Counter[Any] = Counter()
    seen_shards = set()
    for facts, updates in zip(record.facts_by_rank, record.updates_by_rank, strict=False):
        shard = facts.data_shard_index
        if shard in seen_shards or update not in updates:
            continue
        seen_shards.add(shard)
        for batch in updates[update].batches:
            counts.update(batch.get(key, ()))
    return counts


def count_rows(record: RunRecord, update: int) -> int:
    """Return the number of samples in an update, over all data shards."""
    return sum(count_samples(record, update, "row_hashes").values())
