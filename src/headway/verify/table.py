"""Output of `headway verify`: the table of proofs, the explanations of failed proofs, and JSON."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from headway.verify.verdict import Verdict

_COLORS = {"PASS": 32, "FAIL": 31, "NOT CHECKED": 33}
"""ANSI codes of the colors by status: green, red and yellow."""
_WIDTH = 118
"""Number of columns of the output."""


def format_table(verdicts: Sequence[Verdict], *, has_color: bool = False) -> str:
    """Return the table of proofs as text, followed by the details of the failed proofs.

    Args:
        verdicts: Verdicts in the order of the table.
        has_color: Whether to color the results for a terminal. Default: False.
    """
    title_width = max(len(each.title) for each in verdicts)
    indent = title_width + 15  # the status has 11 columns, and there are two spaces after each of the first two columns
    lines = []
    for each in verdicts:
        status = _color_text(each.status.ljust(11), each.status, has_color)
        first_line, *other_lines = textwrap.wrap(each.reason, _WIDTH - indent) or [""]
        lines.append(f"{status}  {each.title.ljust(title_width)}  {first_line}")
        lines += [f"{' ' * indent}{line}" for line in other_lines]
    for each in verdicts:
        if each.status == "FAIL":
            lines += ["", f"{_color_text('FAIL', 'FAIL', has_color)} {each.title}: {each.reason}"]
            lines += [f"  {line}" for line in each.details]
            if each.advice:
                lines += textwrap.wrap(each.advice, _WIDTH, initial_indent="  -> ", subsequent_indent="     ")
            if each.page:
                lines.append(f"  see docs/{each.page}")
    return "\n".join(lines)


def _color_text(text: str, status: str, has_color: bool) -> str:
    """Return a text in the terminal color of a status, or the text itself.

    Args:
        text: Text to color.
        status: Status of a verdict, such as "PASS".
        has_color: Whether the terminal supports colors.
    """
    return f"\033[{_COLORS[status]}m{text}\033[0m" if has_color else text


def format_json(verdicts: Sequence[Verdict], entries: dict[str, Any]) -> str:
    """Return the verdicts as JSON text.

    Args:
        verdicts: Verdicts in the order of the table.
        entries: Entries of the JSON object besides "proofs", such as "seconds". See docs/verify.md.
    """
    proofs = [
        {
            "proof": each.key,
            "title": each.title,
            "status": each.status,
            "reason": each.reason,
            "details": list(each.details),
            "advice": each.advice,
            "page": each.page,
        }
        for each in verdicts
    ]
    return json.dumps({**entries, "proofs": proofs}, indent=2)


def format_error_json(error: str) -> str:
    """Return the JSON text for a script that could not be verified. It has the keys of a result, without values.

    Args:
        error: Reason why the script could not be verified.
    """
    return format_json((), {"error": error, "seconds": None, "updates": None, "notes": [], "escaped": []})


def format_summary(verdicts: Sequence[Verdict], seconds: float) -> str:
    """Return the last line of the output: how many proofs passed, failed or were not checked, and the duration.

    Args:
        verdicts: Verdicts of all proofs.
        seconds: Duration of the verification.
    """
    counts = {status: sum(each.status == status for each in verdicts) for status in _COLORS}
    return f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['NOT CHECKED']} not checked in {seconds:.0f} s"
