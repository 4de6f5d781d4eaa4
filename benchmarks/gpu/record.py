"""The writer: one JSON file and one table per kind of device, valid after every row."""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from headway.common import atomic

NO_GPU = (
    "**Run on a CPU, at a small size. These rows show that the steps run and what they print; they say nothing about how "
    "fast a GPU is.**"
)

SIMULATED = (
    "**Run on torch's CUDA build over a simulated runtime (tests/simulated_cuda), without a card. Memory is what torch's "
    "allocator takes; nothing here is a time or a speed.**"
)

BEGUN = "begun, and not ended"


class Record:
    """What the steps found.

    Args:
        folder: where `<kind>.json` and `<kind>.md` are written.
        kind: of device: "cuda", "cpu", ...

    Attributes:
        steps: the last run of each step, by name. Steps that do not run this time stay as they were, each with its own date.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        self.json, self.table = folder / f"{kind}.json", folder / f"{kind}.md"
        self.steps: dict[str, dict[str, Any]] = json.loads(self.json.read_text())["steps"] if self.json.exists() else {}
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, name: str, question: str, size: str) -> None:
        """A step begins; what it found before is forgotten."""
        self.steps[name] = {
            "question": question,
            "state": BEGUN,
            "size": size,
            "date": date.today().isoformat(),
            "seconds": None,
            "machine": {},
            "rows": [],
            "last_lines": [],
        }
        self.write()

    def found(self, name: str, lines: Sequence[str]) -> None:
        """What the step has told so far, as JSON lines: what it runs on, then a line for each row."""
        told = [json.loads(line) for line in lines]
        self.steps[name]["machine"] = next((line["machine"] for line in told if "machine" in line), {})
        self.steps[name]["rows"] = [line for line in told if "machine" not in line]
        self.write()

    def end(self, name: str, state: str, seconds: float, last_lines: Sequence[str] = ()) -> None:
        """A step is over: "done", or in words what happened. Its last lines are kept where it failed."""
        self.steps[name] |= {"state": state, "seconds": round(seconds, 1), "last_lines": list(last_lines)}
        self.write()

    def summary(self, names: Sequence[str]) -> str:
        """These steps in few lines, without notes: whoever sees the end of a log only sees all figures."""
        lines = []
        for name in names:
            step = self.steps[name]
            lines.append(f"{name}: {step['state']}{_took(step['seconds'])}")
            lines += [f"  {shown({**row, 'note': ''})}" for row in step["rows"]]
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Both files, each whole at any moment."""
        atomic.write_text(self.json, json.dumps({"kind": self.kind, "steps": self.steps}, indent=1) + "\n")
        atomic.write_text(self.table, markdown(self.kind, self.steps))


def markdown(kind: str, steps: Mapping[str, Mapping[str, Any]]) -> str:
    """All steps as one page."""
    lines = [
        f"# On {kind}",
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
            f"`{name}`, size {step['size']}: {step['state']}{_took(step['seconds'])}.",
            "",
        ]
        if step["rows"]:
            lines += ["| | figure | beside it | wanted | note |", "|---|---|---|---|---|"]
            lines += [_line(row) for row in step["rows"]]
        if step["last_lines"]:
            lines += ["", "Its last lines:", "", "```text", *step["last_lines"], "```"]
        told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in step["machine"].items())
        lines += ["", f"{step['date']}; {told}."]
    return "\n".join(lines) + "\n"


def shown(row: Mapping[str, Any]) -> str:
    """One row as a line of a terminal."""
    beside = f"; {_beside(row)}" if row["beside"] is not None else ""
    wanted = f"; {_wanted(row)}" if row["wanted"] else ""
    note = f"; {row['note']}" if row["note"] else ""
    return f"{row['what']}: {_figure(row['value'], row['unit'])}{beside}{wanted}{note}"


def _line(row: Mapping[str, Any]) -> str:
    cells = (row["what"], _figure(row["value"], row["unit"]), _beside(row), _wanted(row), row["note"])
    return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def _took(seconds: float | None) -> str:
    return "" if seconds is None else f" in {seconds:.0f} s"


def _figure(value: Any, unit: str) -> str:
    if value is None:
        return "none"
    number = f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def _beside(row: Mapping[str, Any]) -> str:
    if row["beside"] is None:
        return ""
    share = f", {row['value'] / row['beside']:.3f} of it" if row["value"] is not None and row["beside"] else ""
    return f"{_figure(row['beside'], row['unit'])} {row['beside_what']}{share}"


def _wanted(row: Mapping[str, Any]) -> str:
    return f"{row['wanted']}: {'held' if row['holds'] else 'MISSED'}" if row["wanted"] else ""
