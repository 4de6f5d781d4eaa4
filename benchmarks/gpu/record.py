"""Result files of `python -m benchmarks.gpu`: one JSON file and one table per kind of device, valid after every row."""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from headway.common import atomic

NO_GPU = (
    "**Run on a CPU, at a small size. These rows show that the steps run and what they print. They do not show how "
    "fast a GPU is.**"
)

SIMULATED = (
    "**Run on torch's CUDA build over a simulated runtime (tests/simulated_cuda), without a GPU. Memory is what torch's "
    "allocator reserves. Times and speeds mean nothing.**"
)

STARTED = "started, not finished"


class Record:
    """Results of all steps on one kind of device.

    Args:
        folder: Folder for `<kind>.json` and `<kind>.md`.
        kind: Kind of device, such as "cuda" or "cpu".

    Attributes:
        steps: Last run of each step by name, each with its date. Steps that do not run this time keep their former result.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        self.json, self.table = folder / f"{kind}.json", folder / f"{kind}.md"
        self.steps: dict[str, dict[str, Any]] = json.loads(self.json.read_text())["steps"] if self.json.exists() else {}
        folder.mkdir(parents=True, exist_ok=True)

    def begin_step(self, name: str, question: str, size: str) -> None:
        """Start a step, and discard its former result."""
        self.steps[name] = {
            "question": question,
            "state": STARTED,
            "size": size,
            "date": date.today().isoformat(),
            "seconds": None,
            "machine": {},
            "rows": [],
            "last_lines": [],
        }
        self.write()

    def set_rows(self, name: str, lines: Sequence[str]) -> None:
        """Replace a step's rows. The JSON lines hold the description of the machine, then one row each."""
        parsed = [json.loads(line) for line in lines]
        self.steps[name]["machine"] = next((line["machine"] for line in parsed if "machine" in line), {})
        self.steps[name]["rows"] = [line for line in parsed if "machine" not in line]
        self.write()

    def end_step(self, name: str, state: str, seconds: float, last_lines: Sequence[str] = ()) -> None:
        """End a step. The state is "done" or describes the failure; the last lines of its output are kept with it."""
        self.steps[name] |= {"state": state, "seconds": round(seconds, 1), "last_lines": list(last_lines)}
        self.write()

    def summarize(self, names: Sequence[str]) -> str:
        """Return the rows of these steps without notes, so that the end of a log shows all figures."""
        lines = []
        for name in names:
            step = self.steps[name]
            lines.append(f"{name}: {step['state']}{_format_duration(step['seconds'])}")
            lines += [f"  {format_row({**row, 'note': ''})}" for row in step["rows"]]
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Write both files atomically."""
        atomic.write_text(self.json, json.dumps({"kind": self.kind, "steps": self.steps}, indent=1) + "\n")
        atomic.write_text(self.table, render_markdown(self.kind, self.steps))


def render_markdown(kind: str, steps: Mapping[str, Mapping[str, Any]]) -> str:
    """Return all steps as one Markdown page."""
    lines = [
        f"# Results on {kind}",
        "",
        "Written by `python -m benchmarks.gpu`; [description of the steps](../README.md#on-an-accelerator).",
    ]
    if kind == "cpu":
        lines += ["", NO_GPU]
    if kind == "simulated":
        lines += ["", SIMULATED]
    for name, step in steps.items():
        lines += [
            "",
            f"## {step['question']}",
            "",
            f"`{name}`, size {step['size']}: {step['state']}{_format_duration(step['seconds'])}.",
            "",
        ]
        if step["rows"]:
            lines += ["| | value | compared with | target | note |", "|---|---|---|---|---|"]
            lines += [_format_table_row(row) for row in step["rows"]]
        if step["last_lines"]:
            lines += ["", "Last lines of its output:", "", "```text", *step["last_lines"], "```"]
        machine = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in step["machine"].items())
        lines += ["", f"{step['date']}; {machine}."]
    return "\n".join(lines) + "\n"


def format_row(row: Mapping[str, Any]) -> str:
    """Return one row as a line for a terminal."""
    reference = f"; {_format_reference(row)}" if row["reference"] is not None else ""
    target = f"; target {_format_target(row)}" if row["target"] else ""
    note = f"; {row['note']}" if row["note"] else ""
    return f"{row['name']}: {_format_value(row['value'], row['unit'])}{reference}{target}{note}"


def _format_table_row(row: Mapping[str, Any]) -> str:
    value = _format_value(row["value"], row["unit"])
    cells = (row["name"], value, _format_reference(row), _format_target(row), row["note"])
    return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def _format_duration(seconds: float | None) -> str:
    return "" if seconds is None else f" in {seconds:.0f} s"


def _format_value(value: Any, unit: str) -> str:
    if value is None:
        return "none"
    number = f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def _format_reference(row: Mapping[str, Any]) -> str:
    if row["reference"] is None:
        return ""
    ratio = f", ratio {row['value'] / row['reference']:.3f}" if row["value"] is not None and row["reference"] else ""
    return f"{row['reference_name']}: {_format_value(row['reference'], row['unit'])}{ratio}"


def _format_target(row: Mapping[str, Any]) -> str:
    return f"{row['target']}: {'met' if row['is_met'] else 'MISSED'}" if row["target"] else ""
