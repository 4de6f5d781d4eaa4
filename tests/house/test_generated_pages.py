"""What is generated says what its source says: the tree of docs/files.md, the table of mistakes, the site's reference."""

import re
import sys

import pytest

import headway
from tests.house.tree_of_source import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import pages
import tree
import wrong_use


def test_the_page_of_files_holds_the_tree():
    assert tree.block() in tree.PAGE.read_text(), "run: python scripts/tree.py --write"


def test_the_page_of_mistakes_holds_the_table():
    assert wrong_use.page() == wrong_use.PAGE.read_text(), "run: python scripts/wrong_use.py --write"


def test_the_reference_holds_every_public_name_once():
    text = "\n".join(pages.reference_pages().values())
    found = [line.removeprefix("::: ") for line in text.splitlines() if line.startswith("::: ")]
    names = [place.rpartition(".")[2] for place in found if place not in pages.RETURNED]
    assert sorted(names) == sorted(name for name in headway.__all__ if name != "__version__")


@pytest.mark.parametrize("place", pages.RETURNED)
def test_what_prepare_returns_is_where_the_reference_looks(place):
    module, _, name = place.rpartition(".")
    assert f"class {name}" in (ROOT / "src" / (module.replace(".", "/") + ".py")).read_text()


def test_every_page_is_in_the_navigation():
    settings = (ROOT / "docs" / "site.yml").read_text()
    missing = [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name not in settings and page.name != "reference.md"
    ]
    assert missing == []


def test_the_front_page_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_package_ships_what_it_reads():
    text = (ROOT / "pyproject.toml").read_text()  # Python 3.10 has no reader of it
    section = text.partition("[tool.setuptools.package-data]\n")[2].partition("\n\n")[0]
    patterns = re.findall(r'"([^"]+)"', section)
    package = ROOT / "src" / "headway"
    shipped = {file for pattern in patterns for file in package.glob(pattern)}
    others = {file for file in package.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert others - shipped == set()
