"""`headway verify` as a function of its parsed options: makes all runs, judges them, and prints the results."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from headway.errors import HeadwayError
from headway.verify.escapes import select_escaped_files
from headway.verify.proofs import PROOFS
from headway.verify.runs import ScriptCommand
from headway.verify.session import VerifyOptions, VerifySession
from headway.verify.table import format_error_json, format_json, format_summary, format_table
from headway.verify.verdict import Verdict, shorten_paths

_RUN_DESCRIPTIONS = {
    "baseline": "one process",
    "repeat": "one process again, saved and killed",
    "reference": "one process, with shared random numbers",
    "reordered": "one process, rows in another order",
    "several": "{n} processes",
    "layout": "{n} processes, {layout}",
    "several_unsplit": "{n} processes, as the script shares out its batches",
    "resumed": "the killed run, resumed",
    "resumed_on_several": "the killed run, resumed on {n} processes",
    "replayed": "one process, out of memory once",
    "probed": "one update, with changed batches",
    "measured": "one process, measuring memory",
    "forecast": "a forecast of memory",
    "full": "a forecast of memory for the full run",
}
"""Text that is printed when a run starts, by the name of the run."""

_NOTHING_CHECKED = "nothing was checked: each requested proof is NOT CHECKED, for the reason in its line"


def run_command(arguments: dict[str, Any]) -> int:
    """Verify a script, print the results, and return the exit code of the command.

    The code is 1 if a proof failed. It is 2 if the script cannot be verified or no proof could be checked, else 0.

    Args:
        arguments: Parsed JSON that `headway.cli.verify` passes. The keys are those of `VerifyOptions`, and "is_json":
            whether to print the results as JSON.
    """
    options = read_options(arguments)
    is_json = arguments["is_json"]
    try:
        return _run_verify(options, is_json)
    except HeadwayError as error:
        if is_json:
            print(format_error_json(str(error)))
        print(f"headway: error: {error}", file=sys.stderr)
        return 2


def read_options(arguments: dict[str, Any]) -> VerifyOptions:
    """Return the options of a verification, made from the parsed JSON that the command line passes."""
    return VerifyOptions(
        commands={
            name: ScriptCommand(
                argv=tuple(command["argv"]),
                variables=command["variables"],
                program=tuple(command["program"]),
                num_processes=command["num_processes"],
            )
            for name, command in arguments["commands"].items()
        },
        is_forked=arguments["is_forked"],
        num_processes=arguments["num_processes"],
        layout_name=arguments["layout_name"],
        num_updates=arguments["num_updates"],
        time_limit=arguments["time_limit"],
        resume_args=tuple(arguments["resume_args"]),
        proofs=tuple(arguments["proofs"]),
        notes=tuple(arguments["notes"]),
    )


def _run_verify(options: VerifyOptions, is_json: bool) -> int:
    """Verify a script, print the results, and return the exit code of the command.

    Raises:
        VerifyError: If the script cannot be verified.
    """
    start_time = time.monotonic()
    shows_progress = not is_json and sys.stderr.isatty()

    def announce_run(name: str) -> None:
        if shows_progress:
            text = _RUN_DESCRIPTIONS.get(name, name).format(n=options.num_processes, layout=options.layout_name)
            print(f"headway: running {text} ...", file=sys.stderr)

    for note in options.notes:
        print(f"headway: {note}", file=sys.stderr)
    with VerifySession(options, announce_run) as session:
        runs = session.run()
        verdicts = [shorten_paths(check(runs)) for key, check in PROOFS.items() if key in options.proofs]
        seconds = time.monotonic() - start_time
        if runs.baseline.rank0_facts.uses_compilation:
            runs.notes.append("torch.compile is off in these runs, except when memory is measured")
            print(f"headway: {runs.notes[-1]}", file=sys.stderr)
        facts = [each for run in (runs.baseline, runs.several) if run is not None for each in run.facts_by_rank]
        escaped_files = select_escaped_files([each.escaped_files for each in facts])
    code = choose_code(verdicts)
    error = _NOTHING_CHECKED if code == 2 else None
    if not is_json:
        _print_table(verdicts, escaped_files, seconds)
    else:
        entries = {
            "error": error,
            "seconds": round(seconds, 1),
            "updates": options.num_updates,
            "notes": runs.notes,
            "escaped": escaped_files,
        }
        print(format_json(verdicts, entries))
    if error is not None:
        sys.stdout.flush()
        print(f"headway: error: {error}", file=sys.stderr)
    return code


def _print_table(verdicts: Sequence[Verdict], escaped_files: Sequence[str], seconds: float) -> None:
    """Print the table of proofs, the files outside of the scratch folder, and the summary.

    Args:
        verdicts: Verdicts in the order of the table.
        escaped_files: Paths of files that the script wrote outside of the scratch folder.
        seconds: Duration of the verification.
    """
    print(format_table(verdicts, has_color=sys.stdout.isatty()))
    if escaped_files:
        print("\nfiles that the script wrote outside of the scratch folder:")
        for path in escaped_files:
            print(f"  {path}")
    print(f"\n{format_summary(verdicts, seconds)}")


def choose_code(verdicts: Sequence[Verdict]) -> int:
    """Return the exit code: 1 if a proof failed, 2 if no proof could be checked, else 0."""
    statuses = {each.status for each in verdicts}
    if "FAIL" in statuses:
        return 1
    return 0 if "PASS" in statuses else 2
