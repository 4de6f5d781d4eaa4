"""Test nested batches: types are kept, tensors keep their order, objects are moved to devices, and sequences are split."""

import collections
import types
from dataclasses import InitVar, dataclass, field
from typing import Any

import datasets
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.utils import ModelOutput

from headway.core.runtime.collectives.tree import (
    compute_slice_bounds,
    concatenate,
    copy_views,
    describe_structure,
    find_batch_size,
    list_tensors,
    map_tensors,
    slice_rows,
    split_inputs,
    to_device,
)
from headway.errors import DataError, UnsupportedError

Pair = collections.namedtuple("Pair", "left right")


class Stack(list):
    """Subclass of list."""


@dataclass
class Box:
    """Dataclass with two tensors, one of which is no argument of the constructor."""

    made: torch.Tensor = field(init=False, default_factory=lambda: torch.tensor(-1))
    held: torch.Tensor = field(default_factory=lambda: torch.tensor(1))


X = torch.arange(3)


TREES = [
    X, [X, (X, None)], Pair(X, "text"), Stack([X]), {"a": X, "b": {"c": [X]}}, collections.OrderedDict(z=X, a=X + 1),
    collections.defaultdict(list, k=X), collections.UserDict(k=X), types.MappingProxyType({"k": X}), BatchEncoding({"ids": X}),
    ModelOutput(logits=X, hidden=(X, X)), Box(held=X), "text", None, 3,
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_containers_keep_their_types(tree):
    before = [tensor.clone() for tensor in list_tensors(tree)]
    mapped = map_tensors(lambda tensor: tensor * 2, tree)
    assert type(mapped) is type(tree)
    assert describe_structure(mapped) == describe_structure(tree)
    for old, kept, new in zip(before, list_tensors(tree), list_tensors(mapped), strict=True):
        assert torch.equal(old, kept)
        assert torch.equal(new, old * 2)
    listed = []
    map_tensors(listed.append, tree)
    assert [id(tensor) for tensor in listed] == [id(tensor) for tensor in list_tensors(tree)]


def test_other_attributes_of_a_mapping_are_kept():
    assert map_tensors(lambda t: t, collections.defaultdict(list, k=X))["new"] == []
    assert to_device(BatchEncoding({"ids": X}), torch.device("cpu")).ids.tolist() == [0, 1, 2]


def test_batch_size_is_the_first_dimension_found():
    assert find_batch_size({"n": torch.tensor(1), "x": [torch.ones(4, 2)]}) == 4
    assert find_batch_size(["text", None]) is None
    assert find_batch_size(torch.tensor(3)) is None


def test_batch_size_of_images_before_their_text_is_that_of_the_text():
    """Processors of vision-language models return one entry of `pixel_values` per patch."""
    assert find_batch_size({"pixel_values": torch.ones(64, 8), "input_ids": torch.ones(2, 5)}) == 2
    assert find_batch_size({"pixel_values": torch.ones(3, 8), "input_ids": "text"}) == 3


def test_concatenate_needs_equal_structures():
    joined = concatenate([[X], [X + 3]])
    assert joined[0].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(DataError, match="2 different structures"):
        concatenate([[X], (X, X)])


def test_different_structures_have_different_descriptions():
    texts = [describe_structure(tree) for tree in ([X], [X, X], {"a": X}, {"b": X}, [[X]], [None], X)]
    assert len(set(texts)) == len(texts)


META = torch.device("meta")


class Graph:
    """Batch of a graph library, whose parts are not visible as a container."""

    def __init__(self, nodes):
        self.nodes = nodes

    def to(self, device, *, non_blocking=False):
        return Graph(self.nodes.to(device, non_blocking=non_blocking))


class InPlace(Graph):
    """Batch that moves in place and returns nothing."""

    def to(self, device):
        self.nodes = self.nodes.to(device)


class Quantity:
    """Object whose `to` method does not move it to a device."""

    def to(self, unit):
        raise ValueError(f"unknown unit {unit!r}")


@dataclass
class Boxed(Box):
    """Dataclass that `dataclasses.replace` cannot copy, because of its InitVar."""

    size: InitVar[int] = field(kw_only=True)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_objects_with_a_to_method_are_moved_by_it(non_blocking):
    moved = to_device([Graph(X), InPlace(X), {"packed": pack_sequence([X, X[:2]])}], META, non_blocking)
    assert [moved[0].nodes.device, moved[1].nodes.device] == [META, META]
    packed = moved[2]["packed"]
    assert (packed.data.device, packed.batch_sizes.device.type) == (META, "cpu")
    with pytest.raises(DataError, match=r"a Quantity whose to\('meta'\) failed: unknown unit"):
        to_device(Quantity(), META)


def test_dataclasses_are_moved_with_all_tensors():
    box = Box(held=X)
    box.made = X + 1
    moved = to_device(box, META)
    assert (moved.held.device, moved.made.device) == (META, META)
    assert map_tensors(lambda t: t + 1, box).made.tolist() == [2, 3, 4]
    boxed = Boxed(held=X, size=3)  # replace() cannot copy this object
    assert to_device(boxed, META).held.device == META
    assert slice_rows(boxed, 0, 1, len(X)).held.tolist() == X[:1].tolist()


@dataclass
class Pixels:
    """Dataclass whose `__post_init__` must run only once, and derives a field."""

    values: torch.Tensor
    num_rows: int = field(init=False)

    def __post_init__(self):
        self.values = self.values / 255
        self.num_rows = len(self.values)


@dataclass
class Stacked:
    """Dataclass whose `__post_init__` rejects its own results."""

    rows: Any

    def __post_init__(self):
        self.rows = torch.stack(self.rows)


def test_dataclass_is_not_initialized_twice():
    pixels = Pixels(torch.full((4, 2), 255.0))
    part = slice_rows(map_tensors(torch.clone, pixels), 0, 1, 4)
    assert part.values.tolist() == [[1.0, 1.0]]
    assert part.num_rows == 1
    assert map_tensors(torch.clone, Stacked([X, X])).rows.shape == (2, len(X))


def test_slices_contain_the_rows_of_fields_that_are_no_arguments():
    box = Box(held=X)
    box.made = X + 1
    assert slice_rows(box, 1, 2, len(X)).made.tolist() == [2]


def test_packed_sequence_is_one_leaf():
    packed = pack_sequence([X, X[:2]])
    assert find_batch_size({"packed": packed}) == 2
    assert list(list_tensors([packed])) == []
    assert map_tensors(lambda t: t * 2, [packed])[0] is packed
    with pytest.raises(DataError, match="pad_packed_sequence"):
        concatenate([[packed], [packed]])
    for whole in (packed, Graph(X)):
        assert slice_rows([whole, torch.ones(2)], 0, 2, 2)[0] is whole
        with pytest.raises(UnsupportedError, match="cannot be split by rows"):
            slice_rows([whole, torch.ones(2)], 0, 1, 2)


@given(st.integers(0, 300), st.integers(1, 40))
def test_slices_cover_all_items_once_and_differ_in_length_by_at_most_one(num_items, num_parts):
    bounds = [compute_slice_bounds(num_items, num_parts, index) for index in range(num_parts)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(num_items))
    sizes = [stop - start for start, stop in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def make_sequences(n):
    """Return the numbers from 0 to n - 1 as each supported type. The data set is None if n is 0."""
    return {
        "list": list(range(n)), "tuple": tuple(range(n)), "range": range(n), "tensor": torch.arange(n),
        "array": numpy.arange(n), "dataset": datasets.Dataset.from_dict({"x": list(range(n))}) if n else None,
    }  # fmt: skip


def list_values(part):
    return list(part["x"]) if isinstance(part, datasets.Dataset) else [int(value) for value in part]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 7, 16])
