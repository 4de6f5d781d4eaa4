"""Types of Python values that JSON lacks: how a checkpoint encodes and decodes values of each type."""

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, NamedTuple

import numpy
import torch

from headway.core.checkpoint.format.text import decode_base64
from headway.core.weights.tensor_bytes import find_dtype, get_dtype_name


class LeafCodec(NamedTuple):
    """Conversion of a leaf type that JSON lacks.

    Attributes:
        tag: Name of the type in the JSON object.
        leaf_type: The type. Subclasses of it are not encoded.
        encode: Function from a value to one that `encode_value` accepts.
        decode: Inverse function. It raises an error if its argument is wrong.
    """

    tag: str
    leaf_type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _unpack_bytes(text: str) -> bytes:
    """Return the bytes that a base64 text represents."""
    return base64.b64decode(text, validate=True)


def _encode_bytes(value: bytes | bytearray) -> str:
    """Return bytes as a base64 text."""
    return base64.b64encode(value).decode()


LEAF_CODECS = (
    LeafCodec("bytes", bytes, _encode_bytes, _unpack_bytes),
    LeafCodec("bytearray", bytearray, _encode_bytes, lambda v: bytearray(_unpack_bytes(v))),
    LeafCodec("complex", complex, lambda v: [repr(v.real), repr(v.imag)], lambda v: complex(float(v[0]), float(v[1]))),
    LeafCodec("torch.dtype", torch.dtype, get_dtype_name, find_dtype),
    LeafCodec("torch.device", torch.device, str, torch.device),
    LeafCodec("torch.Size", torch.Size, list, torch.Size),
    LeafCodec("range", range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    # Adding nothing makes a plain str of a numpy.str_, and plain bytes of a numpy.bytes_.
    LeafCodec("numpy.str", numpy.str_, lambda v: str.__add__(v, ""), numpy.str_),
    LeafCodec(
        "numpy.bytes",
        numpy.bytes_,
        lambda v: _encode_bytes(bytes.__add__(v, b"")),
        lambda v: numpy.bytes_(_unpack_bytes(v)),
    ),
    LeafCodec("Path", PosixPath, str, Path),
    LeafCodec("Path", WindowsPath, str, Path),
    LeafCodec("PurePosixPath", PurePosixPath, str, PurePosixPath),
    LeafCodec("PureWindowsPath", PureWindowsPath, str, PureWindowsPath),
)
DECODERS: dict[str, Callable[[Any], Any]] = {codec.tag: codec.decode for codec in LEAF_CODECS} | {
    "int": lambda v: int(v, 16),
    "text": decode_base64,
    "float": lambda v: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[v],
}
"""Functions that decode leaf values, by tag. The last three tags are those of `_encode_scalar`."""
CONTAINERS: dict[str, type] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
}
