"""Convert Python values of state dicts to JSON and named tensors, and back, without pickle.

JSON's own types are stored unchanged. A value of any other type becomes a JSON object in which the reserved key `!` has
the name of the type. Tensors are stored separately and referenced by name. A save refuses a value that a load would not
restore identically, including its type, with an error that contains the path of the value. To check this, each encoded
value is decoded again.

NumPy arrays and scalars are stored as bytes, with a JSON description of their dtype.
"""

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy
import torch

from headway.common.untrusted import PARSE_ERRORS
from headway.core.checkpoint.format.arrays import build_array, build_dtype, describe_dtype, read_values
from headway.core.checkpoint.format.tensors import (
    explain_refusal,
    get_saved_stride,
    is_dense,
    join_from_dense,
    set_stride,
    split_into_dense,
)
from headway.core.checkpoint.format.text import decode_base64, encode_base64, is_plain, to_logical_name
from headway.core.weights.pieces import ShardPiece, get_local_part, is_dtensor
from headway.core.weights.shards import find_dtype, get_dtype_name, get_raw_bytes
from headway.errors import CheckpointError

TAG = "!"
"""Reserved key of a JSON object that represents a value of a type that JSON lacks.

Its value is the name of that type.
"""
_MAX_DEPTH = 200
_MAX_INT = 1 << 63
"""Upper bound of integers that are stored as JSON numbers. Some JSON parsers round larger ones, so they are tagged."""
_JSON_SCALARS = {type(None), bool, int, float, str}


