"""What may be logged, and the errors of what may not."""

import numpy
import pytest
import torch

from headway.errors import TrackingError
from headway.tracking.values import flatten, to_python


def test_numbers_and_texts_of_every_kind_become_pythons():
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
    ("values", "message"),
    [
        ({"a": {"loss": torch.ones(2)}}, r"a tensor of shape \(2,\).*for 'a/loss'.*reduce it first"),
        ({"one": torch.ones(1)}, r"shape \(1,\).*'one'"),
        ({"a": numpy.ones((2, 3))}, r"an array of shape \(2, 3\)"),
        ({"a": [1, 2]}, r"list '\[1, 2\]' for 'a'"),
        ({"a": 1j}, "complex"),
        ({"a": torch.tensor(1j)}, "complex64"),
        ({"a": numpy.complex64(1)}, "complex64"),
        ({1: 2.0}, "takes names as text; 1 is int"),
        ([("a", 1)], "takes a mapping"),
    ],
    ids=str,
)
def test_anything_else_is_an_error_that_names_it(values, message):
    with pytest.raises(TrackingError, match=message):
        flatten(values)


def test_none_is_left_out():
    assert flatten({"loss": 1.0, "lr": None, "nested": {"a": None, "b": 2}}) == {"loss": 1.0, "nested/b": 2}


def test_tensors_are_left_out_where_nobody_listens():
    values = {
        "loss": torch.zeros(()),
        "rows": torch.zeros(4),
        "nested": {"array": numpy.zeros(3)},
        "text": "a",
    }
    assert flatten(values, is_heard=False) == {"text": "a"}
    with pytest.raises(TrackingError, match="'rows'"):
        flatten(values)
    with pytest.raises(TrackingError, match="'odd'"):
        flatten({"odd": object()}, is_heard=False)
