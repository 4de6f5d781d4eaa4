"""Python values as JSON and named tensors, and back: what state dicts hold, without pickle.

JSON's own values stand for themselves; every other type is an object with the one reserved key `!`, its type. Tensors
are taken out and stand as their names. What would not come back as it is, type included, is refused when it is saved, with
its path: each value that is packed is unpacked again to see.

NumPy's arrays and scalars as bytes with a description of their dtype that JSON holds, and back.
"""

import base64
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy
import torch

from headway.checkpoint.format.tensors import is_dense, put_together, refusal, take_apart
from headway.common.untrusted import UNREADABLE
from headway.errors import CheckpointError
from headway.weights.pieces import ShardPiece, held, is_dtensor
from headway.weights.shards import dtype_name, raw_bytes


def describe(dtype: numpy.dtype[Any]) -> Any:
    """A dtype as NumPy's own files have it: text, or a list of fields.

    Raises:
        CheckpointError: it cannot be made again from a description.
    """
    described = numpy.lib.format.dtype_to_descr(dtype)
    # Of two C types of one size (long and long long) the common text means one.
    if isinstance(described, str) and build(described).type is not dtype.type:
        described = dtype.byteorder + dtype.char
    if dtype.hasobject or build(described) != dtype:
        raise CheckpointError(f"of the dtype {dtype!r}, which cannot be made again from a description")
    return described


def build(described: Any) -> numpy.dtype[Any]:
    """The dtype of a description.

    Raises:
        CheckpointError, LookupError, TypeError, ValueError: it describes none, or one of Python objects.
    """
    dtype: numpy.dtype[Any] = numpy.lib.format.descr_to_dtype(described)
    if dtype.hasobject:
        raise CheckpointError(f"an array of dtype {described!r} holds Python objects, which a checkpoint cannot")
    return dtype


def contents(value: Any) -> Any:
    """The bytes of an array or scalar by field, without what lies between the fields."""
    return [contents(value[name]) for name in value.dtype.names] if value.dtype.names is not None else value.tobytes()


def fill(dtype: numpy.dtype[Any], shape: Any, raw: bytes) -> numpy.ndarray[Any, Any]:
    """The array of these bytes, in C order.

    Raises:
        CheckpointError, TypeError: there are more or fewer of them.
    """
    made: numpy.ndarray[Any, Any] = numpy.ndarray(tuple(shape), dtype, bytearray(raw) or bytearray(dtype.itemsize))
    if made.nbytes != len(raw):
        raise CheckpointError(f"the manifest has {len(raw)} bytes for an array of {made.nbytes}")
    copy: numpy.ndarray[Any, Any] = made.copy()
    return copy


TAG = "!"
_MAX_DEPTH = 200
_MAX_INT = 1 << 63
# Lone surrogates: other readers of JSON refuse them, and two of them come back as one character.
_SURROGATE = re.compile("[\ud800-\udfff]")
_ODD = re.compile(r"[\ud800-\udfff\x00]|\\(?=u[0-9a-f]{4})")


def is_plain(text: str) -> bool:
    """Does JSON hold it?"""
    return _SURROGATE.search(text) is None


def to_base64(text: str) -> str:
    """Any text as ASCII."""
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def from_base64(text: str) -> str:
    """The text that `to_base64` was given.

    Raises:
        ValueError: it is not what that wrote.
    """
    return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")


def logical(name: str) -> str:
    r"""A name under which a tensor is kept: itself, but for lone surrogates and NUL, which are written as \\uXXXX.

    Names that differ stay different: a backslash that could be taken for such an escape is written as one.
    """
    return _ODD.sub(lambda found: f"\\u{ord(found[0]):04x}", name)


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """`value` as JSON; its tensors are put into `tensors` under names that begin with `name`.

    Raises:
        CheckpointError: something in it can only be pickled, or would come back as something else.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{name} is nested more than {_MAX_DEPTH} deep, or contains itself")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return _simple(value)
    if kind is list:
        return [encode(item, f"{name}.{i}", tensors, depth + 1) for i, item in enumerate(value)]
    if kind is dict and is_object(value):
        return {key: encode(item, f"{name}.{key}", tensors, depth + 1) for key, item in value.items()}
    if isinstance(value, torch.Tensor | ShardPiece):
        return _encode_tensor(value, name, tensors, depth)
    if kind is numpy.ndarray and not value.dtype.hasobject:
        return _encode_array(value, name, tensors, depth)
    packed = _encode_leaf(value, name, tensors, depth)
    if packed is not None:
        _prove(value, packed, name)
        return packed
    for tag, container in _CONTAINERS.items():
        if kind is container:
            return _encode_container(tag, value, name, tensors, depth)
    raise CheckpointError(f"{name} is a {kind.__module__}.{kind.__qualname__}, {_refusal(value)}")


def _encode_leaf(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    """A leaf of another type than JSON's; None: it is none that is known."""
    kind = type(value)
    for tag, owner, pack, _ in _PACKED:
        if kind is owner:
            return {TAG: tag, "value": encode(pack(value), name, tensors, depth + 1)}
    if isinstance(value, numpy.generic) and not value.dtype.hasobject:
        dtype = encode(_described(value.dtype, name), name, tensors, depth + 1)
        return {TAG: "scalar", "dtype": dtype, "value": base64.b64encode(value.tobytes()).decode()}
    return None


