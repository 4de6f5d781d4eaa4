"""Test that values of a state are encoded as JSON and decoded with the same types, or are refused with their path."""

import contextlib
import json
import math
from collections import Counter, OrderedDict
from pathlib import PurePosixPath

import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import example, given, settings

from headway.core.checkpoint.format.values import decode_value, encode_value
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.amount import EXAMPLES

keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.binary(max_size=3))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4), st.tuples(inner, inner),
        st.sets(st.integers(), max_size=3), st.dictionaries(st.just("!"), inner),
    ),
    max_leaves=12,
)  # fmt: skip


def round_trip(value):
    tensors = {}
    text = json.dumps(encode_value(value, "x", tensors), allow_nan=False)
    return decode_value(json.loads(text), tensors)


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(values)
def test_values_round_trip(value):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("value", [
    math.inf, -math.inf, torch.float16, torch.device("cpu"), torch.Size([2, 3]), range(1, 9, 2), bytearray(b"ab"),
    OrderedDict(b=1, a=2), Counter("aab"), frozenset({"x"}), PurePosixPath("a/b"), numpy.float32(1.5), numpy.int64(7),
    {1: "one", (2, "x"): [None]}, {"nested": {"!": "tensor", "name": "forged"}},
])  # fmt: skip
def test_other_types_round_trip(value):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_tensors_and_arrays_round_trip():
    value = {"nan": math.nan, "t": [torch.arange(3), (torch.ones(2, dtype=torch.bfloat16),)],
             "a": numpy.arange(6, dtype=">i2").reshape(2, 3), "empty": numpy.zeros((0, 4))}  # fmt: skip
    back = round_trip(value)
    assert math.isnan(back["nan"])
    assert torch.equal(back["t"][0], torch.arange(3))
    assert torch.equal(back["t"][1][0], torch.ones(2, dtype=torch.bfloat16))
    assert back["a"].dtype == value["a"].dtype
    assert numpy.array_equal(back["a"], value["a"])
    assert back["empty"].shape == (0, 4)


def test_two_tensors_with_the_same_path_are_kept_apart():
    tensors = {}
    written = encode_value({"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2)}, "x", tensors)
    assert len(tensors) == 2
    assert decode_value(written, tensors)["a.b"].item() == 2


class Odd:
    """Class without an encoding."""


@pytest.mark.parametrize("value", [Odd(), [Odd()], {"a": {"b": lambda: 0}}, numpy.array([Odd()])])
def test_value_that_needs_pickle_is_refused_with_its_path(value):
    with pytest.raises(CheckpointError, match=r"^state"):
        encode_value(value, "state", {})


def test_value_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode_value(loop, "state", {})


junk = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.fixed_dictionaries(
            {"!": st.sampled_from(["tensor", "array", "scalar", "float", "bytes", "complex", "torch.dtype", "torch.device",
                                   "torch.Size", "range", "path", "tuple", "set", "dict", "Counter", "defaultdict", "no"])},
            optional={"value": inner, "name": st.sampled_from(["x", "y"]), "items": inner, "dtype": inner, "shape": inner},
        ),
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=EXAMPLES, deadline=None)
@given(junk)
@example({"!": "complex", "value": []})
def test_arbitrary_json_is_decoded_or_refused(value):
    with contextlib.suppress(CheckpointError):
        decode_value(value, {"x": torch.arange(4, dtype=torch.uint8)})
