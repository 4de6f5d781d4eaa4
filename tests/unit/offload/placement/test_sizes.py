"""Test sizes: bytes by dtype, tied tensors once, and agreement with Accelerate where that is correct."""

import pytest
import torch
from torch import nn

from headway import (
    calculate_maximum_sizes,
    compute_module_sizes,
    dtype_byte_size,
    find_tied_parameters,
    get_max_layer_size,
    named_module_tensors,
)
from headway.errors import ConfigError
from headway.offload.placement.sizes import CustomDtype, count_tensor_bytes, get_stored_dtype
from tests.unit.offload.placement.models import MODELS, Chain, build_model

peer = pytest.importorskip("accelerate.utils.modeling")


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4), (torch.bool, 1), (torch.float8_e4m3fn, 1), (torch.complex64, 8), (torch.bfloat16, 2),
        ("float16", 2), ("torch.int8", 1), ("int4", 0.5), (CustomDtype.INT2, 0.25), ("fp8", 1), (torch.uint4, 0.5),
    ],
)  # fmt: skip
def test_bytes_of_an_element(dtype, size):
    assert dtype_byte_size(dtype) == size


@pytest.mark.parametrize("dtype", ["float17", "nn", ""])
def test_unknown_dtype_is_refused(dtype):
    with pytest.raises(ConfigError, match="not a dtype; give one of torch's"):
        dtype_byte_size(dtype)


def test_only_floating_point_tensors_are_stored_in_the_given_dtype():
    kinds = {torch.float32: torch.float16, torch.bfloat16: torch.float16, torch.int64: torch.int64,
             torch.bool: torch.bool, torch.float8_e4m3fn: torch.float8_e4m3fn, torch.complex64: torch.complex64}  # fmt: skip
    for own, stored in kinds.items():
        assert get_stored_dtype(torch.empty(1, dtype=own), torch.float16) == stored
        assert get_stored_dtype(torch.empty(1, dtype=own), None) == own
    assert count_tensor_bytes(torch.empty(3, device="meta"), "int4") == 2


@pytest.mark.parametrize("dtype", [None, "float16", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_real_models_equal_accelerates(name, dtype):
    with torch.device("meta"):
        model = build_model(name)
    theirs = peer.compute_module_sizes(model, dtype="float16" if dtype == "float16" else None)
    ours = compute_module_sizes(model, dtype=dtype)
    # Accelerate also converts tensors that no checkpoint contains.
    outside = compute_module_sizes(model, buffers_only=True)
    if dtype == "int4":
        assert ours[""] - outside[""] == -(-(theirs[""] - outside[""]) // 8)
        return
    for key in theirs.keys() | ours.keys():
        assert ours[key] - outside[key] == theirs[key] - (outside[key] // (2 if dtype else 1)), key
    assert peer.compute_module_sizes(model, buffers_only=True) == {k: v for k, v in outside.items() if v}
    assert sorted(map(sorted, find_tied_parameters(model))) == sorted(map(sorted, peer.find_tied_parameters(model)))
    if dtype is None:
        assert calculate_maximum_sizes(model) == peer.calculate_maximum_sizes(model)


def test_loading_in_a_wider_dtype_needs_more_memory():
    model = nn.Linear(4, 4, bias=False, dtype=torch.float16)
    assert compute_module_sizes(model, dtype=torch.float32)[""] == 64
    assert compute_module_sizes(model, dtype="int8", special_dtypes={"weight": torch.float64})[""] == 128


def test_tied_weights_count_once_under_their_first_name():
    model = Chain(1)
    sizes = compute_module_sizes(model)
    assert sizes["embedding"] == 100 * 16 * 4
    assert sizes["head"] == sizes["no such module"] == 0
    assert find_tied_parameters(model) == [["embedding.weight", "head.weight"]]


def test_tied_parameters_and_modules_used_twice_count_once():
    model = nn.Module()
    model.a = nn.Parameter(torch.ones(2))
    model.b = model.a
    model.one = nn.Linear(2, 2)
    model.two = model.one
    assert find_tied_parameters(model) == [["a", "b"], ["one.weight", "two.weight"], ["one.bias", "two.bias"]]
    assert compute_module_sizes(model)[""] == 4 * (2 + 4 + 2)


def test_named_tensors_equal_accelerates():
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.register_buffer("own", torch.ones(1), persistent=False)
    for options in ({}, {"recurse": True}, {"include_buffers": False, "recurse": True},
                    {"remove_non_persistent": True}, {"recurse": True, "remove_non_persistent": True}):  # fmt: skip
        ours = [name for name, _ in named_module_tensors(model, **options)]
        assert ours == [name for name, _ in peer.named_module_tensors(model, **options)]


def test_largest_layer_equals_accelerates():
    model = Chain(2)
    sizes = compute_module_sizes(model)
    parts = list(model.named_children())
    assert get_max_layer_size(parts, sizes, "Block") == peer.get_max_layer_size(parts, sizes, ["Block"])
    assert get_max_layer_size(parts, sizes, None) == (6400, ["embedding"])


def test_inner_tensors_of_quantized_tensors_are_counted():
    class QuantizedTensor(torch.Tensor):
        """Tensor that appears as float32, and holds int8 values and a scale."""

        @staticmethod
        def __new__(cls, values, scale):
            return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

        def __init__(self, values, scale):
            self.values, self.scale = values, scale

        def __tensor_flatten__(self):
            return ["values", "scale"], None

        @staticmethod
        def __tensor_unflatten__(inner, meta, size, stride):
            return QuantizedTensor(inner["values"], inner["scale"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                return cls(args[0].values, args[0].scale)
            raise NotImplementedError(func)

    weight = QuantizedTensor(torch.ones(10, dtype=torch.int8), torch.ones(1))
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    assert count_tensor_bytes(weight, torch.float16) == 14
    assert compute_module_sizes(module, dtype="float16")[""] == 14
