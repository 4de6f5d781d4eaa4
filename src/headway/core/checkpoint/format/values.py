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
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy
import torch

from headway.common.untrusted import PARSE_ERRORS
from headway.core.checkpoint.format.arrays import build_array, build_dtype, describe_dtype, read_values
from headway.core.checkpoint.format.codecs import CONTAINERS, DECODERS, LEAF_CODECS
from headway.core.checkpoint.format.dense import explain_refusal, is_dense, join_from_dense, split_into_dense
from headway.core.checkpoint.format.strides import get_saved_stride, set_stride
from headway.core.checkpoint.format.text import encode_base64, is_plain, to_logical_name
from headway.core.weights.pieces import ShardPiece, get_local_part, is_dtensor
from headway.core.weights.tensor_bytes import get_raw_bytes
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
    for tag, container in CONTAINERS.items():
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
    if int in kinds:
        integers = [item for item in items if type(item) is int]
        if min(integers) < -_MAX_INT or max(integers) >= _MAX_INT:
            return False
    if float in kinds and not all(map(math.isfinite, [item for item in items if type(item) is float])):
        return False
    return str not in kinds or is_plain("".join([item for item in items if type(item) is str]))


def _encode_items(items: Collection[Any], name: str, tensors: dict[str, torch.Tensor], depth: int) -> list[Any]:
    """Return the items of a sequence as a list of JSON values.

    Args:
        items: Items to encode.
        name: Path of the sequence. It is used in messages and as the prefix of the tensors' names.
        tensors: Dict to which the tensors of the items are added, by logical name.
        depth: Nesting depth of the sequence.

    Raises:
        CheckpointError: If an item cannot be saved.
    """
    if is_json(items):
        return list(items)
    return [encode_value(item, f"{name}.{i}", tensors, depth + 1) for i, item in enumerate(items)]


