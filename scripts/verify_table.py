"""Write the table of docs/verify.md: the verdict of each proof of `headway verify` on each example script.

`python scripts/verify_table.py` verifies all scripts and prints the table; `--write` writes it into the page. With names of scripts,
only their rows are measured, and the page's other rows are kept.
"""

import argparse
import datetime
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headway.cli.options import make_setting_options
from headway.cli.verify import PROOFS, make_options
from headway.errors import HeadwayError
from headway.verify.command import read_options
from headway.verify.proofs import PROOFS as FUNCTIONS
from headway.verify.runs import ForkServer
from headway.verify.session import VerifySession
from headway.verify.verdict import Verdict

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "verify.md"
BEGIN, END = "<!-- verify table -->", "<!-- /verify table -->"
WORDS = {"PASS": "pass", "FAIL": "**fail**", "NOT CHECKED": "-"}


@dataclass(frozen=True)
class Result:
    """Result of verifying one script.

    Attributes:
        verdicts: Verdicts in the order of the table's columns; empty if the script could not be verified.
        error: Reason why the script could not be verified, or "".
        seconds: Duration of the verification.
    """

    verdicts: list[Verdict]
    error: str
    seconds: float


@dataclass(frozen=True)
class Row:
    """One script of the table.

    Attributes:
        script: Path in the repository.
        flags: Flags of `headway verify`, which precede the script.
        args: Arguments of the script.
    """

    script: str
    flags: tuple[str, ...] = ()
    args: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The flags, the path of the script and its arguments, as on a command line."""
        return " ".join((*self.flags, self.script, *self.args))


_ACCELERATE = ("--as", "accelerate")
ROWS = (
    Row("examples/vision.py"),
    Row("examples/text.py", args=("--steps", "20", "--batch-size", "4", "--max-bytes", "400000")),
    Row("examples/mixture.py", args=("--train", "--updates", "12", "--files", "3")),
    Row("examples/demo_training.py", args=("--folder", "runs/demo")),
    Row("examples/nothing_is_lost.py"),
    Row("examples/gan.py"),
    Row("examples/trainer.py", args=("digits",)),
    Row("examples/trainer.py", args=("text",)),
    Row("examples/fsdp.py"),
    Row("examples/tensor_parallel.py"),
    Row("examples/context_parallel.py"),
    Row("examples/pipeline.py"),
    Row("examples/as_accelerate.py", _ACCELERATE),
    Row("examples/cookbook/early_stopping.py"),
    Row("examples/cookbook/ema.py"),
    Row("examples/cookbook/lora.py"),
    Row("examples/cookbook/distillation.py"),
    Row("examples/cookbook/gan.py"),
    Row("examples/cookbook/contrastive.py"),
    Row("examples/cookbook/multi_task.py"),
    Row("examples/by_feature/base.py"),
    Row("examples/by_feature/gradient_accumulation.py"),
    Row("examples/by_feature/weighted_loss.py"),
    Row("examples/by_feature/memory.py"),
    Row("examples/by_feature/mixed_precision.py"),
    Row("examples/by_feature/schedule.py"),
    Row("examples/by_feature/clipping.py"),
    Row("examples/by_feature/early_stop_trigger.py"),
    Row("examples/by_feature/uneven_batches.py"),
    Row("examples/by_feature/resume_data.py"),
    Row("examples/by_feature/checkpointing.py"),
    Row("examples/by_feature/preemption.py"),
    Row("examples/by_feature/automatic_microbatching.py"),
    Row("examples/by_feature/activation_checkpointing.py"),
    Row("examples/by_feature/tracking.py"),
    Row("tests/scripts/text_classification.py", _ACCELERATE),
    Row("tests/scripts/lora.py", _ACCELERATE),
)


def verify(row: Row, servers: list[ForkServer], time_limit: float) -> Result:
    """Verify the script of a row on the CPU.

    Args:
        row: Script with flags and arguments.
        servers: Servers that fork the runs.
        time_limit: Seconds that each run of the script may take.
    """
    names = {"--as": "run_as", "--strategy": "strategy", "-n": "num_processes"}
    settings: dict[str, str | None] = dict.fromkeys(str(option.name) for option in make_setting_options())
    settings |= {names[flag]: value for flag, value in zip(row.flags[::2], row.flags[1::2], strict=True)}
    start = time.monotonic()
    options = make_options(str(ROOT / row.script), row.args, time_limit=time_limit, **{**settings, "cpu": True})
    try:
        with VerifySession(read_options(options), lambda name: None, servers) as session:
            runs = session.run()
            verdicts = [FUNCTIONS[word](runs) for word in PROOFS]
    except HeadwayError as error:
        return Result([], str(error), time.monotonic() - start)
    return Result(verdicts, "", time.monotonic() - start)


def format_row(row: Row, result: Result) -> str:
    """Return the line of the table for a row."""
    cells = [WORDS[verdict.status] for verdict in result.verdicts] or ["?"] * len(PROOFS)
    return f"| `{row.command}` | {' | '.join(cells)} |"


def format_table(lines: dict[str, str], seconds: list[float]) -> str:
    """Return the table with a line about its date and duration.

    Args:
        lines: Line of each row, by its command.
        seconds: Durations of the rows that were measured now.
    """
    body = [lines[row.command] for row in ROWS if row.command in lines]
    columns = [word.replace("_", " ") for word in PROOFS]
    counts = {word: sum(line.count(f"| {word} ") for line in body) for word in WORDS.values()}
    summary = (
        f"{counts['pass']} proofs pass, {counts['**fail**']} fail, and {counts['-']} (`-`) are not checked. "
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores, "
        f"{_round(sorted(seconds)[len(seconds) // 2])} s per script in the median, "
        f"with a load average of {os.getloadavg()[0]:.0f}."
    )
    return "\n".join([f"| script | {' | '.join(columns)} |", "|---" * (len(PROOFS) + 1) + "|", *body, "", summary])


def _round(seconds: float) -> int:
    return max(10, round(seconds / 10) * 10)


def read_lines(page: str) -> dict[str, str]:
    """Return the lines of the page's table, by command."""
    block = page.partition(BEGIN)[2].partition(END)[0]
    return {match[1]: match[0] for match in re.finditer(r"^\| `([^`]+)` \|.*$", block, re.MULTILINE)}


