"""Test the reader of untrusted JSON values, which checks types and names the position of a wrong value."""

import pytest

from headway.core.checkpoint.format.typed_reader import LARGEST, TypedReader
from headway.errors import CheckpointError


def test_values_of_the_right_type_are_returned():
    told = TypedReader({"n": 3, "x": 1.5, "s": "a", "b": False, "l": [1, 2], "t": (1,), "d": {"k": None}}, "state")
    assert (told["n"].read_integer(), told["x"].read_number(), told["n"].read_number()) == (3, 1.5, 3.0)
    assert (told["s"].read_text(), told["b"].read_flag()) == ("a", False)
    assert told["l"].read_integers(count=2) == told["l"].read_optional_integers() == [1, 2]
    assert TypedReader([None, 2], "state").read_optional_integers() == [None, 2]
    assert TypedReader(["a", "b"], "state").read_texts(2) == ["a", "b"]
    assert [each.read_integer() for each in told["t"].read_items()] == [1]
    assert told["d"].read_table()["k"].is_none
    assert told["d"].read_mapping() == {"k": None}
    assert told.get("s") == TypedReader("a", "state.s")
    assert told.get("none") is None
    assert told["d"].get("k") is None


@pytest.mark.parametrize(("value", "ask"), [
    (True, "read_integer"), (-1, "read_integer"), (1.0, "read_integer"), (LARGEST + 1, "read_integer"),
    ("1", "read_integer"), (None, "read_integer"), (True, "read_number"), (float("nan"), "read_number"),
    (float("inf"), "read_number"), (10**400, "read_number"), ("1", "read_number"), (1, "read_text"), (0, "read_flag"),
    ("ab", "read_items"), ({}, "read_items"), ([], "read_table"), ({1: 2}, "read_table"), ([], "read_mapping"),
])  # fmt: skip
def test_value_of_a_wrong_type_is_refused(value, ask):
    with pytest.raises(CheckpointError, match=r"^the manifest's state\.x is .*, where .* belongs$"):
        getattr(TypedReader(value, "state.x"), ask)()


def test_messages_name_the_position_and_shorten_long_values():
    told = TypedReader({"a": [{"b": "x" * 1000}]}, "about")
    with pytest.raises(CheckpointError, match=r"the manifest's about\.a\[0\]\.b is 'x{79}\.\.\., where") as exc_info:
        told["a"].read_items()[0]["b"].read_integer()
    assert len(str(exc_info.value)) < 250
    with pytest.raises(CheckpointError, match=r"about\.a\[0\] lacks 'c'"):
        told["a"].read_items()[0]["c"]
    with pytest.raises(CheckpointError, match="a list of 2"):
        told["a"].read_items(2)


@pytest.mark.parametrize(("method", "value"), [
    ("read_integers", [1, -1]), ("read_integers", [1, True]), ("read_integers", [1, None]), ("read_integers", [1, LARGEST + 1]),
    ("read_optional_integers", [None, -1]), ("read_optional_integers", [None, "1"]), ("read_texts", ["a", 1]),
])  # fmt: skip
def test_wrong_item_of_a_list_is_named(method, value):
    with pytest.raises(CheckpointError, match=r"^the manifest's state\.x\[1\] is "):
        getattr(TypedReader(value, "state.x"), method)()


@pytest.mark.parametrize("method", ["read_integers", "read_optional_integers", "read_texts"])
def test_list_must_have_the_required_length(method):
    with pytest.raises(CheckpointError, match="a list of 2 belongs"):
        getattr(TypedReader([], "state.x"), method)(count=2)
