"""Nested batches: containers keep their types, and tensors keep their order."""

import collections
import types
from dataclasses import InitVar, dataclass, field

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.utils import ModelOutput

from headway.core.runtime.collectives.tree import (
    concatenate,
    describe_structure,
    find_batch_size,
    list_tensors,
    map_tensors,
    slice_rows,
    to_device,
)
from headway.errors import DataError, UnsupportedError

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


def test_joining():
    joined = concatenate([[X], [X + 3]])
    assert joined[0].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(DataError, match="2 different structures"):
        concatenate([[X], (X, X)])


def test_structures_that_differ_read_differently():
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
    def to(self, device):
        self.nodes = self.nodes.to(device)


class Quantity:
    """Object whose `to` method does not move it to a device."""

    def to(self, unit):
        raise ValueError(f"unknown unit {unit!r}")


@dataclass
class Boxed(Box):
    size: InitVar[int] = field(kw_only=True)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_what_moves_itself_is_asked_to(non_blocking):
    moved = to_device([Graph(X), InPlace(X), {"packed": pack_sequence([X, X[:2]])}], META, non_blocking)
    assert [moved[0].nodes.device, moved[1].nodes.device] == [META, META]
    packed = moved[2]["packed"]
    assert (packed.data.device, packed.batch_sizes.device.type) == (META, "cpu")
    with pytest.raises(DataError, match=r"a Quantity whose to\('meta'\) failed: unknown unit"):
        to_device(Quantity(), META)


def test_dataclasses_move_with_all_their_tensors():
    box = Box(held=X)
    box.made = X + 1
    moved = to_device(box, META)
    assert (moved.held.device, moved.made.device) == (META, META)
    assert map_tensors(lambda t: t + 1, box).made.tolist() == [2, 3, 4]
    boxed = Boxed(held=X, size=3)  # what replace() cannot make again
    assert to_device(boxed, META).held.device == META


def test_a_packed_sequence_is_one_leaf():
    packed = pack_sequence([X, X[:2]])
    assert find_batch_size({"packed": packed}) == 2
    assert list(list_tensors([packed])) == []
    assert map_tensors(lambda t: t * 2, [packed])[0] is packed
    with pytest.raises(DataError, match="pad_packed_sequence"):
        concatenate([[packed], [packed]])
    for whole in (packed, Graph(X)):
        assert slice_rows([whole, torch.ones(2)], 0, 2, 2)[0] is whole
        with pytest.raises(UnsupportedError, match="cannot be cut by rows"):
            slice_rows([whole, torch.ones(2)], 0, 1, 2)
