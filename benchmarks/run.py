"""Runs all benchmarks, one after the other, and rewrites the tables in benchmarks/README.md and README.md."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
QUESTIONS = {
    "step_cost": "What does a prepared loop cost per micro-batch beyond the same loop by hand?",
    "switch_cost": "What does a micro-batch cost under Accelerate's name beside Headway's own?",
    "loader_cost": "What does a prepared loader cost per batch beyond torch's?",
    "mixture": "What do batches of a mixture of three sources cost, how long does a resume take, and what does a worker hold?",
    "packing": "What do packed batches cost beside padded ones, and how much padding do they save?",
    "command_line": "How long does a help text take?",
    "import_time": "What does the import cost beyond torch's?",
    "launch_time": "What does launching on one process cost beyond `python script.py`?",
    "two_processes": "What do a micro-step and a gather cost on two processes (gloo)?",
    "layouts": "What does a sharded step cost beside hand-written `fully_shard`, on two processes (gloo)?",
    "axes": "What does a step cost under tp, cp, ep, pp and pp+fsdp beside the same written by hand (gloo)?",
    "control_cost": "What does a vote on the control plane cost?",
    "watch_cost": "What does the hang watch cost a rank?",
    "guard_cost": "What do the throughput meter and the guard against non-finite values cost?",
    "moving_average": "What does an average of the weights cost per update, beside one by hand?",
    "trainer": "What does a micro-batch cost in the Trainer beyond the same loop by hand?",
    "microbatching": "What does automatic micro-batching cost when nothing goes wrong?",
    "device_map": "How long does placing a model on devices take?",
    "meta_model": "How long does building a model without memory take?",
    "big_model_load": "How long does a checkpoint of 1.6 GB take to load and place?",
    "recovery": "What does it cost to keep each update in memory, to save beside the loop, and to compile again (or not)?",
    "checkpoint": "What does a checkpoint of 400 MB cost, and a resume late in an epoch?",
    "disk": "How close do saves and loads come to the disk?",
    "sharded_checkpoint": "What do saving and loading a sharded model cost, beside torch.distributed.checkpoint?",
    "preemption_cost": "What does it cost a rank to be ready to stop?",
    "offload": "How fast is a forward pass with 23 of 24 blocks on disk?",
}
# what is told, question, our row, Accelerate's row, column
HIGHLIGHTS = (
    ("added to a micro-step of the loop", "step_cost", "headway", "accelerate", "added cpu"),
    ("added to starting a script on one process", "launch_time", "headway launch", "accelerate launch", "added wall"),
    (
        "added to `import torch`",
        "import_time",
        "from headway import Accelerator",
        "from accelerate import Accelerator",
        "added cpu",
    ),
)


def result(question: str) -> dict[str, Any]:
    """What the last run of a question found."""
    found: dict[str, Any] = json.loads((FOLDER / question / "result.json").read_text())
    return found


def number(value: float, unit: str) -> str:
    """Three decimals for seconds, one for microseconds."""
    return f"{value:.3f}" if unit == "s" else f"{value:.1f}"


def cell(found: dict[str, float], unit: str) -> str:
    """Median and, in brackets, the quartiles."""
    middle, low, high = (number(found[name], unit) for name in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def table(question: str) -> str:
    """The question's rows as Markdown."""
    found = result(question)
    unit = found["unit"]
    lines = [f"| {unit} | CPU time | wall time | added, CPU | added, wall | repeats |", "|---|---|---|---|---|---|"]
    for name, row in found["rows"].items():
        if isinstance(row, str):
            lines.append(f"| {name} | {row} | | | | |")
            continue
        cells = [cell(row[column], unit) for column in ("cpu", "wall", "added cpu", "added wall")]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['cpu']['repeats']} |")
    about = found["machine"]
    told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items())
    note = [found["note"].rstrip(".") + ".", ""] if found.get("note") else []
    return "\n".join([*lines, "", *note, f"{found['date']}; {told}."])


def highlights() -> str:
    """The small table of the project's README."""
    lines = ["| | Headway | Accelerate | noise (A/A) | repeats |", "|---|---|---|---|---|"]
    for label, question, ours, theirs, column in HIGHLIGHTS:
        found = result(question)
        unit = "s" if found["unit"] == "s" else "us"
        values = []
        for name in (ours, theirs):
            row = found["rows"].get(name)
            values.append(f"{number(row[column]['median'], unit)} {unit}" if isinstance(row, dict) else "not installed")
        kind = ours.rpartition(": ")[0]
        control = next(row for name, row in found["rows"].items() if name.endswith("(A/A)") and name.startswith(kind))
        noise, repeats = number(control[f"added {column[-4:].strip()}"]["median"], unit), control["cpu"]["repeats"]
        lines.append(f"| {label} | {values[0]} | {values[1]} | {noise} {unit} | {repeats} |")
    about = result("step_cost")
    machine = about["machine"]
    lines += [
        "",
        f"Values are medians of interleaved repeats ({about['date']}, {machine['cores']} {machine['cpu']} cores, "
        f"torch {machine['torch']}, Accelerate {machine['accelerate']}). "
        f"While the first row was measured, the load average was {machine['load_average']}. "
        "See [all benchmarks](benchmarks/README.md). `make bench` repeats them.",
    ]
    return "\n".join(lines)


def fill(path: Path, marker: str, text: str) -> None:
    """Put `text` between the file's `<!-- marker -->` and `<!-- /marker -->`, where it has them."""
    if not path.exists():
        return
    block = re.compile(rf"(<!-- {re.escape(marker)} -->\n).*?(<!-- /{re.escape(marker)} -->)", re.DOTALL)
    path.write_text(block.sub(lambda found: f"{found[1]}{text}\n{found[2]}", path.read_text()))


def write_tables() -> None:
    """Rewrite every block from the results that lie there."""
    for question in QUESTIONS:
        if (FOLDER / question / "result.json").exists():
            fill(FOLDER / "README.md", question, table(question))
    if all((FOLDER / line[1] / "result.json").exists() for line in HIGHLIGHTS):
        fill(FOLDER.parent / "README.md", "benchmarks", highlights())


def main() -> None:
    """Run what is named (all where nothing is), then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="question", help=f"of {', '.join(QUESTIONS)}; none: all")
    parser.add_argument("--tables", action="store_true", help="measure nothing, only rewrite the tables")
    given = parser.parse_args()
    unknown = set(given.questions) - set(QUESTIONS)
    if unknown:
        parser.error(f"no such question: {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    for question in [] if given.tables else given.questions or QUESTIONS:
        sys.stdout.write(f"== {QUESTIONS[question]}\n")
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", f"benchmarks.{question}.measure"], check=True, cwd=FOLDER.parent)
    write_tables()


if __name__ == "__main__":
    main()