def main() -> None:
    """Verify the scripts, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the commands of the rows to measure; default: all rows")
    parser.add_argument("--write", action="store_true", help="write the table into docs/verify.md")
    parser.add_argument("--jobs", type=int, default=1, help="scripts to verify at the same time")
    parser.add_argument("--time_limit", type=int, default=60, help="seconds that each run of a script may take")
    args = parser.parse_args()
    rows = [row for row in ROWS if not args.names or any(name in row.command for name in args.names)]
    page = PAGE.read_text()
    lines, seconds = read_lines(page), []
    servers = [ForkServer(), ForkServer()]
    working_folder = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="verify_table_") as folder, ThreadPoolExecutor(args.jobs) as pool:
        os.chdir(folder)  # each script runs in a copy of the current folder
        for row, result in zip(rows, pool.map(lambda row: verify(row, servers, args.time_limit), rows), strict=True):
            lines[row.command] = format_row(row, result)
            seconds.append(result.seconds)
            print(lines[row.command], f"{result.seconds:.0f} s", flush=True)
            for verdict in result.verdicts:
                if verdict.status != "PASS":
                    line = f"    {verdict.status} {verdict.key}: {verdict.reason}"
                    print(line, *verdict.details, sep="\n        ", flush=True)
            for line in result.error.splitlines():
                print(f"    {line}", flush=True)
        os.chdir(working_folder)
    for server in servers:
        server.close()
    table = format_table(lines, seconds)
    if args.write:
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    else:
        print(table)


if __name__ == "__main__":
    main()
