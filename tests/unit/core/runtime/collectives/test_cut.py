"""Splitting sequences: exact for all lengths and numbers of parts, without changing the input."""

import datasets
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.core.runtime.collectives.tree import compute_slice_bounds, split_inputs
from headway.errors import DataError


@given(st.integers(0, 300), st.integers(1, 40))
def test_parts_cover_everything_once_and_differ_by_one_at_most(num_items, num_parts):
    bounds = [compute_slice_bounds(num_items, num_parts, index) for index in range(num_parts)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(num_items))
    sizes = [stop - start for start, stop in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def kinds(n):
    return {
        "list": list(range(n)), "tuple": tuple(range(n)), "range": range(n), "tensor": torch.arange(n),
        "array": numpy.arange(n), "dataset": datasets.Dataset.from_dict({"x": list(range(n))}) if n else None,
    }  # fmt: skip


def values(part):
    return list(part["x"]) if isinstance(part, datasets.Dataset) else [int(value) for value in part]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 7, 16])
def test_every_kind(n, num_parts):
    for name, given_ in kinds(n).items():
        if given_ is None:
            continue
        parts = [split_inputs(given_, num_parts, index) for index in range(num_parts)]
        assert [v for part in parts for v in values(part)] == list(range(n)), name
        assert all(type(part) is type(given_) for part in parts), name
        if n:
            padded = [values(split_inputs(given_, num_parts, index, apply_padding=True)) for index in range(num_parts)]
            assert {len(part) for part in padded} == {-(-n // num_parts)}, name
            for part, filled in zip(parts, padded):
                assert filled[: len(part)] == values(part), name
                assert set(filled[len(part) :]) <= {n - 1}, name


def test_padding_keeps_the_kind():
    assert split_inputs((1, 2, 3), 2, 1, apply_padding=True) == (3, 3)
    assert split_inputs([1, 2, 3], 2, 1, apply_padding=True) == [3, 3]
    assert split_inputs(range(3), 2, 1, apply_padding=True) == [2, 2]
    assert split_inputs(torch.ones(3, 2), 2, 1, apply_padding=True).shape == (2, 2)


def test_a_dict_is_left_as_it_was():
    """Accelerate slices the caller's own dict in place."""
    rows, mask = [1, 2, 3], torch.arange(3)
    given_ = {"rows": rows, "mask": mask, "inner": (1, 2, 3)}
    part = split_inputs(given_, 2, 1, apply_padding=True)
    assert part["rows"] == [3, 3]
    assert part["mask"].tolist() == [2, 2]
    assert part["inner"] == (3, 3)
    assert given_ == {"rows": [1, 2, 3], "mask": mask, "inner": (1, 2, 3)}
    assert given_["rows"] is rows
    assert len(mask) == 3


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("wrong", ["text", b"bytes", iter([1]), 3, None, {1, 2}])
def test_unsupported_inputs_are_refused_on_one_process_too(wrong, num_parts):
    with pytest.raises(DataError, match="cannot split"):
        split_inputs(wrong, num_parts, 0)


def test_lengths_must_agree_and_nothing_cannot_be_padded():
    with pytest.raises(DataError, match=r"differ in length: \{'a': 1, 'b': 2\}"):
        split_inputs({"a": [1], "b": [1, 2]}, 2, 0)
    assert split_inputs([], 3, 1, apply_padding=True) == []