def _encode_leaf(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    """Return a JSON object with a type tag for a value of a type that JSON lacks, such as bytes or a NumPy scalar.

    Return None if the type is not one of the supported leaf types.

    Args:
        value: Value to encode.
        name: Path of the value, for messages.
        tensors: Dict of tensors by name. No leaf adds any.
        depth: Nesting depth of the value.

    Raises:
        CheckpointError: If the dtype of a NumPy scalar cannot be rebuilt from a description.
    """
    kind = type(value)
    for codec in LEAF_CODECS:
        if kind is codec.leaf_type:
            return {TAG: codec.tag, "value": encode_value(codec.encode(value), name, tensors, depth + 1)}
    if isinstance(value, numpy.generic) and not value.dtype.hasobject:
        dtype = encode_value(_describe_dtype(value.dtype, name), name, tensors, depth + 1)
        return {TAG: "scalar", "dtype": dtype, "value": base64.b64encode(value.tobytes()).decode()}
    return None


def _encode_tensor(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    """Return a JSON reference to a tensor, and add the tensor to `tensors`. A sparse or quantized one is split first.

    Args:
        value: Tensor or `ShardPiece`.
        name: Path of the tensor. It is used in messages, and determines the name under which the tensor is stored.
        tensors: Dict to which the tensor, or its parts, are added, by logical name.
        depth: Nesting depth of the tensor.

    Raises:
        CheckpointError: If a checkpoint cannot hold the tensor.
    """
    kind, problem = type(value), explain_refusal(get_local_part(value))
    if problem is not None:
        raise CheckpointError(f"{name} is {problem}")
    if isinstance(value, ShardPiece):
        return {TAG: "tensor", "name": _add_tensor(value, name, tensors)}
    # A load restores plain tensors, parameters and DTensors. It would lose any other subclass.
    if kind not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(value):
        raise CheckpointError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which would be restored as a plain tensor: let state_dict() "
            "return it.as_subclass(torch.Tensor), and rebuild it in load_state_dict()"
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
    """Return a JSON reference to an array, and add its bytes to `tensors` as a uint8 tensor.

    Args:
        value: Array whose elements are not Python objects.
        name: Path of the array. It is used in messages, and determines the name under which the bytes are stored.
        tensors: Dict to which the bytes are added, by logical name.
        depth: Nesting depth of the array.

    Raises:
        CheckpointError: If the dtype cannot be rebuilt from a description.
    """
    dtype = encode_value(_describe_dtype(value.dtype, name), name, tensors, depth + 1)
    if value.nbytes:
        raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
    else:  # `frombuffer` refuses empty memory
        raw = torch.empty(0, dtype=torch.uint8)
    is_by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
    order = {"order": "F"} if is_by_columns else {}  # NumPy's own files keep C and Fortran order too
    return {TAG: "array", "name": _add_tensor(raw, name, tensors), "dtype": dtype, "shape": list(value.shape), **order}


def _encode_container(tag: str, value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    """Return a JSON object with the items of a container, such as a tuple or a set.

    Args:
        tag: Key of the container's type in `CONTAINERS`.
        value: Container.
        name: Path of the container. It is used in messages and as the prefix of the tensors' names.
        tensors: Dict to which the tensors of the items are added, by logical name.
        depth: Nesting depth of the container.

    Raises:
        CheckpointError: If the container is a defaultdict with a factory, has a tensor as a key, or contains a value
            that cannot be saved.
    """
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
    """Add a tensor to `tensors` and return its name there: `name`, with underscores appended until it is unique."""
    unique_name = to_logical_name(name)
    while unique_name in tensors:
        unique_name += "_"
    tensors[unique_name] = tensor
    return unique_name


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
    """Return a NumPy dtype as a JSON-like value. Raise `CheckpointError` with the path `name` if that is impossible."""
    try:
        return describe_dtype(dtype)
    except (CheckpointError, TypeError, ValueError, LookupError) as error:
        raise CheckpointError(f"{name} is a value of NumPy's, {error}") from error


def _explain_refusal(value: Any) -> str:
    """Return the end of the error message for a value of a type that a checkpoint cannot hold."""
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
        restored = decode_value(packed, {})
    except CheckpointError as error:
        raise CheckpointError(f"{name} is {value!r}, which could not be restored as it is: {error}") from error
    if not _is_identical(restored, value):
        raise CheckpointError(f"{name} is {value!r}, which could not be restored as it is but as {restored!r}")


def _is_identical(restored: Any, value: Any) -> bool:
    """Whether a restored value has the type and the value of the original. NaN is identical to NaN."""
    if type(restored) is not type(value):
        return False
    if isinstance(value, numpy.generic):
        return bool(restored.dtype == value.dtype and read_values(restored) == read_values(value))
    return bool(restored == value or restored != restored)


def _decode_value(value: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    """Return the value of a JSON value that `encode_value` has written.

    Args:
        value: JSON value. It is untrusted.
        tensors: Saved tensors by name.
        depth: Nesting depth of the value.

    Raises:
        CheckpointError: If the value is nested too deep, has an unknown type tag, or names a tensor that does not exist.
            A value with a wrong structure can raise other errors, which `decode_value` converts.
    """
    if depth > 2 * _MAX_DEPTH + 2:
        raise CheckpointError("a value in the manifest is nested too deep")
    if isinstance(value, list):
        return _decode_items(value, tensors, depth)
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return dict(zip(value, _decode_items(value.values(), tensors, depth)))
    tag = value[TAG]
    if tag in ("tensor", "parts"):
        return _decode_tensor(value, tensors, depth)
    if tag in ("array", "scalar"):
        return _decode_array(value, tensors, depth)
    if tag in DECODERS:
        return DECODERS[tag](_decode_value(value["value"], tensors, depth + 1))
    if tag in CONTAINERS:
        return _decode_container(value, tensors, depth)
    raise CheckpointError(f"a value in the manifest is of the unknown type {tag!r}")


def _decode_items(items: Iterable[Any], tensors: Mapping[str, torch.Tensor], depth: int) -> list[Any]:
    """Return the decoded items of a list or dict at the given depth. Scalars are not decoded one by one.

    Lists of numbers can be long, so a function call for each number would be slow.
    """
    return [_decode_value(item, tensors, depth + 1) if isinstance(item, dict | list) else item for item in items]


def _decode_container(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    """Return the container that `_encode_container` has encoded."""
    tag, items = value[TAG], _decode_items(value["items"], tensors, depth)
    container: Any = CONTAINERS[tag]
    if tag == "deque":
        return deque(items, value["maxlen"])
    if not issubclass(container, dict):
        return container(items)
    pairs = [(key, item) for key, item in items]
    if tag == "defaultdict":
        return defaultdict(None, pairs)
    return container(dict(pairs))


def _find_tensor(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor that a JSON reference names. Raise `CheckpointError` if `tensors` lacks it."""
    tensor = tensors.get(value["name"])
    if tensor is None:
        raise CheckpointError(f"the manifest names a tensor {value['name']!r} that the checkpoint lacks")
    return tensor


def _decode_tensor(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> torch.Tensor:
    """Return the tensor that `_encode_tensor` has encoded: a dense one, or a sparse or quantized one from its parts."""
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
    """Return the NumPy array or scalar that was encoded with the tag "array" or "scalar"."""
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
