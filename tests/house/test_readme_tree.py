"""The generated pages say what the source says: the README's tree and docs/reference.md."""

import sys

from tests.house.tree_of_source import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import reference
import tree


def test_the_readme_holds_the_tree():
    assert tree.block() in (ROOT / "README.md").read_text(), "run: python scripts/tree.py --write"


def test_the_reference_is_up_to_date():
    written = (ROOT / "docs" / "reference.md").read_text()
    assert written == reference.page(), "run: python scripts/reference.py --write"
