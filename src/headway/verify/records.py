"""`RunRecord`: what `RunRecorder` has written about one run, for the proofs to read. This module imports no torch."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from headway.verify.record_types import LossEntry, RunFacts, UpdateRecord
from headway.verify.request import STALLED_CODE, RunRequest

Arrays = dict[str, Any]
"""Recorded values by tensor name. For a large tensor, only a sample of its values is recorded."""


@dataclass
class RunRecord:
    """Records of one run.

    Attributes:
        request: Options of the run.
        num_processes: Number of processes of the run.
        code: Exit code of the run; None if it was ended because it took too long.
        output: Last lines that the run printed.
        seconds: Duration of the run, in seconds.
        facts_by_rank: What each rank has recorded about the run as a whole, by global rank. Ranks from the first one on
            that recorded nothing are left out.
        updates_by_rank: Updates of each rank in `facts_by_rank`, by the number of the update.
    """

    request: RunRequest
    num_processes: int
    code: int | None
    output: str
    seconds: float = 0.0
    facts_by_rank: list[RunFacts] = field(default_factory=list)
    updates_by_rank: list[dict[int, UpdateRecord]] = field(default_factory=list)
    # Contents of files that were read already: losses by rank, and arrays by update.
    _losses_by_rank: dict[int, list[LossEntry]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _arrays_by_update: dict[int, Arrays] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def rank0_facts(self) -> RunFacts:
        """What global rank 0 has recorded about the run as a whole. Only defaults if it has recorded nothing."""
        return self.facts_by_rank[0] if self.facts_by_rank else RunFacts()

    @property
    def rank0_updates(self) -> dict[int, UpdateRecord]:
        """Updates of global rank 0, by the number of the update. Empty if there are none."""
        return self.updates_by_rank[0] if self.updates_by_rank else {}

    @property
    def last_update(self) -> int:
        """Number of the last update that global rank 0 has recorded; 0 if there is none."""
        return max(self.rank0_updates, default=0)

    @property
    def is_complete(self) -> bool:
        """Whether the run ended without an error and made at least one update on every rank."""
        return self.code == 0 and bool(self.updates_by_rank) and all(self.updates_by_rank)

    @property
    def has_stalled(self) -> bool:
        """Whether the run was ended because it made no progress, or because it took too long in all."""
        return self.code in (None, STALLED_CODE)

    @property
    def draws_random_numbers(self) -> bool:
        """Whether the training loop on global rank 0 draws random numbers from torch's global generator.

        Dropout counts, even if its rate is 0 during the recorded updates.
        """
        facts = self.rank0_facts
        return bool(facts.draw_lines or facts.num_dropout_calls or facts.num_dropout_rates)

    @cached_property
    def start(self) -> Arrays:
        """Parameter values before the first update, as NumPy arrays, with "p:NAME" as keys. Empty if none were recorded.

        Of a large parameter, only a sample of its values is recorded (`sample_values`).
        """
        return self._load_arrays("start")

    def gradients(self, update: int) -> Arrays:
        """Return the gradients of an update, by parameter name, as `sample_values` has recorded them."""
        return {name[2:]: value for name, value in self._read_update(update).items() if name.startswith("g:")}

    def values(self, update: int) -> Arrays:
        """Return the values of the parameters after an update, by name, as `sample_values` has recorded them.

        Update 0 is the start of the run.
        """
        arrays = self.start if update == 0 else self._read_update(update)
        return {name[2:]: value for name, value in arrays.items() if name.startswith("p:")}

    def trace(self, rank: int, update: int) -> list[LossEntry]:
        """Return the losses of an update on one rank, each with the torch calls that computed it.

        Losses whose backward pass failed are left out.

        Args:
            rank: Global rank.
            update: Number of the update.
        """
        if rank not in self._losses_by_rank:
            self._losses_by_rank[rank] = self._read_losses(rank)
        return [each for each in self._losses_by_rank[rank] if each.update == update]

    def _read_losses(self, rank: int) -> list[LossEntry]:
        """Return the losses that a rank has recorded, in order, without those whose backward pass failed."""
        path = Path(self.request.folder, f"trace{rank}.jsonl")
        losses: list[LossEntry] = []
        for entry in _read_json_lines(path):
            if "is_void" in entry:  # the backward pass of the loss before this entry has failed
                losses = losses[:-1]
            else:
                losses.append(LossEntry.from_dict(entry))
        return losses

    def _read_update(self, update: int) -> Arrays:
        """Return the arrays of an update, by name. They are read from the disk only once."""
        if update not in self._arrays_by_update:
            self._arrays_by_update[update] = self._load_arrays(f"update_{update}")
        return self._arrays_by_update[update]

    def _load_arrays(self, name: str) -> Arrays:
        """Return the arrays that all ranks have written under a name, in float64.

        Args:
            name: Name of the files, without the rank and the suffix.
        """
        # Under pipeline parallelism, each rank has written only the parameters of its stages. Otherwise rank 0 has
        # written all of them.
        arrays: Arrays = {}
        for rank in range(self.num_processes):
            path = Path(self.request.folder, f"{name}.{rank}.npz")
            if not path.exists():
                continue
            with numpy.load(path) as file:
                arrays |= {key: file[key].astype(numpy.float64) for key in file.files if key not in arrays}
        return arrays


def _read_json_lines(path: Path) -> list[Any]:
    """Return the objects in a file with one JSON object per line; an empty list if there is no file.

    A line that is no valid JSON is left out, because the process was killed while it wrote the line.
    """
    entries = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def read_record(request: RunRequest, num_processes: int, code: int | None, output: str, seconds: float) -> RunRecord:
    """Return the record of a run, read from the folder of its request.

    Ranks from the first one on that has not written its file `facts<rank>.json` are left out.

    Args:
        request: Options of the run.
        num_processes: Number of processes of the run.
        code: Exit code of the run; None if it was ended because it took too long.
        output: Last lines that the run printed.
        seconds: Duration of the run, in seconds.
    """
    record = RunRecord(request, num_processes, code, output, seconds)
    folder = Path(request.folder)
    for rank in range(num_processes):
        path = folder / f"facts{rank}.json"
        if not path.exists():
            break
        record.facts_by_rank.append(RunFacts(**json.loads(path.read_text())))
        updates = [UpdateRecord(**entry) for entry in _read_json_lines(folder / f"rank{rank}.jsonl")]
        record.updates_by_rank.append({each.number: each for each in updates})
    return record
