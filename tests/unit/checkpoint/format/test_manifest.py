import pytest

from headway.checkpoint.format.manifest import LARGEST, TypedReader
from headway.errors import CheckpointError


def test_what_belongs_there_comes_back():
    told = TypedReader({"n": 3, "x": 1.5, "s": "a", "b": False, "l": [1, 2], "t": (1,), "d": {"k": None}}, "state")
    assert (told["n"].whole(), told["x"].number(), told["n"].number()) == (3, 1.5, 3.0)
    assert (told["s"].text(), told["b"].flag()) == ("a", False)
    assert [each.whole() for each in told["l"].items(2)] == [1, 2]
    assert [each.whole() for each in told["t"].items()] == [1]
    assert told["d"].table()["k"].is_none
    assert told["d"].mapping() == {"k": None}
    assert told.get("none") is None
    assert [each.value for each in told.given("s", "none", "n")] == ["a", 3]
    assert list(told["d"].given("k")) == []


@pytest.mark.parametrize(("value", "ask"), [
    (True, "whole"), (-1, "whole"), (1.0, "whole"), (LARGEST + 1, "whole"), ("1", "whole"), (None, "whole"),
    (True, "number"), (float("nan"), "number"), (float("inf"), "number"), (10**400, "number"), ("1", "number"),
    (1, "text"), (0, "flag"), ("ab", "items"), ({}, "items"), ([], "table"), ({1: 2}, "table"), ([], "mapping"),
])  # fmt: skip
def test_anything_else_is_refused(value, ask):
    with pytest.raises(CheckpointError, match=r"^the manifest's state\.x is .*, where .* belongs$"):
        getattr(TypedReader(value, "state.x"), ask)()


def test_places_are_told_and_long_values_are_cut():
    told = TypedReader({"a": [{"b": "x" * 1000}]}, "about")
    with pytest.raises(CheckpointError, match=r"the manifest's about\.a\[0\]\.b is 'x{79}\.\.\., where") as caught:
        told["a"].items()[0]["b"].whole()
    assert len(str(caught.value)) < 250
    with pytest.raises(CheckpointError, match=r"about\.a\[0\] lacks 'c'"):
        told["a"].items()[0]["c"]
    with pytest.raises(CheckpointError, match="a list of 2"):
        told["a"].items(2)
