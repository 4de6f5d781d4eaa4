"""Property test: all values that a state dict may hold survive the bytes of a checkpoint with their type; others are refused."""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PureWindowsPath

import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis.extra import numpy as npst

from headway.core.checkpoint.format.arrays import read_values
from headway.core.checkpoint.format.entries import ITEM_BYTES
from headway.core.checkpoint.format.manifest import Manifest
from headway.core.checkpoint.format.tensors import write_shards
from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.format.values import decode_value, encode_value
from headway.core.weights.tensor_bytes import find_dtype, get_raw_bytes, view_as_bits
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.amount import EXAMPLES
from tests.unit.core.checkpoint.reading import read_shard

SIMPLE = [find_dtype(name) for name in ITEM_BYTES]


def write_and_read(value, folder):
    """Encode a value, write and read the manifest and the file of tensors, and return the decoded value."""
    tensors = {}
    encoded = encode_value(value, "custom/0", tensors)
    path = folder / "custom-00000.safetensors"
    write_shards(folder, {path.name: list(tensors.items())})
    manifest = Manifest.decode(Manifest({}, {}, {}, {"custom": encoded}, {}).encode())
    read = read_shard(path, [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    return decode_value(manifest.state["custom"], read)


def assert_same(one, other):
    """Raise `AssertionError` unless the objects are equal in type, value, dtype and flags at all levels."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.shape, one.dtype, one.layout, one.requires_grad) == (
            other.shape, other.dtype, other.layout, other.requires_grad)  # fmt: skip
        if one.layout is torch.strided and not one.is_quantized:
            assert torch.equal(get_raw_bytes(one), get_raw_bytes(other))
        else:
            same = one.dequantize() if one.is_quantized else one.to_dense(), (
                other.dequantize() if other.is_quantized else other.to_dense())  # fmt: skip
            assert torch.equal(*same)
    elif isinstance(one, numpy.ndarray | numpy.generic):
        assert (one.dtype, one.dtype.type, one.shape) == (other.dtype, other.dtype.type, other.shape)
        assert one.dtype.fields == other.dtype.fields
        assert read_values(one) == read_values(other)
    elif isinstance(one, dict):
        assert len(one) == len(other)
        for (key, value), (other_key, other_value) in zip(one.items(), other.items()):
            assert_same(key, other_key)
            assert_same(value, other_value)
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other)
        for item, other_item in zip(one, other):
            assert_same(item, other_item)
        assert getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
    elif isinstance(one, float | complex):
        assert repr(one) == repr(other)
    else:
        assert one == other


any_text = st.text(st.characters(exclude_categories=()), max_size=4)  # includes lone surrogates and NUL
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 200), 1 << 200), st.floats(), any_text, st.binary(max_size=4),
    st.complex_numbers(), any_text.filter(lambda text: "\0" not in text).map(Path), any_text.map(numpy.str_),
    any_text.map(PureWindowsPath), st.binary(max_size=3).map(numpy.bytes_), st.sampled_from(SIMPLE),
    st.just(torch.device("cuda:1")), st.builds(range, st.integers(), st.integers(), st.just(3)),
    st.integers(0, 99).map(numpy.int64), st.integers(0, 99).map(numpy.longlong), st.floats(width=32).map(numpy.float32),
)  # fmt: skip
numbers = st.one_of(
    npst.scalar_dtypes(), npst.unicode_string_dtypes(max_len=3), npst.byte_string_dtypes(max_len=3), npst.array_dtypes(max_size=3),
    npst.nested_dtypes(max_itemsize=64), st.just(numpy.dtype([("a", "i1"), ("b", "f8")], align=True)), st.just(numpy.dtype("q")),
    st.just(numpy.dtype({"names": ["x"], "formats": ["<i4"], "offsets": [4], "itemsize": 16})),
)  # fmt: skip


@st.composite
def arrays(draw):
    dtype = draw(numbers)
    shape = draw(npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    raw = draw(st.binary(min_size=1, max_size=8))
    count = dtype.itemsize * math.prod(shape)
    made = numpy.ndarray(shape, dtype, bytearray((raw * (count + 1))[: max(count, dtype.itemsize, 1)]))
    return made.copy(draw(st.sampled_from("CF")))


@st.composite
def tensors(draw):
    dtype, shape = draw(st.sampled_from(SIMPLE)), draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 1 << 16))
    raw = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8,
                        generator=torch.Generator().manual_seed(seed))  # fmt: skip
    made = raw.view(dtype).reshape(shape)
    form = draw(st.sampled_from(["plain", "transposed", "expanded", "strided", "parameter", "grad", "sparse", "csr"]))
    if form == "transposed" and len(shape) > 1:
        return made.transpose(0, 1)
    if form == "expanded":
        return made.expand(2, *shape)
    if form == "strided" and made.numel():
        wide = view_as_bits(made).reshape(-1).repeat_interleave(3).view(dtype)
        return wide[::3] if draw(st.booleans()) else wide[1:2].as_strided((1,), (3,))
    if dtype in (torch.float32, torch.bfloat16, torch.complex64):
        if form == "parameter":
            return torch.nn.Parameter(made, draw(st.booleans()))
        if form == "grad":
            return made.clone().requires_grad_()
        if form == "sparse" and len(shape):
            return made.to_sparse()
        if form == "csr" and len(shape) == 2 and dtype is not torch.bfloat16:
            return made.to_sparse_csr()
    return made


plain_keys = st.recursive(
    st.one_of(any_text, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.binary(max_size=3), st.just("!")),
    lambda inner: st.tuples(inner, inner), max_leaves=3,
)  # fmt: skip
trees = st.recursive(
    st.one_of(scalars, arrays(), tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(plain_keys, inner, max_size=3),
        st.dictionaries(any_text, inner, max_size=3), st.dictionaries(plain_keys, inner, max_size=2).map(OrderedDict),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 5)),
        st.dictionaries(any_text, inner, max_size=2).map(lambda items: defaultdict(None, items)),
    ),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(trees)
@example({"\ud800": 1, "\ud800\udc00": "\ud800\udc00", "\0": Path("\udcff")})
@example(10**5000)
@example(numpy.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]))
def test_values_survive_the_bytes_of_a_checkpoint(tmp_path_factory, value):
    assert_same(write_and_read(value, tmp_path_factory.mktemp("there")), value)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(st.sets(plain_keys, max_size=4))
def test_sets_round_trip(value):
    encoded = encode_value(value, "x", {})
    assert decode_value(encoded, {}) == value
    backwards = set()
    for item in list(value)[::-1]:
        backwards.add(item)
    assert encode_value(backwards, "x", {}) == encoded  # equal on all ranks, whatever the order of the set


@pytest.mark.parametrize("dtype", SIMPLE, ids=str)
def test_tensors_of_every_dtype_and_stride_round_trip(dtype, tmp_path):
    raw = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) % 2
    whole = raw.view(dtype).reshape(3, 4)
    apart = whole[1, 2:3].as_strided((1,), (7,))
    for value in (whole, whole.t(), whole[::2, 1:3], whole[0, 0], whole[1:1], whole[:1].expand(5, 4), apart):
        assert_same(write_and_read({"x": value}, tmp_path)["x"], value)


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_round_trip(tmp_path):
    values = torch.randn(3, 4)
    each = torch.quantize_per_channel(values, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.quint8)
    value = [torch.quantize_per_tensor(values, 0.1, 3, torch.qint8), each]
    back = write_and_read(value, tmp_path)
    assert_same(back, value)
    assert (back[0].q_scale(), back[0].q_zero_point()) == (0.1, 3)
    assert torch.equal(back[1].q_per_channel_scales(), each.q_per_channel_scales())


class Flavoured(torch.Tensor):
    """Subclass of Tensor, which cannot be saved."""


class Label(str):
    """Subclass of str, which cannot be saved."""


REFUSED = {
    "meta": (lambda: torch.empty(2, device="meta"), "meta device"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested tensor"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "to_dense"),
    "unscaled": (lambda: torch.empty(2, dtype=torch.qint8), "no scale"),
    "subclass": (lambda: torch.ones(2).as_subclass(Flavoured), "plain tensor"),
    "lazy": (lambda: torch.nn.LazyLinear(2).weight, "lazy module"),
    "masked": (lambda: numpy.ma.masked_array([1, 2], [True, False]), "plain arrays"),
    "matrix": (lambda: numpy.asmatrix([[1]]), "plain arrays"),
    "objects": (lambda: numpy.array([None]), "plain arrays"),
    "tensor key": (lambda: {torch.ones(1): 1}, "a tensor as a key"),
    "str of a class": (lambda: Label("x"), "Label"),
    "path of a class": (lambda: type("Mine", (type(Path()),), {})("x"), "Mine"),
    "factory": (lambda: defaultdict(list), "defaultdict"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_value_that_would_not_round_trip_is_refused_with_its_path(kind):
    make, match = REFUSED[kind]
    with pytest.raises(CheckpointError, match=rf"^state\.a\.1 .*{match}"):
        encode_value({"a": [0, make()]}, "state", {})


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(any_text, any_text)
@example("\ud800", "\\ud800")
@example("\\\ud800", "\\\\ud800")
def test_different_names_stay_different(one, other):
    assert (to_logical_name(one) == to_logical_name(other)) == (one == other)
    assert to_logical_name(one).encode().decode() == to_logical_name(one)
    assert "\0" not in to_logical_name(one)


def test_counters_keep_their_order():
    assert_same(decode_value(encode_value(Counter("aab"), "x", {}), {}), Counter("aab"))
