"""Nested batches: containers come back as they were, in the order their tensors are listed."""

import collections
import types
from dataclasses import dataclass, field

import pytest
import torch
from transformers import BatchEncoding
from transformers.utils import ModelOutput

from headway.collectives.tree import (
    concatenate,
    find_batch_size,
    map_tensors,
    slice_rows,
    structure,
    tensors,
    to_device,
)
from headway.errors import DataError

Pair = collections.namedtuple("Pair", "left right")


class Stack(list):
    pass


@dataclass
class Box:
    made: torch.Tensor = field(init=False, default_factory=lambda: torch.tensor(-1))
    held: torch.Tensor = field(default_factory=lambda: torch.tensor(1))


X = torch.arange(3)
TREES = [
    X, [X, (X, None)], Pair(X, "text"), Stack([X]), {"a": X, "b": {"c": [X]}}, collections.OrderedDict(z=X, a=X + 1),
    collections.defaultdict(list, k=X), collections.UserDict(k=X), types.MappingProxyType({"k": X}), BatchEncoding({"ids": X}),
    ModelOutput(logits=X, hidden=(X, X)), Box(held=X), "text", None, 3,
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_containers_come_back_as_they_were(tree):
    before = [tensor.clone() for tensor in tensors(tree)]
    mapped = map_tensors(lambda tensor: tensor * 2, tree)
    assert type(mapped) is type(tree)
    assert structure(mapped) == structure(tree)
    for old, kept, new in zip(before, tensors(tree), tensors(mapped), strict=True):
        assert torch.equal(old, kept)
        assert torch.equal(new, old * 2)
    listed = []
    map_tensors(listed.append, tree)
    assert [id(tensor) for tensor in listed] == [id(tensor) for tensor in tensors(tree)]


def test_what_a_mapping_holds_beside_its_items_stays():
    assert map_tensors(lambda t: t, collections.defaultdict(list, k=X))["new"] == []
    assert to_device(BatchEncoding({"ids": X}), torch.device("cpu")).ids.tolist() == [0, 1, 2]


def test_batch_size_is_the_first_dimension_found():
    assert find_batch_size({"n": torch.tensor(1), "x": [torch.ones(4, 2)]}) == 4
    assert find_batch_size(["text", None]) is None
    assert find_batch_size(torch.tensor(3)) is None


def test_slicing_and_joining():
    tree = {"x": torch.arange(6).reshape(3, 2), "n": torch.tensor(1), "s": "text"}
    assert slice_rows(tree, 1, 3)["x"].tolist() == [[2, 3], [4, 5]]
    joined = concatenate([[X], [X + 3]])
    assert joined[0].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(DataError, match="2 different structures"):
        concatenate([[X], (X, X)])


def test_structures_that_differ_read_differently():
    texts = [structure(tree) for tree in ([X], [X, X], {"a": X}, {"b": X}, [[X]], [None], X)]
    assert len(set(texts)) == len(texts)
