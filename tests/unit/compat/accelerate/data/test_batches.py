"""Test Accelerate's functions on nested batches: apply, move, concatenate, convert and inspect."""

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from accelerate.utils import operations as their_operations

from headway.compat.accelerate.data import batches

Pair = namedtuple("Pair", "one other")


class Encoding(dict):
    """Dictionary with its own `to`, like the encodings of transformers."""

    def to(self, device):
        return Encoding({key: f"{value}@{device}" for key, value in self.items()})


def test_containers_keep_their_types():
    tree = {"pair": Pair(torch.ones(1), [torch.zeros(2)]), "order": OrderedDict(x=(torch.ones(1), "text"))}
    found = batches.recursively_apply(lambda leaf, plus: leaf + plus, tree, 2)
    assert isinstance(found["pair"], Pair)
    assert isinstance(found["order"], OrderedDict)
    assert found["pair"].one.item() == 3
    assert found["order"]["x"][1] == "text"


def test_unsupported_leaf_raises_an_error_on_request():
    with pytest.raises(TypeError, match=r"Unsupported types .<class 'str'>. passed to `abs`"):
        batches.recursively_apply(abs, ["a"], error_on_other_type=True)
    assert batches.recursively_apply(len, ["abc"], test_type=lambda leaf: isinstance(leaf, str)) == [3]


def test_send_to_device():
    counted = defaultdict(list, {"x": torch.ones(1)})
    sent = batches.send_to_device({"a": counted, "b": Encoding(x=1), "c": [torch.ones(2), 3]}, "meta", skip_keys=["c"])
    assert isinstance(sent["a"], defaultdict)
    assert sent["a"]["x"].is_meta
    assert sent["b"] == {"x": "1@meta"}
    assert not sent["c"][0].is_meta
    assert batches.send_to_device({"k": torch.ones(1)}, "meta", skip_keys="k")["k"].device.type == "cpu"
    assert batches.send_to_device(Pair(torch.ones(1), "text"), "meta", non_blocking=True).one.is_meta


def test_concatenate_keeps_nested_types_and_refuses_text():
    joined = batches.concatenate([Pair(torch.ones(1), {"x": torch.zeros(2)})] * 2)
    assert isinstance(joined, Pair)
    assert joined.other["x"].shape == (4,)
    assert batches.concatenate([[torch.ones(2, 1)], [torch.ones(2, 2)]], dim=1)[0].shape == (2, 3)
    assert batches.concatenate(["alone"]) == "alone"
    with pytest.raises(TypeError, match="concatenate got a str"):
        batches.concatenate(["one", "two"])


def test_conversions_and_queries_reach_nested_tensors():
    half = torch.ones(2, dtype=torch.bfloat16)
    assert batches.convert_to_fp32([half])[0].dtype == torch.float32
    assert batches.convert_outputs_to_fp32(lambda: {"x": half})()["x"].dtype == torch.float32
    assert batches.listify({"x": half}) == {"x": [1.0, 1.0]}
    assert batches.slice_tensors([torch.arange(4)], slice(1, 3))[0].tolist() == [1, 2]
    assert batches.find_device(["text", torch.ones(1, device="meta")]) == torch.device("meta")
    assert batches.find_device(["text"]) is None
    assert batches.is_namedtuple(Pair(1, 2))
    assert not batches.is_namedtuple((1, 2))
    assert batches.honor_type(Pair(1, 2), iter([3, 4])) == Pair(3, 4)
    assert batches.is_torch_tensor(half)


def test_batch_size_of_any_object_equals_accelerates():
    for data in ({"x": torch.ones(3, 2)}, [], "text", [torch.ones(2)]):
        assert batches.ignorant_find_batch_size(data) == their_operations.ignorant_find_batch_size(data)
