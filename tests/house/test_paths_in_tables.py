"""Tables in Markdown that name tests or files: every path exists, and each named test uses the name in its row."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES_USED = ROOT / "tests" / "ecosystem" / "names_used.md"


def list_tracked_files(pattern: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split()]


def test_names_used_by_libraries_are_tested_where_the_table_says():
    rows = re.findall(r"^\| `(\S+)` \| (.*) \| (.*) \| (.*) \|$", NAMES_USED.read_text(), re.MULTILINE)
    assert len(rows) > 180
    for name, _, how, test in rows:
        if not how.startswith("no"):
            assert test, f"names_used.md names no test for {name}"
            if not test.startswith("`house"):
                assert name.rpartition(".")[2] in (ROOT / "tests" / test.strip("`")).read_text(), name


@pytest.mark.parametrize("page", list_tracked_files("tests/**/*.md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_to_tests_exist(page):
    """Check the paths of test files in a Markdown page.

    A path may be relative to the repository, to tests/ or to the page's folder.
    """
    paths = re.findall(r"`((?:[\w.-]+/)*test_[\w-]+\.py)(?:::[\w\[\]-]+)?`", page.read_text())
    missing = [
        path for path in paths if not any((base / path).exists() for base in (ROOT, ROOT / "tests", page.parent))
    ]
    assert missing == []


def test_files_in_the_table_of_where_new_things_go_exist():
    """Check the paths in the table "Where new things go" of docs/architecture.md.

    A path may be relative to the repository, to src/headway or to src/headway/compat/accelerate.
    """
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## Where new things go")[2].partition("\n## ")[0]
    bases = (ROOT, ROOT / "src/headway", ROOT / "src/headway/compat/accelerate")
    paths = set(re.findall(r"`((?:\w+/)+\w+\.\w+)`", section)) - {"cli/NAME.py"}
    assert len(paths) > 30
    assert sorted(path for path in paths if not any((base / path).exists() for base in bases)) == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("_BUILT_IN", "core/tracking/selection.py"), ("LoggerType", "core/tracking/base.py"),
        ("_DESCRIPTIONS", "core/config/mesh.py"), ("_INNER_AXES", "core/config/layout_after_loss.py"), ("_COMMANDS", "cli/main.py"),
        ("SCHEMES", "common/object_path.py"), ("_BLOCKING_AXES", "planning/costs.py"),
        ("DEVICES", "forecasting/device/devices.py"), ("StepGuard", "core/training/guard.py"),
    ],
)  # fmt: skip
def test_names_in_the_table_of_where_new_things_go_are_in_their_files(name, file):
    assert re.search(rf"^(class )?{name}\b", (ROOT / "src/headway" / file).read_text(), re.MULTILINE)
