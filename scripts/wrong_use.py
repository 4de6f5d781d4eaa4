"""Writes docs/wrong_use.md from the table of mistakes in tests/wrong_use.

`python scripts/wrong_use.py` prints the page; `--write` writes it.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "wrong_use.md"
HEADINGS = {"single": "one process", "ddp": "ddp", "fsdp": "fsdp", "tp": "tp"}
INTRODUCTION = """# Mistakes, and what follows

What Headway does when a script makes a mistake, or looks as if it did. Each cell is a test (`tests/wrong_use`) that runs on real
processes, two under ddp, fsdp and tp, and compares with the same lines in plain PyTorch:

- **equal**: the numbers are those of the hand-written loop, and nothing is said.
- **error**: the run ends on all ranks, with an error that says what to do.
- **warning**: one line, before the second update.

Nothing else may follow. The last column is part of what is said. The page is written by `python scripts/wrong_use.py --write`.
"""


def page() -> str:
    """The page's text."""
    sys.path.insert(0, str(ROOT))
    from tests.wrong_use.table import SECTIONS

    lines = [INTRODUCTION]
    for section in SECTIONS:
        lines += [f"## {section.title}\n", f"| mistake | {' | '.join(HEADINGS.values())} | what is said |"]
        lines.append("|---" * (len(HEADINGS) + 2) + "|")
        for row in section.rows:
            kinds = [row.cells[layout].kind if layout in row.cells else "" for layout in HEADINGS]
            said = dict.fromkeys(f"`{cell.text}`" for cell in row.cells.values() if cell.text)
            lines.append(f"| {row.about} | {' | '.join(kinds)} | {', '.join(said)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page())
