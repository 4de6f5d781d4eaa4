"""What is said of a run in words and numbers: its state, how long, how fast, how good; and how configurations differ."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from headway.tracking.report.data import RunData
from headway.tracking.report.looks import kind_of
from headway.tracking.report.numbers import duration, text

_FRESH = 120.0
"""Seconds of silence after which a run without an end is hardly alive."""


@dataclass(frozen=True)
class Fact:
    """One figure.

    Attributes:
        name: what it is.
        value: as text.
        note: what it means, or where it was; may be empty.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    Attributes:
        word: "finished", "preempted", "cut off" or "no end".
        tone: "good", "warn" or "bad".
        note: why it is thought to be so.
    """

    word: str
    tone: str
    note: str


def state(run: RunData) -> RunStatus:
    """Finished or not, as far as a log can tell."""
    if run.is_finished:
        return RunStatus("finished", "good", "")
    silence = f"its last line was written {duration(run.silent_for)} before this page was made"
    if run.is_torn:
        return RunStatus("cut off", "bad", f"killed in the middle of a line; {silence}")
    kinds = [event.kind for event in run.events]
    if kinds and "preempted" in kinds and kinds[-1] not in ("resumed", "restart"):
        return RunStatus("preempted", "warn", f"it was asked to stop and has not been resumed; {silence}")
    if run.silent_for < _FRESH:
        return RunStatus("no end yet", "warn", f"still running, or stopped just now; {silence}")
    return RunStatus("no end", "bad", f"killed, or still running but silent; {silence}")


def moment(seconds: float) -> str:
    """A time of day, in this machine's zone."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError, OSError):  # a log may claim any number
        return f"{seconds:g} s after 1970"


def headline(run: RunData) -> list[Fact]:
    """The few figures that people look for first."""
    found = []
    if run.last_step is not None:
        found.append(Fact("Updates", text(run.last_step)))
    attempts = f"{len(run.starts)} attempts" if len(run.starts) > 1 else ""
    found.append(Fact("Duration", duration(run.seconds), attempts))
    if losses := _select_finite(run, "loss"):
        tail = losses[-max(1, len(losses) // 50) :]
        note = f"from {text(losses[0])}" if len(losses) > 1 else ""
        note += f", mean of the last {len(tail)}" if len(tail) > 1 else ""
        found.append(Fact("Training loss", text(sum(tail) / len(tail)), note))
    if evaluated := [point for point in run.series.get("eval_loss", []) if abs(point[2]) < float("inf")]:
        best = min(evaluated, key=lambda point: point[2])
        found.append(Fact("Best evaluation loss", text(best[2]), f"at step {text(best[0])}" if run.has_steps else ""))
    for name, title, unit in (
        ("samples_per_second", "Samples/s", "rate"),
        ("tokens_per_second", "Tokens/s", "rate"),
        ("mfu", "FLOPs utilisation", "share"),
        ("data_wait", "Waiting for data", "share"),
    ):
        if values := _select_finite(run, name):
            found.append(Fact(title, text(median(values), unit), "median"))
    peaks = [value for name in run.series if name.startswith("memory") for value in _select_finite(run, name)]
    if peaks:
        found.append(Fact("Peak memory", text(max(peaks), "bytes")))
    troubles = Counter(event.kind for event in run.events if kind_of(event.kind).tone in ("bad", "warn"))
    if troubles:
        what = ", ".join(f"{count} {kind_of(kind).words}" for kind, count in troubles.most_common())
        found.append(Fact("Incidents", str(troubles.total()), what))
    return found


def environment(run: RunData) -> list[Fact]:
    """Where it ran."""
    found = [Fact("Began", moment(run.began)), Fact("Last line", moment(run.began + run.seconds))]
    found += [Fact("Project", run.project)] if run.project else []
    if run.starts:
        last = run.starts[-1]
        worlds = list(dict.fromkeys(start.world_size for start in run.starts))
        devices = list(dict.fromkeys(start.device for start in run.starts))
        found.append(Fact("Processes", " → ".join(map(str, worlds))))
        found.append(Fact("Device", " → ".join(devices)))
        found.append(Fact("Attempts", str(len(run.starts))))
        found += [Fact(name, str(version)) for name, version in last.versions.items()]
    if run.damaged:
        found.append(Fact("Unreadable lines", ", ".join(map(str, run.damaged[:10])), "left out"))
    found.append(Fact("Log", str(run.path)))
    return found


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str | None]]]:
    """The settings, processes, device and versions in which runs are not alike: name, and each run's value."""
    tables = [{**run.config, **_list_circumstances(run)} for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [written(table[name]) if name in table else None for table in tables]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _list_circumstances(run: RunData) -> dict[str, Any]:
    if not run.starts:
        return {}
    last = run.starts[-1]
    versions = {f"version of {name}": version for name, version in last.versions.items()}
    return {"processes": last.world_size, "device": last.device, **versions}


def written(value: Any) -> str:
    """A setting as text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def figure(name: str, value: Any) -> str:
    """A number of the summary, in the unit that its name tells."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return written(value)
    is_bytes = name.endswith("bytes") or "memory" in name
    is_seconds = name.endswith(("runtime", "_seconds"))
    return text(value, "bytes" if is_bytes else "seconds" if is_seconds else "number")


def _select_finite(run: RunData, name: str) -> list[float]:
    return [value for _, _, value in run.series.get(name, []) if abs(value) < float("inf")]
