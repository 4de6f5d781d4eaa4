"""Run all benchmarks, one after the other, and rewrite the tables in benchmarks/README.md and README.md."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
QUESTIONS = {
    "step_cost": "What does a prepared loop cost per micro-batch beyond the same loop in plain PyTorch?",
    "switch_cost": "What does a micro-batch cost when Headway is imported as `accelerate`, compared with `headway`?",
    "loader_cost": "What does a prepared loader cost per batch beyond torch's DataLoader?",
    "mixture": "What do batches from a mixture of three sources cost, in time, at a resume, and in a worker's memory?",
    "packing": "What do packed batches cost compared with padded ones, and how much padding do they save?",
    "command_line": "How long does `--help` take?",
    "import_time": "What does importing the library cost beyond importing torch?",
    "launch_time": "What does launching on one process cost beyond `python script.py`?",
    "two_processes": "What do a micro-step and a gather cost on two processes (gloo)?",
    "layouts": "What does a sharded step cost compared with hand-written `fully_shard`, on two processes (gloo)?",
    "axes": "What does a step cost under tp, cp, ep, pp and their combinations, compared with hand-written torch code (gloo)?",
    "control_cost": "What does a vote over the control plane cost?",
    "watch_cost": "What does the hang watch cost a rank?",
    "guard_cost": "What do the throughput meter and the guard against non-finite values cost?",
    "moving_average": "What does a moving average of the weights cost per update, compared with a hand-written one?",
    "trainer": "What does a micro-batch cost in the Trainer beyond the same loop in plain PyTorch?",
    "microbatching": "What does automatic micro-batching cost while memory suffices?",
    "device_map": "How long does computing a device map take?",
    "meta_model": "How long does building a model on the meta device take?",
    "big_model_load": "How long does a checkpoint of 1.6 GB take to load and place?",
    "recovery": "What do in-memory checkpoints, overlapped saves and a recompilation after a resume cost?",
    "checkpoint": "What does a checkpoint of 400 MB cost, and how long does a resume late in an epoch take?",
    "disk": "How close do saves and loads come to the disk?",
    "sharded_checkpoint": "What do saving and loading a sharded model cost, compared with torch.distributed.checkpoint?",
    "preemption_cost": "What does watching for a preemption signal cost a rank?",
    "offload": "How fast is a forward pass with 23 of 24 blocks on disk?",
}
# (label in the README, question, Headway's row, Accelerate's row, column)
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


def read_result(question: str) -> dict[str, Any]:
    """Return the last saved result of a benchmark in QUESTIONS."""
    saved: dict[str, Any] = json.loads((FOLDER / question / "result.json").read_text())
    return saved


def format_number(value: float, unit: str) -> str:
    """Format a value: three decimals for seconds, one for microseconds and other units."""
    return f"{value:.3f}" if unit == "s" else f"{value:.1f}"


def format_cell(values: dict[str, float], unit: str) -> str:
    """Format the median, with the quartiles in parentheses."""
    middle, low, high = (format_number(values[name], unit) for name in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def format_question_table(question: str) -> str:
    """Return the last result of a benchmark in QUESTIONS as a Markdown table, with its note, date and machine."""
    saved = read_result(question)
    unit = saved["unit"]
    lines = [f"| {unit} | CPU time | wall time | added, CPU | added, wall | repeats |", "|---|---|---|---|---|---|"]
    for name, row in saved["rows"].items():
        if isinstance(row, str):
            lines.append(f"| {name} | {row} | | | | |")
            continue
        cells = [format_cell(row[column], unit) for column in ("cpu", "wall", "added cpu", "added wall")]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['cpu']['repeats']} |")
    machine = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in saved["machine"].items())
    note = [saved["note"].rstrip(".") + ".", ""] if saved.get("note") else []
    return "\n".join([*lines, "", *note, f"{saved['date']}; {machine}."])


def make_highlights() -> str:
    """Return the README's table of the benchmarks in HIGHLIGHTS, with a sentence about the machine."""
    lines = ["| | Headway | Accelerate | noise (A/A) | repeats |", "|---|---|---|---|---|"]
    for label, question, ours, theirs, column in HIGHLIGHTS:
        saved = read_result(question)
        unit = "s" if saved["unit"] == "s" else "us"
        values = []
        for name in (ours, theirs):
            row = saved["rows"].get(name)
            values.append(
                f"{format_number(row[column]['median'], unit)} {unit}" if isinstance(row, dict) else "not installed"
            )
        group = ours.rpartition(": ")[0]
        again = next(row for name, row in saved["rows"].items() if name.endswith("(A/A)") and name.startswith(group))
        noise, repeats = format_number(again[f"added {column[-4:].strip()}"]["median"], unit), again["cpu"]["repeats"]
        lines.append(f"| {label} | {values[0]} | {values[1]} | {noise} {unit} | {repeats} |")
    results = [read_result(question) for _, question, *_ in HIGHLIGHTS]
    machine = results[0]["machine"]
    # Rows can be of different machines. Equal descriptions are listed once.
    places = ", ".join(
        dict.fromkeys(
            f"{each['date']} on {each['machine']['cores']} cores of an {each['machine']['cpu']}" for each in results
        )
    )
    lines += [
        "",
        f"Values are medians of interleaved repeats (torch {machine['torch']}, Accelerate {machine['accelerate']}; {places}). "
        f"While the first row was measured, the load average was {machine['load_average']}. "
        "See [all benchmarks](benchmarks/README.md). `make bench` repeats them.",
    ]
    return "\n".join(lines)


def replace_block(path: Path, marker: str, text: str) -> None:
    """Replace the text between `<!-- marker -->` and `<!-- /marker -->`; do nothing if the file or the markers are missing."""
    if not path.exists():
        return
    block = re.compile(rf"(<!-- {re.escape(marker)} -->\n).*?(<!-- /{re.escape(marker)} -->)", re.DOTALL)
    path.write_text(block.sub(lambda match: f"{match[1]}{text}\n{match[2]}", path.read_text()))


def write_tables() -> None:
    """Rewrite every table from the saved results."""
    for question in QUESTIONS:
        if (FOLDER / question / "result.json").exists():
            replace_block(FOLDER / "README.md", question, format_question_table(question))
    if all((FOLDER / question / "result.json").exists() for _, question, *_ in HIGHLIGHTS):
        replace_block(FOLDER.parent / "README.md", "benchmarks", make_highlights())


def main() -> None:
    """Run the benchmarks named on the command line, or all of them, then rewrite the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="question", help=f"one of {', '.join(QUESTIONS)}; default: all")
    parser.add_argument("--tables", action="store_true", help="only rewrite the tables from the saved results")
    arguments = parser.parse_args()
    unknown = set(arguments.questions) - set(QUESTIONS)
    if unknown:
        parser.error(f"no such question: {', '.join(sorted(unknown))}; choose from {', '.join(QUESTIONS)}")
    for question in [] if arguments.tables else arguments.questions or QUESTIONS:
        sys.stdout.write(f"== {QUESTIONS[question]}\n")
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", f"benchmarks.{question}.measure"], check=True, cwd=FOLDER.parent)
    write_tables()


if __name__ == "__main__":
    main()
