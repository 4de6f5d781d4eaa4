"""The example strategy, as if it were installed: its entry point beside it on the path."""

import sys
from pathlib import Path

import tomllib

FOLDER = Path(__file__).parents[2] / "examples" / "own_strategy"


def write_entry_points(folder: Path) -> Path:
    """What pip would write of the package's pyproject.toml."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in each.items()) for group, each in points]
    (about / "entry_points.txt").write_text("\n".join(lines))
    return folder


def install(folder: Path) -> None:
    """Let this process find the package."""
    sys.path += [path for path in (str(folder), str(FOLDER)) if path not in sys.path]
