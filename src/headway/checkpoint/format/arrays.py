"""NumPy's arrays and scalars as bytes with a description of their dtype that JSON holds, and back."""

import re
from typing import Any

import numpy

from headway.errors import CheckpointError

_PLAIN = re.compile(r"[<>|=]?[A-Za-z?][0-9]*(\[\w+\])?")


def describe(dtype: numpy.dtype[Any]) -> Any:
    """A dtype as text; a structured one, or one of sub-arrays, as an object.

    Raises:
        CheckpointError: it cannot be made again from a description.
    """
    described = _describe(dtype)
    if dtype.hasobject or not is_same(build(described), dtype):
        raise CheckpointError(f"of the dtype {dtype!r}, which cannot be made again from a description")
    return described


def _describe(dtype: numpy.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _describe(base), "shape": list(shape)}
    if dtype.names is not None and dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        out = {
            "names": list(dtype.names),
            "formats": [_describe(field[0]) for field in fields],
            "offsets": [field[1] for field in fields],
            "itemsize": dtype.itemsize,
            "aligned": dtype.isalignedstruct,
        }
        titles = [field[2] if len(field) > 2 else None for field in fields]
        return out if not any(titles) else {**out, "titles": titles}
    # Of two C types of one size (long and long long) the common text means one.
    is_common = dtype.hasobject or numpy.dtype(dtype.str).type is dtype.type or dtype.kind == "V"
    return dtype.str if is_common else dtype.byteorder + dtype.char


def build(described: Any) -> numpy.dtype[Any]:
    """The dtype of a description.

    Raises:
        CheckpointError, LookupError, TypeError, ValueError: it describes none, or one of Python objects.
    """
    if not isinstance(described, dict):
        if not isinstance(described, str) or _PLAIN.fullmatch(described) is None:
            raise CheckpointError(f"{described!r} is not a dtype of NumPy's")
        dtype = numpy.dtype(described)
    elif "base" in described:
        dtype = numpy.dtype((build(described["base"]), tuple(described["shape"])))
    else:
        fields = {name: described[name] for name in ("names", "offsets", "itemsize")}
        titles = {"titles": described["titles"]} if "titles" in described else {}
        formats = [build(each) for each in described["formats"]]
        dtype = numpy.dtype({**fields, **titles, "formats": formats}, align=bool(described["aligned"]))  # type: ignore[call-overload]
    if dtype.hasobject:
        raise CheckpointError(f"an array of dtype {described!r} holds Python objects, which a checkpoint cannot")
    return dtype


def is_same(one: numpy.dtype[Any], other: numpy.dtype[Any]) -> bool:
    """Equal, of the same C types, and laid out alike."""
    if one != other or one.type is not other.type or one.isalignedstruct != other.isalignedstruct:
        return False
    if one.subdtype is not None and other.subdtype is not None:
        return is_same(one.subdtype[0], other.subdtype[0])
    if one.fields is None or other.fields is None:
        return True
    return all(is_same(one.fields[name][0], other.fields[name][0]) for name in one.names or ())


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
