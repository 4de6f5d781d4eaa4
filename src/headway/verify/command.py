"""`headway verify` as a function of its parsed options: makes all runs, judges them, and prints the results."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from headway.errors import HeadwayError
from headway.verify.escapes import format_escapes
from headway.verify.proofs import PROOFS
from headway.verify.runs import LaunchOrder
from headway.verify.session import Options, VerifySession
from headway.verify.table import format_error_json, format_json, format_summary, format_table
from headway.verify.verdict import Verdict, shorten_paths

_DESCRIPTIONS = {
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

_NOTHING_CHECKED = "nothing was checked: each requested proof is NOT CHECKED, for the reason in its line"


def run_command(given: dict[str, Any]) -> int:
    """Verify a script, print the results, and return the exit code of the command.

    The code is 1 if a proof failed. It is 2 if the script cannot be verified or no proof could be checked, else 0.

    Args:
        given: Parsed JSON that the command line passes.
    """
    options = read_options(given)
    is_json = given["is_json"]
    try:
        return _run_verify(options, is_json)
    except HeadwayError as error:
        if is_json:
            print(format_error_json(str(error)))
        print(f"headway: error: {error}", file=sys.stderr)
        return 2


def read_options(given: dict[str, Any]) -> Options:
    """Return the options of a verification, made from the parsed JSON that the command line passes."""
    return Options(
        orders={
            name: LaunchOrder(
                argv=tuple(order["argv"]),
                variables=order["variables"],
                program=tuple(order["program"]),
                num_processes=order["num_processes"],
            )
            for name, order in given["orders"].items()
        },
        is_forked=given["is_forked"],
        num_processes=given["num_processes"],
        layout_name=given["layout_name"],
        num_updates=given["num_updates"],
        time_limit=given["time_limit"],
        resume_args=tuple(given["resume_args"]),
        proofs=tuple(given["proofs"]),
        notes=tuple(given["notes"]),
    )


def _run_verify(options: Options, is_json: bool) -> int:
    began = time.monotonic()
    is_shown = not is_json and sys.stderr.isatty()

    def announce_run(name: str) -> None:
        if is_shown:
            text = _DESCRIPTIONS.get(name, name).format(n=options.num_processes, layout=options.layout_name)
            print(f"headway: running {text} ...", file=sys.stderr)

    for note in options.notes:
        print(f"headway: {note}", file=sys.stderr)
    with VerifySession(options, announce_run) as session:
        runs = session.run()
        verdicts = [shorten_paths(PROOFS[word](runs)) for word in PROOFS if word in options.proofs]
        seconds = time.monotonic() - began
        if runs.baseline.rank0_facts.get("uses_compilation"):
            runs.notes.append("torch.compile is off in these runs, except when memory is measured")
            print(f"headway: {runs.notes[-1]}", file=sys.stderr)
        escapes = format_escapes(
            [
                facts.get("escaped_files", [])
                for run in (runs.baseline, runs.several)
                if run
                for facts in run.facts_by_rank
            ]
        )
    code = choose_code(verdicts)
    error = _NOTHING_CHECKED if code == 2 else None
    if is_json:
        about = {
            "error": error,
            "seconds": round(seconds, 1),
            "updates": options.num_updates,
            "notes": runs.notes,
            "escaped": escapes,
        }
        print(format_json(verdicts, about))
    else:
        print(format_table(verdicts, has_color=sys.stdout.isatty()))
        if escapes:
            print("\nfiles that the script wrote outside of the scratch folder:")
            for path in escapes:
                print(f"  {path}")
        print(f"\n{format_summary(verdicts, seconds)}")
    if error is not None:
        sys.stdout.flush()
        print(f"headway: error: {error}", file=sys.stderr)
    return code


def choose_code(verdicts: Sequence[Verdict]) -> int:
    """Return the exit code: 1 if a proof failed, 2 if no proof could be checked, else 0."""
    statuses = {each.status for each in verdicts}
    return 1 if "FAIL" in statuses else 0 if "PASS" in statuses else 2
