"""Python values as JSON and named tensors, and back: what state dicts hold, without pickle.

JSON's own values stand for themselves; every other type is an object with the one reserved key `!`, its type. Tensors
are taken out and stand as their names. What has no place here is refused when it is saved, with its path.
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import numpy
import torch

from headway.errors import CheckpointError

TAG = "!"
_MAX_DEPTH = 200


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON; its tensors are put into `tensors` under names that begin with `name`.

    Raises:
        CheckpointError: something in it can only be pickled.
    """
    return _Encoder(tensors).encode(value, name, 0)


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `encode` was given.

    Raises:
        CheckpointError: this is nothing that `encode` wrote.
    """
    try:
        return _decode(value, tensors, 0)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError, RuntimeError) as error:
        raise CheckpointError(f"a value in the manifest cannot be read: {type(error).__name__}: {error}") from error


class _Encoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def encode(self, value: Any, name: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{name} is nested more than {_MAX_DEPTH} deep, or contains itself")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
        if kind is list:
            return [self.encode(item, f"{name}.{i}", depth + 1) for i, item in enumerate(value)]
        if kind is dict and all(type(key) is str for key in value) and TAG not in value:
            return {key: self.encode(item, f"{name}.{key}", depth + 1) for key, item in value.items()}
        return self._tagged(value, name, depth)

    def _tagged(self, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "name": self._keep(value.detach(), name)}
        if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0)
            return {TAG: "array", "name": self._keep(raw, name), "dtype": value.dtype.str, "shape": list(value.shape)}
        for tag, owner, pack in _PACKED:
            if type(value) is owner:
                return {TAG: tag, "value": pack(value)}
        if isinstance(value, numpy.generic):
            return {TAG: "scalar", "dtype": value.dtype.str, "value": base64.b64encode(value.tobytes()).decode()}
        if isinstance(value, PurePath):
            return {TAG: "path", "value": str(value)}
        for tag, container in _CONTAINERS.items():
            if type(value) is container:
                return self._container(tag, value, name, depth)
        raise CheckpointError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold without pickle. "
            "Allowed: numbers, text, bytes, tensors, arrays, and lists, tuples, dicts and sets of them. Let state_dict() "
            "return those, and build the object from them in load_state_dict()"
        )

    def _container(self, tag: str, value: Any, name: str, depth: int) -> Any:
        if isinstance(value, dict):
            if isinstance(value, defaultdict) and value.default_factory is not None:
                raise CheckpointError(
                    f"{name} is a defaultdict with a factory, which cannot be saved; let state_dict() return dict(it)"
                )
            items: list[Any] = [list(pair) for pair in value.items()]
        else:
            items = sorted(value) if isinstance(value, set | frozenset) and _is_plain(value) else list(value)
        return {TAG: tag, "items": [self.encode(item, f"{name}.{i}", depth + 1) for i, item in enumerate(items)]}

    def _keep(self, tensor: torch.Tensor, name: str) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(f"{name} is a {tensor.layout} tensor; a checkpoint holds dense ones. Save its parts")
        while name in self.tensors:
            name += "_"
        self.tensors[name] = tensor
        return name


def _is_plain(values: Any) -> bool:
    return all(type(item) is int for item in values) or all(type(item) is str for item in values)


_PACKED: list[tuple[str, type, Callable[[Any], Any]]] = [
    ("bytes", bytes, lambda v: base64.b64encode(v).decode()),
    ("bytearray", bytearray, lambda v: base64.b64encode(v).decode()),
    ("complex", complex, lambda v: [repr(v.real), repr(v.imag)]),
    ("torch.dtype", torch.dtype, lambda v: str(v).removeprefix("torch.")),
    ("torch.device", torch.device, str),
    ("torch.Size", torch.Size, list),
    ("range", range, lambda v: [v.start, v.stop, v.step]),
]
_CONTAINERS: dict[str, type] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict, "OrderedDict": OrderedDict, "Counter": Counter,
    "defaultdict": defaultdict,
}  # fmt: skip
_UNPACKED: dict[str, Callable[[Any], Any]] = {
    "float": lambda v: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[v],
    "bytes": lambda v: base64.b64decode(v, validate=True),
    "bytearray": lambda v: bytearray(base64.b64decode(v, validate=True)),
    "complex": lambda v: complex(float(v[0]), float(v[1])),
    "torch.dtype": lambda v: dtype_named(v),
    "torch.device": torch.device,
    "torch.Size": torch.Size,
    "range": lambda v: range(*v),
    "path": PurePath,
}


def dtype_named(name: Any) -> torch.dtype:
    """torch's dtype of that name.

    Raises:
        CheckpointError: torch has none.
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return found


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise CheckpointError("a value in the manifest is nested too deep")
    if isinstance(value, list):
        return [_decode(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensors, depth + 1) for key, item in value.items()}
    tag = value[TAG]
    if tag in ("tensor", "array"):
        tensor = tensors.get(value["name"])
        if tensor is None:
            raise CheckpointError(f"the manifest names a tensor {value['name']!r} that the checkpoint lacks")
        return tensor if tag == "tensor" else _array(value, tensor)
    if tag == "scalar":
        return numpy.frombuffer(base64.b64decode(value["value"], validate=True), dtype=_plain_dtype(value["dtype"]))[0]
    if tag in _UNPACKED:
        return _UNPACKED[tag](value["value"])
    if tag in _CONTAINERS:
        items = [_decode(item, tensors, depth + 1) for item in value["items"]]
        if issubclass(_CONTAINERS[tag], dict):
            pairs = [(key, item) for key, item in items]
            return defaultdict(None, pairs) if tag == "defaultdict" else _CONTAINERS[tag](dict(pairs))
        return _CONTAINERS[tag](items)
    raise CheckpointError(f"a value in the manifest is of the unknown type {tag!r}")


def _array(value: dict[str, Any], tensor: torch.Tensor) -> Any:
    raw = tensor.contiguous().numpy().tobytes()
    return numpy.frombuffer(raw, dtype=_plain_dtype(value["dtype"])).reshape(value["shape"]).copy()


def _plain_dtype(text: Any) -> numpy.dtype[Any]:
    dtype = numpy.dtype(text if isinstance(text, str) else str(text))
    if dtype.hasobject:
        raise CheckpointError(f"an array of dtype {text!r} holds Python objects, which a checkpoint cannot")
    return dtype
