"""Content of a report's tables: a run's status, key figures and environment, and the settings that differ between runs."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from statistics import median
from typing import Any

from headway.core.tracking.report.data import RunData
from headway.core.tracking.report.event_kinds import find_event_kind
from headway.core.tracking.report.number_formats import format_duration, format_value
from headway.core.tracking.report.panels import WAIT_BY_RANK, split_role

_ALIVE_SECONDS = 120.0
"""Seconds without a new line in the log after which an unfinished run is assumed to be dead."""
_METRICS = ("accuracy", "acc", "f1", "auc", "perplexity", "precision", "recall", "bleu")
"""Last words of names, such as "train_accuracy", whose values are shown as metrics even outside an evaluation."""
_NO_METRICS = ("loss", "runtime", "per_second", "memory", "memory_peak", "epoch", "step", "time")
"""Endings of names, such as "eval_runtime", whose values are not shown as metrics of an evaluation."""
_MAX_METRICS = 4
"""Maximum number of metrics among the key figures."""


@dataclass(frozen=True)
class KeyFigure:
    """One figure in a report, with its name and an explanation.

    Attributes:
        name: Name of the figure.
        value: Value as text.
        note: Explanation of the value, or where it occurred; may be empty.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, such as finished or killed, as inferred from its log.

    Attributes:
        word: "finished", "preempted", "cut off", "no end yet" or "no end".
        tone: "good", "warn" or "bad".
        note: Reason why the report assumes this status; empty for a finished run.
    """

    word: str
    tone: str
    note: str


def infer_run_status(run: RunData) -> RunStatus:
    """Return the status of a run, such as finished or killed, as inferred from its log."""
    if run.is_finished:
        return RunStatus("finished", "good", "")
    silence = f"its last line was written {format_duration(run.seconds_since_last_line)} before this page was made"
    if run.ends_in_partial_line:
        return RunStatus("cut off", "bad", f"killed in the middle of a line; {silence}")
    kinds = [event.kind for event in run.events]
    if kinds and "preempted" in kinds and kinds[-1] not in ("resumed", "restart"):
        return RunStatus("preempted", "warn", f"it was asked to stop and has not been resumed; {silence}")
    if run.seconds_since_last_line < _ALIVE_SECONDS:
        return RunStatus("no end yet", "warn", f"still running, or stopped just now; {silence}")
    return RunStatus("no end", "bad", f"killed, or still running but silent; {silence}")


def format_time(seconds: float) -> str:
    """Return a date and time of day in this machine's time zone.

    Args:
        seconds: Seconds since 1970.
    """
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError, OSError):  # a log may contain any number
        return f"{seconds:g} s after 1970"


def list_key_figures(run: RunData) -> list[KeyFigure]:
    """Return the figures at the top of a report: updates, data, duration, losses, speed, memory and incidents.

    Figures that were not logged are left out.
    """
    figures = []
    if run.last_step is not None:
        figures.append(KeyFigure("Updates", format_value(run.last_step)))
    for name, title in (("samples_seen", "Samples seen"), ("tokens_seen", "Tokens seen")):
        if values := _select_finite(run, name):
            figures.append(KeyFigure(title, format_value(values[-1])))
    attempts = f"{len(run.starts)} attempts" if len(run.starts) > 1 else ""
    figures.append(KeyFigure("Duration", format_duration(run.seconds), attempts))
    figures += _list_losses(run)
    figures += _list_metrics(run)
    for name, title, unit in (
        ("samples_per_second", "Samples/s", "rate"),
        ("tokens_per_second", "Tokens/s", "rate"),
        ("mfu", "FLOPs utilization", "share"),
        ("data_wait", "Waiting for data", "share"),
    ):
        if values := _select_finite(run, name):
            figures.append(KeyFigure(title, format_value(median(values), unit), "median"))
    figures += _list_longest_wait(run)
    peaks = [value for name in run.series if name.startswith("memory") for value in _select_finite(run, name)]
    if peaks:
        figures.append(KeyFigure("Peak memory", format_value(max(peaks), "bytes")))
    troubles = Counter(event.kind for event in run.events if find_event_kind(event.kind).tone in ("bad", "warn"))
    if troubles:
        description = ", ".join(f"{count} {find_event_kind(kind).label}" for kind, count in troubles.most_common())
        figures.append(KeyFigure("Incidents", str(troubles.total()), description))
    return figures


def _list_longest_wait(run: RunData) -> list[KeyFigure]:
    """Return a list with the rank that waits longest for data; an empty list if no waits were logged."""
    wait_by_rank = {}
    for name in run.series:
        values = _select_finite(run, name) if name.startswith(WAIT_BY_RANK) else []
        if values:
            wait_by_rank[name.removeprefix(WAIT_BY_RANK)] = median(values)
    if not wait_by_rank:
        return []
    rank = max(wait_by_rank, key=lambda each: wait_by_rank[each])
    share = format_value(wait_by_rank[rank], "share")
    return [KeyFigure("Waits longest for data", f"rank {rank}", f"{share} of its time, median")]


def _list_losses(run: RunData) -> list[KeyFigure]:
    """Return the final training loss, and the best loss of each kind of evaluation."""
    figures = []
    training_name = next((name for name in run.series if split_role(name) == ("", "loss")), "loss")
    if losses := _select_finite(run, training_name):
        last_losses = losses[-max(1, len(losses) // 50) :]
        note = f"from {format_value(losses[0])}" if len(losses) > 1 else ""
        note += f", mean of the last {len(last_losses)}" if len(last_losses) > 1 else ""
        figures.append(KeyFigure("Training loss", format_value(sum(last_losses) / len(last_losses)), note))
    # If several names have one role, such as "eval_loss" and "eval/loss", the last one is shown.
    series_by_kind = {}
    for name, series in run.series.items():
        kind, metric = split_role(name)
        if kind and metric == "loss":
            series_by_kind[kind] = series
    for kind, series in series_by_kind.items():
        if finite := [(value, step) for step, _, value in series if abs(value) < float("inf")]:
            best_value, best_step = min(finite, key=itemgetter(0))
            note = f"at step {format_value(best_step)}" if run.has_steps else ""
            figures.append(KeyFigure(f"Best {kind} loss", format_value(best_value), note))
    return figures


def _list_metrics(run: RunData) -> list[KeyFigure]:
    """Return the metrics of a run other than losses, such as the accuracy of an evaluation, with their last values."""
    figures: list[KeyFigure] = []
    for name in run.series:
        kind, metric = split_role(name)
        is_metric = metric.rpartition("_")[2] in _METRICS or (kind and not metric.endswith(_NO_METRICS))
        values = _select_finite(run, name)
        if is_metric and values and len(figures) < _MAX_METRICS:
            note = f"from {format_value(min(values))} to {format_value(max(values))}" if len(values) > 1 else ""
            title = f"{kind} {metric}".strip().replace("_", " ").replace("/", " ")
            figures.append(KeyFigure(title[:1].upper() + title[1:], format_value(values[-1]), note))
    return figures


def list_summary(run: RunData) -> list[tuple[str, str]]:
    """Return pairs of (name, text) for the final values of a run.

    The duration is left out, unless the run was restarted. It is then shown as that of the last process.
    """
    rows = [(key, format_figure(key, value)) for key, value in run.summary.items() if key != "seconds"]
    seconds = run.summary.get("seconds")
    if len(run.starts) > 1 and isinstance(seconds, int | float) and not isinstance(seconds, bool):
        rows.append(("duration of the last attempt", format_duration(seconds)))
    return rows


def list_environment(run: RunData) -> list[KeyFigure]:
    """Return figures about a run's environment: times, project, processes, device, versions and the log's path."""
    figures = [
        KeyFigure("Began", format_time(run.start_time)),
        KeyFigure("Last line", format_time(run.start_time + run.seconds)),
    ]
    figures += [KeyFigure("Project", run.project)] if run.project else []
    if run.starts:
        last = run.starts[-1]
        worlds = list(dict.fromkeys(start.world_size for start in run.starts))
        devices = list(dict.fromkeys(start.device for start in run.starts))
        figures.append(KeyFigure("Processes", " → ".join(map(str, worlds))))
        figures.append(KeyFigure("Device", " → ".join(devices)))
        figures.append(KeyFigure("Attempts", str(len(run.starts))))
        figures += [KeyFigure(name, str(version)) for name, version in last.versions.items()]
    if run.damaged_lines:
        figures.append(KeyFigure("Unreadable lines", ", ".join(map(str, run.damaged_lines[:10])), "left out"))
    figures.append(KeyFigure("Log", str(run.path)))
    return figures


def list_differences(runs: Sequence[RunData]) -> list[tuple[str, list[str | None]]]:
    """Return the settings, numbers of processes, devices and versions that differ between runs.

    The result contains pairs of (name, values). The values are texts, one per run; None if a run lacks the setting.
    """
    tables = [{**run.config, **_list_circumstances(run)} for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [format_setting(table[name]) if name in table else None for table in tables]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _list_circumstances(run: RunData) -> dict[str, Any]:
    """Return the number of processes, the device and the package versions of a run's last start, by name."""
    if not run.starts:
        return {}
    last = run.starts[-1]
    versions = {f"version of {name}": version for name, version in last.versions.items()}
    return {"processes": last.world_size, "device": last.device, **versions}


def format_setting(value: Any) -> str:
    """Return a setting as text: strings unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def format_figure(name: str, value: Any) -> str:
    """Return a value of the summary as text, with the unit that its name indicates."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return format_setting(value)
    if name.endswith("bytes") or "memory" in name:
        return format_value(value, "bytes")
    if name.endswith(("runtime", "_seconds")):
        return format_value(value, "seconds")
    return format_value(value)


def _select_finite(run: RunData, name: str) -> list[float]:
    """Return the finite values of a series, in the order of their steps. Empty if the run has no such series."""
    return [value for _, _, value in run.series.get(name, []) if abs(value) < float("inf")]
