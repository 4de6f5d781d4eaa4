"""Builders for records of runs."""

from typing import Any

import numpy

from headway.verify.record_types import RunFacts, UpdateRecord
from headway.verify.records import RunRecord
from headway.verify.request import RunRequest

NAMES = ("first.weight", "first.bias", "last.weight")


def make_update(number: int, rows: tuple[str, ...] = (), **changes: Any) -> UpdateRecord:
    """Return an update that trained on some rows."""
    given: dict[str, Any] = {
        "number": number,
        "batches": [{"loader": 0, "row_hashes": list(rows), "unpadded_hashes": list(rows), "indices": []}],
        "losses": [1.0 / number],
        "gradient_norms": dict.fromkeys(NAMES, 1.0),
        "parameter_hashes": {name: f"{name} {number}" for name in NAMES},
        "buffer_hashes": {},
        "learning_rates": [0.1],
        "seconds": 1.0,
        "peak_bytes": 1000,
    }
    return UpdateRecord(**{**given, **changes})


def make_record(
    num_updates: int = 4,
    num_ranks: int = 1,
    scale: float = 1.0,
    noise: float = 0.0,
    facts: dict[str, Any] | None = None,
    changes: dict[int, dict[str, Any]] | None = None,
    code: int = 0,
) -> RunRecord:
    """A run of several updates, whose ranks share eight rows in each update.

    Args:
        num_updates: Number of updates.
        num_ranks: Number of ranks.
        scale: Factor of all gradients.
        noise: Relative size of random differences of gradients and values.
        facts: Facts to add on every rank.
        changes: Changes to `make_update` by update.
        code: Exit code.
    """
    request = RunRequest("made", "/nowhere", "/nowhere/output")
    record = RunRecord(request, num_ranks, code, "")
    size = 8 // num_ranks
    for rank in range(num_ranks):
        about = {
            "rank": rank,
            "data_shard_index": rank,
            "end_reason": "enough",
            "loaders": {},
            "trainable_parameters": list(NAMES),
        }
        about["initial_hashes"] = {name: f"{name} 0" for name in NAMES}
        record.facts_by_rank.append(RunFacts(**{**about, **(facts or {})}))
        updates = {}
        for number in range(1, num_updates + 1):
            rows = tuple(f"row {8 * number + rank * size + each}" for each in range(size))
            updates[number] = make_update(number, rows, **(changes or {}).get(number, {}))
        record.updates_by_rank.append(updates)
    source, errors = numpy.random.default_rng(0), numpy.random.default_rng(1)
    known: dict[int, dict[str, Any]] = {}
    for number in range(num_updates + 1):
        arrays = {}
        for name in NAMES:
            gradient, value = source.normal(size=20), source.normal(size=20) + number
            arrays[f"g:{name}"] = scale * gradient * (1 + noise * errors.normal(size=20))
            arrays[f"p:{name}"] = value + bool(number) * noise * errors.normal(size=20)
        known[number] = arrays
    record.__dict__["_arrays_by_update"] = known
    record.__dict__["start"] = known[0]
    return record