def encode_value(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """Return a value as JSON, and add its tensors to `tensors`.

    Args:
        value: Value to encode.
        name: Path of the value. It is used in messages and as the prefix of the tensors' names.
        tensors: Dict to which the value's tensors are added, by logical name.
        depth: Nesting depth of the value. Default: 0.

    Raises:
        CheckpointError: If the value contains an object that only pickle could store, or that a load would not restore
            identically.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{name} is nested more than {_MAX_DEPTH} deep, or contains itself")
    kind = type(value)
    if kind in _JSON_SCALARS:
        return _encode_scalar(value)
    if kind is list:
        return _encode_items(value, name, tensors, depth)
    if kind is dict and is_object(value):
        if is_json(value.values()):
            return dict(value)
        return {key: encode_value(item, f"{name}.{key}", tensors, depth + 1) for key, item in value.items()}
    if isinstance(value, torch.Tensor | ShardPiece):
        return _encode_tensor(value, name, tensors, depth)
    if kind is numpy.ndarray and not value.dtype.hasobject:
        return _encode_array(value, name, tensors, depth)
    packed = _encode_leaf(value, name, tensors, depth)
    if packed is not None:
        _check_restored(value, packed, name)
        return packed
    for tag, container in _CONTAINERS.items():
        if kind is container:
            return _encode_container(tag, value, name, tensors, depth)
    raise CheckpointError(f"{name} is a {kind.__module__}.{kind.__qualname__}, {_explain_refusal(value)}")


def _encode_scalar(value: bool | int | float | str | None) -> Any:
    """Return a scalar as JSON. Values that some JSON parsers cannot represent become objects with a type tag."""
    if type(value) is int and not -_MAX_INT <= value < _MAX_INT:
        return {TAG: "int", "value": hex(value)}
    if type(value) is str and not is_plain(value):
        return {TAG: "text", "value": encode_base64(value)}
    if type(value) is float and not math.isfinite(value):
        return {TAG: "float", "value": repr(value)}
    return value


def is_json(items: Collection[Any]) -> bool:
    """Whether all items are scalars that every JSON parser restores unchanged.

    All items are checked in one call, because lists of numbers can be long. Python's RNG state has 625 of them.
    """
    kinds = set(map(type, items))
    if not kinds <= _JSON_SCALARS:
        return False
    integers = [item for item in items if type(item) is int] if int in kinds else ()
    return (
        (not integers or (min(integers) >= -_MAX_INT and max(integers) < _MAX_INT))
        and (float not in kinds or all(map(math.isfinite, [item for item in items if type(item) is float])))
        and (str not in kinds or is_plain("".join([item for item in items if type(item) is str])))
    )


def _encode_items(items: Collection[Any], name: str, tensors: dict[str, torch.Tensor], depth: int) -> list[Any]:
    if is_json(items):
        return list(items)
    return [encode_value(item, f"{name}.{i}", tensors, depth + 1) for i, item in enumerate(items)]


def _encode_leaf(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    """Return a JSON object with a type tag for a value of a type that JSON lacks, such as bytes or a NumPy scalar.

    Return None if the type is not one of the supported leaf types. The arguments are those of `encode_value`.

    Raises:
        CheckpointError: If the dtype of a NumPy scalar cannot be rebuilt from a description.
    """
    kind = type(value)
    for tag, owner, pack, _ in _PACKED:
        if kind is owner:
            return {TAG: tag, "value": encode_value(pack(value), name, tensors, depth + 1)}
    if isinstance(value, numpy.generic) and not value.dtype.hasobject:
        dtype = encode_value(_describe_dtype(value.dtype, name), name, tensors, depth + 1)
        return {TAG: "scalar", "dtype": dtype, "value": base64.b64encode(value.tobytes()).decode()}
    return None


def _encode_tensor(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    """Return a JSON reference to a tensor, and add the tensor to `tensors`. A sparse or quantized one is split first.

    The arguments are those of `encode_value`.

    Raises:
        CheckpointError: If a checkpoint cannot hold the tensor.
    """
    kind, problem = type(value), explain_refusal(get_local_part(value))
    if problem is not None:
        raise CheckpointError(f"{name} is {problem}")
    if isinstance(value, ShardPiece):
        return {TAG: "tensor", "name": _add_tensor(value, name, tensors)}
    if kind not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(value):
        raise CheckpointError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which would be restored as a plain tensor: let state_dict() "
            "return it.as_subclass(torch.Tensor), and make it again in load_state_dict()"
        )
    flags: dict[str, Any] = {"is_parameter": True} if isinstance(value, torch.nn.Parameter) else {}
    if value.requires_grad and value.is_leaf:
        flags["requires_grad"] = True
    plain = value.detach()
    if is_dense(plain):
        stride = get_saved_stride(plain)
        if stride is not None:
            flags["stride"] = stride
        return {TAG: "tensor", "name": _add_tensor(plain, name, tensors), **flags}
    about, parts = split_into_dense(plain)
    packed = [_encode_tensor(part, f"{name}.{i}", tensors, depth) for i, part in enumerate(parts)]
    return {TAG: "parts", "about": encode_value(about, name, tensors, depth + 1), "parts": packed, **flags}


def _encode_array(value: numpy.ndarray[Any, Any], name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    dtype = encode_value(_describe_dtype(value.dtype, name), name, tensors, depth + 1)
    raw = (
        torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        if value.nbytes
        else torch.empty(0, dtype=torch.uint8)
    )
    is_by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
    order = {"order": "F"} if is_by_columns else {}  # NumPy's own files keep C and Fortran order too
    return {TAG: "array", "name": _add_tensor(raw, name, tensors), "dtype": dtype, "shape": list(value.shape), **order}


def _encode_container(tag: str, value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if isinstance(value, defaultdict) and value.default_factory is not None:
        raise CheckpointError(
            f"{name} is a defaultdict with a factory, which cannot be saved; let state_dict() return dict(it)"
        )
    keys = value if isinstance(value, dict | set | frozenset) else ()
    if any(isinstance(key, torch.Tensor) for key in keys):
        raise CheckpointError(
            f"{name} has a tensor as a key. Keys that are tensors are compared by identity, so a loaded one would never be found. "
            "Use a number or text as the key"
        )
    items: list[Any] = [list(pair) for pair in value.items()] if isinstance(value, dict) else list(value)
    encoded = _encode_items(items, name, tensors, depth)
    if isinstance(value, set | frozenset):  # the iteration order can differ between ranks, but the result must not
        encoded.sort(key=json.dumps)
    limit = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
    return {TAG: tag, "items": encoded, **limit}


def _add_tensor(tensor: Any, name: str, tensors: dict[str, torch.Tensor]) -> str:
    name = to_logical_name(name)
    while name in tensors:
        name += "_"
    tensors[name] = tensor
    return name


def decode_value(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `encode_value` has encoded.

    Args:
        value: JSON value. It is untrusted.
        tensors: Saved tensors by name. The result can contain these tensors themselves.

    Raises:
        CheckpointError: If the JSON value cannot be decoded, or refers to a tensor that `tensors` lacks.
    """
    try:
        return _decode_value(value, tensors, 0)
    except CheckpointError:
        raise
    except (*PARSE_ERRORS, RuntimeError) as error:
        raise CheckpointError(f"a value in the manifest cannot be read: {type(error).__name__}: {error}") from error


def find_references(value: Any) -> list[dict[str, Any]]:
    """Return all references to tensors in a saved value, which are JSON objects with a type tag and a tensor name.

    If several references name one tensor, all of them are returned.

    The search does not use recursion, because an untrusted value might be nested too deep for it.

    Args:
        value: JSON value that `encode_value` returned.
    """
    references: list[dict[str, Any]] = []
    unvisited = [value]
    while unvisited:
        item = unvisited.pop()
        if isinstance(item, dict):
            if TAG in item and isinstance(item.get("name"), str):
                references.append(item)
            unvisited += item.values()
        elif isinstance(item, list):
            unvisited += item
    return references


def set_saved_strides(value: Any, tensors: dict[str, Any]) -> None:
    """Apply saved strides to the tensors that a saved value names, so that `decode_value` later makes no copies.

    Args:
        value: JSON value that `encode_value` returned.
        tensors: Tensors by name. Those with a saved stride are replaced.

    Raises:
        CheckpointError: If a stride does not fit its tensor.
    """
    for reference in find_references(value):
        name = reference["name"]
        if reference[TAG] == "tensor" and isinstance(reference.get("stride"), list) and name in tensors:
            tensors[name] = set_stride(tensors[name], reference["stride"])


def is_object(value: Mapping[Any, Any]) -> bool:
    """Whether a dict can be stored as a JSON object unchanged.

    Its keys must be strings without lone surrogates, and must not include the reserved key `TAG`.
    """
    return TAG not in value and set(map(type, value)) <= {str} and is_plain("".join(value))


def _describe_dtype(dtype: numpy.dtype[Any], name: str) -> Any:
    try:
        return describe_dtype(dtype)
    except (CheckpointError, TypeError, ValueError, LookupError) as error:
        raise CheckpointError(f"{name} is a value of NumPy's, {error}") from error


def _explain_refusal(value: Any) -> str:
    if isinstance(value, numpy.ndarray):
        return "which would be restored as a plain array, if at all: let state_dict() return plain arrays of numbers or text"
    allowed = "numbers, text, bytes, paths, tensors, arrays, and lists, tuples, dicts, sets and deques of them"
    return (
        f"which a checkpoint cannot hold without pickle. Allowed: {allowed}. Let state_dict() "
        "return those, and build the object from them in load_state_dict()"
    )


def _check_restored(value: Any, packed: Any, name: str) -> None:
    """Raise `CheckpointError` if decoding an encoded value does not return a value identical to the original.

    Args:
        value: Original value.
        packed: Encoded value.
        name: Path of the value, for messages.
    """
    try:
        back = decode_value(packed, {})
    except CheckpointError as error:
        back, reason = None, f": {error}"
    else:
        reason = f" but as {back!r}"
    is_alike = type(back) is type(value) and (
        (back.dtype == value.dtype and read_values(back) == read_values(value))
        if isinstance(value, numpy.generic)
        else bool(back == value or back != back)
    )
    if not is_alike:
        raise CheckpointError(f"{name} is {value!r}, which could not be restored as it is{reason}")


def _unpacked_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_PACKED: list[tuple[str, type, Callable[[Any], Any], Callable[[Any], Any]]] = [
    ("bytes", bytes, lambda v: base64.b64encode(v).decode(), _unpacked_bytes),
    ("bytearray", bytearray, lambda v: base64.b64encode(v).decode(), lambda v: bytearray(_unpacked_bytes(v))),
    ("complex", complex, lambda v: [repr(v.real), repr(v.imag)], lambda v: complex(float(v[0]), float(v[1]))),
    ("torch.dtype", torch.dtype, get_dtype_name, find_dtype),
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
"""Leaf types that JSON lacks, as tuples of (name of the type, type, function that encodes, function that decodes)."""
_UNPACKED: dict[str, Callable[[Any], Any]] = {tag: unpack for tag, _, _, unpack in _PACKED} | {
    "int": lambda v: int(v, 16),
    "text": decode_base64,
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


def _decode_value(value: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    """Return the value of a JSON value that `encode_value` has written.

    Args:
        value: JSON value. It is untrusted.
        tensors: Saved tensors by name.
        depth: Nesting depth of the value.
    """
    if depth > 2 * _MAX_DEPTH + 2:
        raise CheckpointError("a value in the manifest is nested too deep")
    if isinstance(value, list):
        # Scalars stay as they are. Lists of numbers can be long.
        return [_decode_value(item, tensors, depth + 1) if isinstance(item, dict | list) else item for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {
            key: _decode_value(item, tensors, depth + 1) if isinstance(item, dict | list) else item
            for key, item in value.items()
        }
    tag = value[TAG]
    if tag in ("tensor", "parts"):
        return _decode_tensor(value, tensors, depth)
    if tag in ("array", "scalar"):
        return _decode_array(value, tensors, depth)
    if tag in _UNPACKED:
        return _UNPACKED[tag](_decode_value(value["value"], tensors, depth + 1))
    if tag in _CONTAINERS:
        items = [
            _decode_value(item, tensors, depth + 1) if isinstance(item, dict | list) else item
            for item in value["items"]
        ]
        if tag == "deque":
            return deque(items, value["maxlen"])
        if issubclass(_CONTAINERS[tag], dict):
            pairs = [(key, item) for key, item in items]
            return defaultdict(None, pairs) if tag == "defaultdict" else _CONTAINERS[tag](dict(pairs))
        return _CONTAINERS[tag](items)
    raise CheckpointError(f"a value in the manifest is of the unknown type {tag!r}")


def _find_tensor(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors.get(value["name"])
    if tensor is None:
        raise CheckpointError(f"the manifest names a tensor {value['name']!r} that the checkpoint lacks")
    return tensor


def _decode_tensor(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> torch.Tensor:
    if value[TAG] == "tensor":
        tensor = _find_tensor(value, tensors)
        if "stride" in value:
            tensor = set_stride(tensor, value["stride"])
    else:
        about = _decode_value(value["about"], tensors, depth + 1)
        tensor = join_from_dense(about, [_decode_tensor(part, tensors, depth) for part in value["parts"]])
    needs_grad = bool(value.get("requires_grad"))
    if value.get("is_parameter"):
        return torch.nn.Parameter(tensor, needs_grad)
    return tensor.detach().requires_grad_() if needs_grad else tensor


def _decode_array(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    dtype = build_dtype(_decode_value(value["dtype"], tensors, depth + 1))
    if value[TAG] == "scalar":
        return build_array(dtype, (), base64.b64decode(value["value"], validate=True))[()]
    raw = get_raw_bytes(_find_tensor(value, tensors)).numpy().tobytes()
    array = build_array(dtype, _decode_value(value["shape"], tensors, depth + 1), raw)
    return numpy.asfortranarray(array) if value.get("order") == "F" else array


def map_items(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of a dict, list, tuple or deque with `function` applied to each item, in a dict to each value.

    Sets and bytearrays are copied without calling `function`. All other values are returned unchanged. Among them are
    named tuples and other subclasses of list and tuple.
    """
    if isinstance(value, dict):
        copy = value.copy()
        for key, item in value.items():
            copy[key] = function(item)
        return copy
    if type(value) in (list, tuple):
        return type(value)([function(item) for item in value])
    if isinstance(value, deque):
        return deque((function(item) for item in value), value.maxlen)
    return value.copy() if isinstance(value, set | bytearray) else value
