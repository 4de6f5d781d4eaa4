"""`Proof` and its result, a `Verdict`, and `RunSet`, the records of the runs that the proofs compare."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headway.verify.records import RunRecord
from headway.verify.stacks import describe_stuck, read_stacks

Status = Literal["PASS", "FAIL", "NOT CHECKED"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of one proof, which is a check of `headway verify`.

    Attributes:
        key: Word that selects the proof on the command line.
        title: Title of the proof in the printed table.
        status: "PASS", "FAIL" or "NOT CHECKED".
        reason: Result in one line.
        details: Lines that describe where a difference was found.
        advice: Changes to the script that are likely to help.
        page: Page of the documentation, such as "data.md".
    """

    key: str
    title: str
    status: Status
    reason: str
    details: tuple[str, ...] = ()
    advice: str = ""
    page: str = ""


@dataclass(frozen=True)
class Proof:
    """Name of a proof, which is a check of `headway verify`. Its methods create the proof's verdicts.

    Attributes:
        key: Word that selects the proof on the command line.
        title: Title of the proof in the printed table.
        page: Page of the documentation for failures whose cause has no page of its own, such as "data.md".
    """

    key: str
    title: str
    page: str = ""

    def report_pass(self, reason: str, *, page: str = "") -> Verdict:
        """Return the verdict "PASS".

        Args:
            reason: Result in one line.
            page: Page of the documentation. Default: "", no page.
        """
        return Verdict(key=self.key, title=self.title, status="PASS", reason=reason, page=page)

    def report_failure(
        self, reason: str, *, details: Sequence[str] = (), advice: str = "", page: str | None = None
    ) -> Verdict:
        """Return the verdict "FAIL".

        Args:
            reason: Difference and its cause in one line.
            details: Lines that describe where the difference was found. Default: no lines.
            advice: Change to the script that is likely to help. Default: "", no advice.
            page: Page of the documentation. Default: None, the proof's page.
        """
        return Verdict(
            key=self.key,
            title=self.title,
            status="FAIL",
            reason=reason,
            details=tuple(details),
            advice=advice,
            page=self.page if page is None else page,
        )

    def report_unchecked(
        self, reason: str, *, details: Sequence[str] = (), advice: str = "", page: str = ""
    ) -> Verdict:
        """Return the verdict "NOT CHECKED".

        Args:
            reason: Why the proof could not be made, in one line.
            details: Lines that describe the reason. Default: no lines.
            advice: Change to the script that makes the proof possible. Default: "", no advice.
            page: Page of the documentation. Default: "", no page.
        """
        return Verdict(
            key=self.key,
            title=self.title,
            status="NOT CHECKED",
            reason=reason,
            details=tuple(details),
            advice=advice,
            page=page,
        )


def shorten_paths(verdict: Verdict) -> Verdict:
    """Return a copy of a verdict in which paths of files in the current folder are relative to this folder."""
    here = os.getcwd() + os.sep
    return replace(
        verdict,
        reason=verdict.reason.replace(here, ""),
        details=tuple(each.replace(here, "") for each in verdict.details),
        advice=verdict.advice.replace(here, ""),
    )


@dataclass
class RunSet:
    """Records of all runs of the user's script. A run that was not needed or could not be made is None.

    Attributes:
        baseline: Plain single-process run.
        repeat: Repetition of `baseline` with reversed folder listings. It saves a checkpoint and is killed later.
        reference: Single-process run with which runs on several processes are compared. It is `baseline` itself unless
            the seed, the order of samples or random draws must be made independent of the number of processes.
        reordered: Repetition of `reference` with the rows of each batch reversed.
        several: Run on several processes with the global batch of `reference`.
        layout: Run on several processes under the layout that was given on the command line.
        resumed: Single-process run that continues `repeat` from its checkpoint.
        resumed_on_several: Run on several processes that continues `repeat` from its checkpoint.
        replayed: Repetition of `baseline` with one injected out-of-memory error.
        probed: Run of one update in which the model is tested for leaks between parts of a batch.
        measured: Run of two updates that measures the peak memory of tensors.
        forecast: Forecast of memory on the device of the runs.
        full: Forecast of memory on the device of the full run.
        num_processes: Number of processes of `several`.
        layout_name: Name of the layout that was given on the command line; "" if there is none.
        notes: Remarks for the user, such as which device was used.
    """

    baseline: RunRecord
    repeat: RunRecord | None = None
    reference: RunRecord | None = None
    reordered: RunRecord | None = None
    several: RunRecord | None = None
    layout: RunRecord | None = None
    resumed: RunRecord | None = None
    resumed_on_several: RunRecord | None = None
    replayed: RunRecord | None = None
    probed: RunRecord | None = None
    measured: RunRecord | None = None
    forecast: RunRecord | None = None
    full: RunRecord | None = None
    num_processes: int = 2
    layout_name: str = ""
    notes: list[str] = field(default_factory=list)


_RANK = re.compile(r"^\[rank\d+\]: ")
"""Prefix with which torch marks the lines of a rank's traceback."""


def describe_failure(record: RunRecord) -> str:
    """Return one line of text about a failed run: its first error, or the line of code at which it made no progress.

    Args:
        record: Record of the run. Only its last lines of output are searched.
    """
    if record.has_stalled:
        where = describe_stuck(read_stacks(Path(record.request.folder), record.num_processes))
        load = describe_load()
        phrases = [
            f"it made {record.last_update} updates, then none for too long, and was ended after {record.seconds:.0f} s"
        ]
        if where:
            phrases.append(where)
        if load:
            phrases.append(f"{load} (--time_limit gives each run more time)")
        return "; ".join(phrases)
    lines = [_RANK.sub("", line).strip() for line in record.output.splitlines() if line.strip()]
    errors = [line for line in lines if _looks_like_error(line)]
    text = errors[0] if errors else (lines or [f"exit code {record.code}"])[-1]
    return text if len(text) <= 300 else text[:297] + "..."


def describe_load() -> str:
    """Return a phrase about this machine's load if it has more running processes than CPU cores; else ""."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"this machine is busy: load average {load:.1f} on {cores} CPU cores" if load > cores else ""


def _looks_like_error(line: str) -> bool:
    """Whether a line of output has the form of an exception, such as "torch.OutOfMemoryError: CUDA out of memory"."""
    name, colon, _ = line.partition(":")
    is_exception = name.rpartition(".")[2].endswith(("Error", "Exception", "Failed", "Interrupt"))
    return bool(colon) and " " not in name and is_exception
