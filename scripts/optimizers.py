"""Write the table of docs/optimizers.md: the measured result of each optimizer of pytorch_optimizer under each layout.

`python scripts/optimizers.py --write [folder]` runs every optimizer in a plain loop and under each layout. Rows that the folder has
from an earlier run are not run again. `--table folder` only prints the table from the folder's rows.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "optimizers.md"
BEGIN, END = "<!-- table of optimizers -->", "<!-- /table of optimizers -->"
sys.path.insert(0, str(ROOT))


def make_table(folder: Path) -> str:
    """Return the Markdown table of the rows in a folder."""
    from tests.distributed.optimizer_table import CHANGED, LAYOUTS, UPDATES, judge, list_names, read_rows

    def read(layout: str) -> dict[str, object]:
        log = folder / f"rows_{layout}.jsonl"
        return read_rows(log) if log.exists() else {}

    expected, changed, measured = read("hand"), read(CHANGED), {layout: read(layout) for layout in LAYOUTS}
    measured_layouts = [layout for layout in LAYOUTS if measured[layout]]
    cells = {
        layout: {
            name: judge(expected[name], changed[name], measured[layout][name])
            if name in measured[layout]
            else "not measured"
            for name in list_names()
        }
        for layout in measured_layouts
    }
    lines = [f"Losses of {UPDATES} updates, compared with those of a hand-written loop on one process:", ""]
    for layout in measured_layouts:
        counts = Counter(cell if "rounding" in cell else cell.partition(" ")[0] for cell in cells[layout].values())
        kinds = {
            "equal": "equal within 1e-5",
            "equal up to rounding": "equal up to rounding",
            "within": "within a larger tolerance",
            "error": "raise an error",
            "draws": "draw random numbers",
            "different": "different",
            "needs": "need a different training loop, even on one process",
            "not": "not measured",
        }
        counted = [f"{counts[kind]} {text}" for kind, text in kinds.items() if kind != "not" or counts["not"]]
        lines.append(f"- `{layout}`, {LAYOUTS[layout]} ranks: {', '.join(counted)}")
    lines += [
        "",
        f"| optimizer | {' | '.join(f'`{layout}`' for layout in measured_layouts)} |",
        "|---" * (len(measured_layouts) + 1) + "|",
    ]
    lines += [f"| {name} | {' | '.join(cells[layout][name] for layout in measured_layouts)} |" for name in list_names()]
    return "\n".join(lines)


def read_cells(layout: str) -> dict[str, str]:
    """Return the page's cell of each optimizer for one layout."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    column = rows[0].index(f"`{layout}`")
    return {row[0]: row[column] for row in rows[2:]}


if __name__ == "__main__":
    from tests.distributed.optimizer_table import CHANGED, LAYOUTS, list_names, run_layout

    if sys.argv[1:2] == ["--table"]:
        folder = Path(sys.argv[2])
    else:
        folder = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp())
        folder.mkdir(parents=True, exist_ok=True)
        for layout in (None, CHANGED, *LAYOUTS):
            run_layout(list_names(), layout, folder / f"rows_{layout or 'hand'}.jsonl")
    table = make_table(folder)
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    else:
        print(table)