def _encode_tensor(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    kind, problem = type(value), refusal(held(value))
    if problem is not None:
        raise CheckpointError(f"{name} is {problem}")
    if isinstance(value, ShardPiece):
        return {TAG: "tensor", "name": _keep(value, name, tensors)}
    if kind not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(value):
        raise CheckpointError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which would come back as a plain tensor: let state_dict() "
            "return it.as_subclass(torch.Tensor), and make it again in load_state_dict()"
        )
    flags: dict[str, Any] = {"is_parameter": True} if isinstance(value, torch.nn.Parameter) else {}
    if value.requires_grad and value.is_leaf:
        flags["requires_grad"] = True
    plain = value.detach()
    if is_dense(plain):
        return {TAG: "tensor", "name": _keep(plain, name, tensors), **flags}
    about, parts = take_apart(plain)
    packed = [_encode_tensor(part, f"{name}.{i}", tensors, depth) for i, part in enumerate(parts)]
    return {TAG: "parts", "about": encode(about, name, tensors, depth + 1), "parts": packed, **flags}


def _encode_array(value: numpy.ndarray[Any, Any], name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    dtype = encode(_described(value.dtype, name), name, tensors, depth + 1)
    raw = (
        torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        if value.nbytes
        else torch.empty(0, dtype=torch.uint8)
    )
    return {TAG: "array", "name": _keep(raw, name, tensors), "dtype": dtype, "shape": list(value.shape)}


def _encode_container(tag: str, value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if isinstance(value, defaultdict) and value.default_factory is not None:
        raise CheckpointError(
            f"{name} is a defaultdict with a factory, which cannot be saved; let state_dict() return dict(it)"
        )
    keys = value if isinstance(value, dict | set | frozenset) else ()
    if any(isinstance(key, torch.Tensor) for key in keys):
        raise CheckpointError(f"{name} has a tensor as a key, which nobody finds again: a tensor is a key by its place")
    items: list[Any] = [list(pair) for pair in value.items()] if isinstance(value, dict) else list(value)
    encoded = [encode(item, f"{name}.{i}", tensors, depth + 1) for i, item in enumerate(items)]
    if isinstance(value, set | frozenset):  # alike on all ranks
        encoded.sort(key=json.dumps)
    limit = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
    return {TAG: tag, "items": encoded, **limit}


def _keep(tensor: Any, name: str, tensors: dict[str, torch.Tensor]) -> str:
    name = logical(name)
    while name in tensors:
        name += "_"
    tensors[name] = tensor
    return name


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `encode` was given.

    Raises:
        CheckpointError: this is nothing that `encode` wrote.
    """
    try:
        return _decode(value, tensors, 0)
    except CheckpointError:
        raise
    except (*UNREADABLE, RuntimeError) as error:
        raise CheckpointError(f"a value in the manifest cannot be read: {type(error).__name__}: {error}") from error


def _simple(value: bool | int | float | str | None) -> Any:
    """JSON's own values, but for those that JSON, or a reader of it, lacks."""
    if type(value) is int and not -_MAX_INT <= value < _MAX_INT:
        return {TAG: "int", "value": hex(value)}
    if type(value) is str and not is_plain(value):
        return {TAG: "text", "value": to_base64(value)}
    if type(value) is float and not math.isfinite(value):
        return {TAG: "float", "value": repr(value)}
    return value


def is_object(value: Mapping[Any, Any]) -> bool:
    """Can this dict be a JSON object as it is?"""
    return TAG not in value and all(type(key) is str and is_plain(key) for key in value)


def _described(dtype: numpy.dtype[Any], name: str) -> Any:
    try:
        return describe(dtype)
    except (CheckpointError, TypeError, ValueError, LookupError) as error:
        raise CheckpointError(f"{name} is a value of NumPy's, {error}") from error


def _refusal(value: Any) -> str:
    if isinstance(value, numpy.ndarray):
        return (
            "which would come back as a plain array, if at all: let state_dict() return plain arrays of numbers or text"
        )
    allowed = "numbers, text, bytes, paths, tensors, arrays, and lists, tuples, dicts, sets and deques of them"
    return (
        f"which a checkpoint cannot hold without pickle. Allowed: {allowed}. Let state_dict() "
        "return those, and build the object from them in load_state_dict()"
    )


def _prove(value: Any, packed: Any, name: str) -> None:
    """Refuse a value that does not come back as it is."""
    try:
        back = decode(packed, {})
    except CheckpointError as error:
        back, reason = None, f": {error}"
    else:
        reason = f" but as {back!r}"
    is_alike = type(back) is type(value) and (
        (back.dtype == value.dtype and contents(back) == contents(value))
        if isinstance(value, numpy.generic)
        else bool(back == value or back != back)
    )
    if not is_alike:
        raise CheckpointError(f"{name} is {value!r}, which would not come back as it is{reason}")


def _unpacked_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def dtype_named(name: Any) -> torch.dtype:
    """torch's dtype of that name.

    Raises:
        CheckpointError: torch has none.
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return found


_PACKED: list[tuple[str, type, Callable[[Any], Any], Callable[[Any], Any]]] = [
    ("bytes", bytes, lambda v: base64.b64encode(v).decode(), _unpacked_bytes),
    ("bytearray", bytearray, lambda v: base64.b64encode(v).decode(), lambda v: bytearray(_unpacked_bytes(v))),
    ("complex", complex, lambda v: [repr(v.real), repr(v.imag)], lambda v: complex(float(v[0]), float(v[1]))),
    ("torch.dtype", torch.dtype, dtype_name, dtype_named),
    ("torch.device", torch.device, str, torch.device),
    ("torch.Size", torch.Size, list, torch.Size),
    ("range", range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    ("numpy.str", numpy.str_, lambda v: str.__add__(v, ""), numpy.str_),
    (
        "numpy.bytes",
        numpy.bytes_,
        lambda v: base64.b64encode(bytes.__add__(v, b"")).decode(),
        lambda v: numpy.bytes_(_unpacked_bytes(v)),
    ),
    ("Path", PosixPath, str, Path),
    ("Path", WindowsPath, str, Path),
    ("PurePosixPath", PurePosixPath, str, PurePosixPath),
    ("PureWindowsPath", PureWindowsPath, str, PureWindowsPath),
]
"""Leaves of other types than JSON's: tag, type, to JSON and back."""
_UNPACKED: dict[str, Callable[[Any], Any]] = {tag: unpack for tag, _, _, unpack in _PACKED} | {
    "int": lambda v: int(v, 16),
    "text": from_base64,
    "float": lambda v: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[v],
}
_CONTAINERS: dict[str, type] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
}


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH + 2:
        raise CheckpointError("a value in the manifest is nested too deep")
    if isinstance(value, list):
        return [_decode(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensors, depth + 1) for key, item in value.items()}
    tag = value[TAG]
    if tag in ("tensor", "parts"):
        return _decode_tensor(value, tensors, depth)
    if tag in ("array", "scalar"):
        return _decode_array(value, tensors, depth)
    if tag in _UNPACKED:
        return _UNPACKED[tag](_decode(value["value"], tensors, depth + 1))
    if tag in _CONTAINERS:
        items = [_decode(item, tensors, depth + 1) for item in value["items"]]
        if tag == "deque":
            return deque(items, value["maxlen"])
        if issubclass(_CONTAINERS[tag], dict):
            pairs = [(key, item) for key, item in items]
            return defaultdict(None, pairs) if tag == "defaultdict" else _CONTAINERS[tag](dict(pairs))
        return _CONTAINERS[tag](items)
    raise CheckpointError(f"a value in the manifest is of the unknown type {tag!r}")


def _named(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors.get(value["name"])
    if tensor is None:
        raise CheckpointError(f"the manifest names a tensor {value['name']!r} that the checkpoint lacks")
    return tensor


def _decode_tensor(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> torch.Tensor:
    if value[TAG] == "tensor":
        tensor = _named(value, tensors)
    else:
        about = _decode(value["about"], tensors, depth + 1)
        tensor = put_together(about, [_decode_tensor(part, tensors, depth) for part in value["parts"]])
    needs_grad = bool(value.get("requires_grad"))
    if value.get("is_parameter"):
        return torch.nn.Parameter(tensor, needs_grad)
    return tensor.detach().requires_grad_() if needs_grad else tensor


def _decode_array(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    dtype = build(_decode(value["dtype"], tensors, depth + 1))
    if value[TAG] == "scalar":
        return fill(dtype, (), base64.b64decode(value["value"], validate=True))[()]
    raw = raw_bytes(_named(value, tensors)).numpy().tobytes()
    return fill(dtype, _decode(value["shape"], tensors, depth + 1), raw)


def map_items(function: Callable[[Any], Any], value: Any) -> Any:
    """A container of the same type with what the function gives for its items; anything else as it is, or a copy."""
    if isinstance(value, dict):
        made = value.copy()
        for key, item in value.items():
            made[key] = function(item)
        return made
    if type(value) in (list, tuple):
        return type(value)([function(item) for item in value])
    if isinstance(value, deque):
        return deque((function(item) for item in value), value.maxlen)
    return value.copy() if isinstance(value, set | bytearray) else value
