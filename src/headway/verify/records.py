"""`RunRecord`: what `RunRecorder` has written about one run, for the proofs to read. This module imports no torch."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from headway.verify.record_types import BatchEntry, LossEntry, RunFacts
from headway.verify.request import RunRequest

Arrays = dict[str, Any]
"""Recorded values by tensor name. For a large tensor, only a sample of its values is recorded."""


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """Record of one update on one rank. An update is one optimizer step, with all batches that it uses.

    A line of the script is a text such as "train.py:12 in main".

    Attributes:
        number: Number of the update in the run, from 1.
        batches: Batches from which the update was computed.
        losses: Value of each loss, in order.
        learning_rates: Learning rate of each parameter group of all prepared optimizers, in order.

        gradient_norms: Norm of each parameter's gradient, as the optimizer received it, by parameter name.
        parameter_hashes: Hash of each parameter's value after the update, by parameter name.
        buffer_hashes: Hash of each buffer's value after the update, by buffer name.
        unprepared_hashes: Hash of the parameters of each model that was not passed to `prepare`, by a description of
            the model, such as "Teacher, created at train.py:9".
        idle_experts: Indices of the experts without gradient, by the name of the parameter that contains all experts.
        frozen_with_gradient: Names of the frozen parameters that had a gradient at each optimizer step of the update.
        training_modes: Modes ("train", "eval") in which a model was called with gradients, by the index of the prepared
            model as text; "-1" is a model that was not prepared.

        write_lines: Lines of the script that changed a parameter or buffer in place, by the name of the tensor.
        unprepared_write_lines: Lines of the script that changed a model that was not passed to `prepare`, by a
            description of the model.
        gradient_lines: For each line of the script that changed gradients, how many backward passes of the update had
            run before each change.
        rate_lines: Lines of the script that set a learning rate.
        discard_lines: Lines of the script that cleared gradients of a batch before an optimizer step used them. A line
            occurs once for each batch.

        seconds: Duration of the update, in seconds.
        cpu_seconds: CPU time that the main thread spent on the update, in seconds.
        peak_bytes: Peak memory from the start of the process: bytes allocated on the GPU, or, on a CPU, the resident
            memory of the process.
        resident_bytes: Memory in use after the update, measured like `peak_bytes`.
    """

    number: int
    batches: list[BatchEntry] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)

    gradient_norms: dict[str, float] = field(default_factory=dict)
    parameter_hashes: dict[str, str] = field(default_factory=dict)
    buffer_hashes: dict[str, str] = field(default_factory=dict)
    unprepared_hashes: dict[str, str] = field(default_factory=dict)
    idle_experts: dict[str, list[int]] = field(default_factory=dict)
    frozen_with_gradient: list[str] = field(default_factory=list)
    training_modes: dict[str, list[str]] = field(default_factory=dict)

    write_lines: dict[str, list[str]] = field(default_factory=dict)
    unprepared_write_lines: dict[str, list[str]] = field(default_factory=dict)
    gradient_lines: dict[str, list[int]] = field(default_factory=dict)
    rate_lines: list[str] = field(default_factory=list)
    discard_lines: list[str] = field(default_factory=list)

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    resident_bytes: int = 0


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

    @property
    def rank0_facts(self) -> RunFacts:
        """What global rank 0 has recorded about the run as a whole. Empty if it has recorded nothing."""
        return self.facts_by_rank[0] if self.facts_by_rank else {}

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
    def draws_random_numbers(self) -> bool:
        """Whether the training loop on global rank 0 draws random numbers from torch's global generator.

        Dropout counts, even if its rate is 0 during the recorded updates.
        """
        facts = self.rank0_facts
        return bool(facts.get("draw_lines") or facts.get("num_dropout_calls") or facts.get("num_dropout_rates"))

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
        losses_by_rank = self.__dict__.setdefault("_losses_by_rank", {})
        if rank not in losses_by_rank:
            losses_by_rank[rank] = self._read_losses(rank)
        return [each for each in losses_by_rank[rank] if each["update"] == update]

    def _read_losses(self, rank: int) -> list[LossEntry]:
        path = Path(self.request.folder, f"trace{rank}.jsonl")
        losses: list[LossEntry] = []
        for entry in _read_json_lines(path):
            if "is_void" in entry:  # the backward pass of the loss before this entry has failed
                losses = losses[:-1]
            else:
                losses.append(entry)
        return losses

    def _read_update(self, update: int) -> Arrays:
        arrays_by_update = self.__dict__.setdefault("_arrays_by_update", {})
        if update not in arrays_by_update:
            arrays_by_update[update] = self._load_arrays(f"update_{update}")
        return arrays_by_update[update]  # type: ignore[no-any-return]

    def _load_arrays(self, name: str) -> Arrays:
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
        record.facts_by_rank.append(json.loads(path.read_text()))
        updates = [UpdateRecord(**entry) for entry in _read_json_lines(folder / f"rank{rank}.jsonl")]
        record.updates_by_rank.append({each.number: each for each in updates})
    return record
