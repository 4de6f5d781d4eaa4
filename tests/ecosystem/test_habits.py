"""Habits of scripts give the same results as Accelerate 1.15, except for those in docs/accelerate_name_reference.md."""

import json
from pathlib import Path

import pytest

from tests.ecosystem.habits import record

RECORDED = json.loads(record.RECORDED.read_text())
DIFFERENT = json.loads((record.FOLDER / "different.json").read_text())
"""{habit with another result: part of the row in docs/accelerate_name_reference.md that documents it}."""
PAGE = (Path(__file__).parents[2] / "docs" / "accelerate_name_reference.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(record.names()))
def test_habit_gives_the_recorded_result(name):
    theirs = [RECORDED[f"{name} on {world_size}"] for world_size in record.WORLDS]
    ours = [record.run("headway", name, world_size) for world_size in record.WORLDS]
    assert all("no end" not in each for each in ours)
    if name in DIFFERENT:
        assert not record.same(theirs, ours), "the results agree: remove the row from the page"
    else:
        assert record.same(theirs, ours), f"Accelerate gave {theirs}, Headway {ours}"


def test_page_lists_each_different_habit():
    assert [piece for piece in DIFFERENT.values() if piece not in PAGE] == []


def test_each_habit_is_recorded():
    names = set(record.names())
    assert {f"{name} on {world_size}" for name in names for world_size in record.WORLDS} == set(RECORDED)
    assert set(DIFFERENT) <= names
    assert len(names) > 250
