"""Test which values can be logged, and the descriptions of all others."""

from pathlib import Path

import numpy
import pytest
import torch

from headway.core.tracking.values import describe_type, flatten, is_loggable, to_python


def test_numbers_and_texts_become_python_values():
    given = {
        "tensor": torch.tensor(1.5, dtype=torch.bfloat16),
        "whole": torch.tensor(3),
        "learning": torch.tensor(2.0, requires_grad=True),
        "scalar": numpy.float32(0.25),
        "array": numpy.array(7),
        "truth": numpy.bool_(True),
        "int": 1,
        "text": numpy.str_("a"),
    }
    values = {name: to_python(value) for name, value in flatten(given).items()}
    assert values == {
        "tensor": 1.5,
        "whole": 3,
        "learning": 2.0,
        "scalar": 0.25,
        "array": 7,
        "truth": True,
        "int": 1,
        "text": "a",
    }
    assert {type(value) for value in values.values()} == {float, int, bool, str}


def test_nested_mappings_become_names_with_slashes():
    assert flatten({"a": {"b": 1, "c": {"d": 2.0}}, "e": "x", "f": {}}) == {"a/b": 1, "a/c/d": 2.0, "e": "x"}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.ones(2), "a tensor of shape (2,) and type torch.float32"),
        (numpy.ones((2, 3)), "an array of shape (2, 3) and type float64"),
        ([1, 2], "builtins.list"),
        (1j, "builtins.complex"),
        (numpy.complex64(1), "numpy.complex64"),
        (Path("a"), f"{type(Path('a')).__module__}.{type(Path('a')).__name__}"),
    ],
    ids=str,
)
def test_other_values_are_kept_and_described(value, kind):
    assert flatten({"a": {"loss": value}, 1: 2.0})["a/loss"] is value
    assert not is_loggable(value)
    assert describe_type(value) == kind


def test_none_is_left_out():
    assert flatten({"loss": 1.0, "lr": None, "nested": {"a": None, "b": 2}}) == {"loss": 1.0, "nested/b": 2}
