"""`RunRecord`: what `RunRecorder` has written about one run, for the proofs to read. This module imports no torch."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from headway.verify.request import RunRequest

Arrays = dict[str, Any]
"""Recorded values by tensor name. For a large tensor, only a sample of its values is recorded."""


@dataclass(frozen=True)
class UpdateRecord:
    """Record of one update on one rank.

    Attributes:
        number: Number of the update in the run, from 1.
        batches: Batches from which the update was computed: {"rows": fingerprints, "indices": dataset indices, ...}.
        losses: Value of each loss, in order.
        norms: Norm of each parameter's gradient, as the optimizer received it.
        hashes: Hash of each parameter after the update.
        buffers: Hash of each buffer after the update.
        rates: Learning rates of all parameter groups.
        seconds: Duration of the update in seconds.
        memory: Peak memory so far, in bytes.
        resident: Memory in use after the update, in bytes.
        unused: Indices of experts without gradient, by the name of the parameter that contains all experts.
        written: Lines of the script that changed a parameter or buffer in place, by the name of the tensor.
        rate_lines: Lines of the script that set a learning rate.
        others: Hash of each model that was not passed to `prepare`, by a description of the model.
        busy: CPU time that the main thread spent on the update, in seconds.
        written_outside: Lines of the script that changed a model that was not passed to `prepare`, by a description of
            the model.
        gradient_lines: For each line of the script that changed gradients, how many backward passes of the update had
            run before each change.
        modes: Modes in which a model was called with gradients ("train", "eval"), by the number of the model.
        stale: Names of the frozen parameters that still had a gradient at each optimizer step of the update.
        discarded: Lines of the script that cleared gradients of a batch before an optimizer step used them.
    """

    number: int
    batches: list[dict[str, Any]]
    losses: list[float]
    norms: dict[str, float]
    hashes: dict[str, str]
    buffers: dict[str, str]
    rates: list[float]
    seconds: float
    memory: int
    resident: int = 0
    unused: dict[str, list[int]] = field(default_factory=dict)
    written: dict[str, list[str]] = field(default_factory=dict)
    rate_lines: list[str] = field(default_factory=list)
    others: dict[str, str] = field(default_factory=dict)
    busy: float = 0.0
    written_outside: dict[str, list[str]] = field(default_factory=dict)
    gradient_lines: dict[str, list[int]] = field(default_factory=dict)
    modes: dict[str, list[str]] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)

    @property
    def norm(self) -> float:
        """Norm of the gradients of all parameters."""
        return float(sum(value * value for value in self.norms.values()) ** 0.5)


@dataclass
class RunRecord:
    """Records of one run.

    Attributes:
        request: Options of the run.
        num_processes: Number of processes of the run.
        code: Exit code of the run; None if it was ended because it took too long.
        output: Last lines that the run printed.
        seconds: Duration of the run.
        facts: One dict per rank with the rank's recorded data that is not about a single update.
        updates: One dict per rank with the rank's updates, by number.
        note: Remark about how the run was started, such as "on the CPU".
    """

    request: RunRequest
    num_processes: int
    code: int | None
    output: str
    seconds: float = 0.0
    facts: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[int, UpdateRecord]] = field(default_factory=list)
    note: str = ""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.request.name

    @property
    def fact(self) -> dict[str, Any]:
        """Facts that rank 0 recorded about the whole run, as a dict. Empty if rank 0 recorded none."""
        return self.facts[0] if self.facts else {}

    @property
    def first(self) -> dict[int, UpdateRecord]:
        """Updates of rank 0, by number."""
        return self.updates[0] if self.updates else {}

    @property
    def last_update(self) -> int:
        """Number of the last recorded update; 0 if there is none."""
        return max(self.first, default=0)

    @property
    def is_complete(self) -> bool:
        """Whether the run ended without an error and made at least one update on every rank."""
        return self.code == 0 and bool(self.updates) and all(self.updates)

    @cached_property
    def start(self) -> Arrays:
        """Values of the parameters before the first update, with "p:NAME" as keys."""
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

    def trace(self, rank: int, update: int) -> list[dict[str, Any]]:
        """Return the torch calls behind each loss of an update on one rank: one `CallTrace` entry per loss."""
        known = self.__dict__.setdefault("_traces", {})
        if rank not in known:
            path = Path(self.request.folder, f"trace{rank}.jsonl")
            lines = path.read_text().splitlines() if path.exists() else []
            known[rank] = []
            for entry in map(_parse_line, lines):
                if entry is not None and entry.get("is_void"):
                    known[rank] = known[rank][:-1]
                elif entry is not None:
                    known[rank].append(entry)
        return [each for each in known[rank] if each["update"] == update]

    def _read_update(self, update: int) -> Arrays:
        known = self.__dict__.setdefault("_known", {})
        if update not in known:
            known[update] = self._load_arrays(f"update_{update}")
        return known[update]  # type: ignore[no-any-return]

    def _load_arrays(self, name: str) -> Arrays:
        arrays: Arrays = {}
        for rank in range(self.num_processes):
            path = Path(self.request.folder, f"{name}.{rank}.npz")
            if not path.exists():
                continue
            with numpy.load(path) as file:
                arrays |= {each: file[each].astype(numpy.float64) for each in file.files if each not in arrays}
        return arrays


def _parse_line(line: str) -> Any:
    """Return the object in a line of JSON, or None if the process was killed while it wrote the line."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def read_record(
    request: RunRequest, num_processes: int, code: int | None, output: str, seconds: float, note: str = ""
) -> RunRecord:
    """Return the record of a run, read from the folder of its request.

    Ranks from the first one on that has not written its file `facts<rank>.json` are left out.

    Args:
        request: Options of the run.
        num_processes: Number of processes of the run.
        code: Exit code of the run; None if it was ended because it took too long.
        output: Last lines that the run printed.
        seconds: Duration of the run.
        note: Remark about how the run was started. Default: "".
    """
    record = RunRecord(request, num_processes, code, output, seconds, note=note)
    folder = Path(request.folder)
    for rank in range(num_processes):
        path = folder / f"facts{rank}.json"
        if not path.exists():
            break
        record.facts.append(json.loads(path.read_text()))
        updates = {}
        lines = folder / f"rank{rank}.jsonl"
        for line in lines.read_text().splitlines() if lines.exists() else ():
            entry = _parse_line(line)
            if entry is None:
                continue
            updates[entry["update"]] = UpdateRecord(
                number=entry["update"],
                batches=entry["batches"],
                losses=entry["losses"],
                norms=entry["norms"],
                hashes=entry["hashes"],
                buffers=entry["buffers"],
                rates=entry["rates"],
                seconds=entry["seconds"],
                memory=entry["memory"],
                resident=entry.get("resident", 0),
                unused=entry.get("unused", {}),
                written=entry.get("written", {}),
                rate_lines=entry.get("rate_lines", []),
                others=entry.get("others", {}),
                busy=entry.get("busy", 0.0),
                written_outside=entry.get("written_outside", {}),
                gradient_lines=entry.get("gradient_lines", {}),
                modes=entry.get("modes", {}),
                stale=entry.get("stale", []),
                discarded=entry.get("discarded", []),
            )
        record.updates.append(updates)
    return record
