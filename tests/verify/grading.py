"""Grade the cause that a report of `headway verify` names, compared with the fault planted in the script."""

import re
from collections.abc import Sequence
from pathlib import Path

from headway.verify.verdict import Verdict
from tests.verify.scripts.causes import PLANTED


def grade(path: Path, verdicts: Sequence[Verdict]) -> str:
    """Grade the named cause: "right", "generic" or "wrong", and the named line: "right", "wrong" or "none".

    Without a planted cause in `causes.py`, the grade is "".
    """
    planted = PLANTED.get(path.stem)
    if planted is None:
        return ""
    reports = ["\n".join((each.reason, *each.details)) for each in verdicts if each.status == "FAIL"]
    matching = [each for each in reports if re.search(planted.words, each, re.IGNORECASE | re.DOTALL)]
    lines = path.read_text().splitlines()
    right = {number for number, line in enumerate(lines, 1) if any(code in line for code in planted.code)}
    named = {int(each) for text in matching or reports for each in re.findall(rf"{path.name}:(\d+)", text)}
    cause = "right" if matching else "wrong" if named else "generic"
    line = "none" if not named else "right" if not right or named & right else "wrong"
    return f"cause {cause}, line {line}"
