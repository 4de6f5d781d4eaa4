"""Generated pages are current: the tree in docs/files.md, the wrong-use table, the navigation, the API reference and llms.txt."""

import re
import sys

import pytest

import headway
from tests.house.tree_of_source import ROOT
from tests.wrong_use.table import SECTIONS

sys.path.insert(0, str(ROOT / "scripts"))

import llms
import navigation
import pages
import tree
import wrong_use


def test_files_page_has_the_current_tree():
    assert tree.render_block() in tree.PAGE.read_text(), "run: python scripts/tree.py --write"


def test_wrong_use_page_has_the_current_table():
    assert wrong_use.render_page() == wrong_use.PAGE.read_text(), "run: python scripts/wrong_use.py --write"


def test_wrong_use_rows_have_unique_names():
    names = [row.name for section in SECTIONS for row in section.rows]
    assert sorted(set(names)) == sorted(names)


def test_reference_has_every_public_name_once():
    text = "\n".join(pages.render_reference_pages().values())
    found = [line.removeprefix("::: ") for line in text.splitlines() if line.startswith("::: ")]
    names = [place.rpartition(".")[2] for place in found if place not in pages.RETURNED]
    assert sorted(names) == sorted(name for name in headway.__all__ if name != "__version__")


@pytest.mark.parametrize("place", pages.RETURNED)
def test_classes_that_prepare_returns_are_in_the_referenced_modules(place):
    module, _, name = place.rpartition(".")
    assert f"class {name}" in (ROOT / "src" / (module.replace(".", "/") + ".py")).read_text()


def test_every_page_is_in_the_navigation_once():
    listed = [page for group in navigation.read_groups() for page in (*group.pages, *group.more)]
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")
    for group in navigation.read_groups():
        assert len(group.pages) <= navigation.MAX_PAGES_SHOWN, group.title


@pytest.mark.parametrize("name", navigation.MARKERS)
def test_index_and_menu_match_the_navigation(name):
    assert navigation.render()[name] == (navigation.DOCS / name).read_text(), (
        "run: python scripts/navigation.py --write"
    )


def test_name_index_has_every_public_name_once_with_a_description():
    names = [name for group in pages.read_names_by_task().values() for name in group]
    assert sorted(names) == sorted(name for name in headway.__all__ if name != "__version__")
    rows = re.findall(
        r"^\| \[`(\w+)`\]\((\S+)\) \| (.*) \|$",
        pages.render_index_of_names(pages.render_reference_pages()),
        re.MULTILINE,
    )
    assert [name for name, _, _ in rows] == names
    assert [name for name, _, about in rows if len(about) < 20] == []


def test_package_data_includes_every_data_file():
    text = (ROOT / "pyproject.toml").read_text()  # Python 3.10 has no TOML parser
    section = text.partition("[tool.setuptools.package-data]\n")[2].partition("\n\n")[0]
    patterns = re.findall(r'"([^"]+)"', section)
    package = ROOT / "src" / "headway"
    shipped = {file for pattern in patterns for file in package.glob(pattern)}
    others = {file for file in package.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert others - shipped == set()


def test_site_has_every_page_as_markdown_and_lists_it_in_llms_txt(tmp_path):
    source = tmp_path / "docs"
    (source / "reference").mkdir(parents=True)
    for page in (ROOT / "docs").glob("*.md"):
        (source / page.name).write_text(page.read_text())
    for path, text in pages.render_reference_pages().items():
        (source / path).write_text(text)
    llms.write(source, tmp_path / "site")
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", (tmp_path / "site/llms.txt").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(
        str(page.relative_to(source)) for page in source.rglob("*.md") if page.name != "index.md"
    )
    text = (tmp_path / "site/reference/accelerator.md").read_text()
    assert "::: " not in text
    assert "### Accelerator.backward" in text
    assert "def backward(self, loss" in text
