"""Write docs/wrong_use_table.md from the mistakes in tests/wrong_use.

`python scripts/wrong_use.py` prints the page; `--write` writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.wrong_use.row import Row

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "wrong_use_table.md"
LAYOUTS = {"single": "one process", "ddp": "ddp", "fsdp": "fsdp", "tp": "tp"}
INTRODUCTION = """# Mistakes: the table

Every mistake in `tests/wrong_use` and its result in each layout. [Mistakes, and what follows](wrong_use.md) explains the
results. The message column quotes a part of the message. `python scripts/wrong_use.py --write` writes this page.
"""


def render_page() -> str:
    """Return the text of the page."""
    sys.path.insert(0, str(ROOT))
    from tests.wrong_use.table import SECTIONS

    lines = [INTRODUCTION]
    for section in SECTIONS:
        lines.append(f"## {section.title}\n")
        reported = [row for row in section.rows if any(cell.kind != "equal" for cell in row.cells.values())]
        if reported:
            lines += ["| mistake | result | message |", "|---|---|---|", *map(render_row, reported), ""]
        harmless = [row for row in section.rows if row not in reported]
        if harmless:
            lines += ["Equal to plain PyTorch:\n", *(f"- {row.about}{_name_layouts(row)}" for row in harmless), ""]
    return "\n".join(lines)


def render_row(row: Row) -> str:
    """Return the table row of a mistake that is reported in some layout."""
    layouts: dict[str, list[str]] = {}
    for layout, name in LAYOUTS.items():
        if layout in row.cells:
            layouts.setdefault(row.cells[layout].kind, []).append(name)
    if len(layouts) == 1:
        result = next(iter(layouts)) + _name_layouts(row)
    else:
        result = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in sorted(layouts.items(), key=_is_equal))
    messages = dict.fromkeys(f"`{cell.text}`" for cell in row.cells.values() if cell.text)
    return f"| {row.about} | {result} | {', '.join(messages)} |"


def _is_equal(result: tuple[str, list[str]]) -> bool:
    return result[0] == "equal"


def _name_layouts(row: Row) -> str:
    """Return the names of the layouts in parentheses, if the mistake cannot be made in all of them."""
    if len(row.cells) == len(LAYOUTS):
        return ""
    return f" ({', '.join(name for layout, name in LAYOUTS.items() if layout in row.cells)})"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(render_page())
    else:
        print(render_page())