def test_sequences_of_every_type_are_split(n, num_parts):
    for name, given_ in make_sequences(n).items():
        if given_ is None:
            continue
        parts = [split_inputs(given_, num_parts, index) for index in range(num_parts)]
        assert [v for part in parts for v in list_values(part)] == list(range(n)), name
        assert all(type(part) is type(given_) for part in parts), name
        if n:
            padded = [
                list_values(split_inputs(given_, num_parts, index, apply_padding=True)) for index in range(num_parts)
            ]
            assert {len(part) for part in padded} == {-(-n // num_parts)}, name
            for part, filled in zip(parts, padded):
                assert filled[: len(part)] == list_values(part), name
                assert set(filled[len(part) :]) <= {n - 1}, name


def test_padding_keeps_the_type():
    assert split_inputs((1, 2, 3), 2, 1, apply_padding=True) == (3, 3)
    assert split_inputs([1, 2, 3], 2, 1, apply_padding=True) == [3, 3]
    assert split_inputs(range(3), 2, 1, apply_padding=True) == [2, 2]
    assert split_inputs(torch.ones(3, 2), 2, 1, apply_padding=True).shape == (2, 2)


def test_dict_is_left_unchanged():
    """Accelerate slices the caller's dict in place."""
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
def test_unsupported_inputs_are_refused_even_on_one_process(wrong, num_parts):
    with pytest.raises(DataError, match="cannot split"):
        split_inputs(wrong, num_parts, 0)


def test_lengths_must_agree_and_an_empty_list_cannot_be_padded():
    with pytest.raises(DataError, match=r"differ in length: \{'a': 1, 'b': 2\}"):
        split_inputs({"a": [1], "b": [1, 2]}, 2, 0)
    assert split_inputs([], 3, 1, apply_padding=True) == []


def test_copy_views_releases_the_whole_storage():
    whole = torch.arange(1000)
    (part,) = copy_views([whole[3:5]])
    assert part.tolist() == [3, 4]
    assert part.untyped_storage().nbytes() == part.nbytes
    assert copy_views(whole) is whole
