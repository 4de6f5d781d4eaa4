"""Convert NumPy arrays and scalars to bytes with a JSON description of their dtype, without pickle."""

from typing import Any

import numpy

from headway.errors import CheckpointError


def describe_dtype(dtype: numpy.dtype[Any]) -> Any:
    """Return a description of a dtype as in NumPy's own files: text or a list of fields.

    Raises:
        CheckpointError, LookupError, TypeError, ValueError: If the dtype cannot be rebuilt from a description, for
            example because it holds Python objects.
    """
    description = numpy.lib.format.dtype_to_descr(dtype)
    # NumPy writes "<i8" for both long and long long if their sizes are equal. The type's character code differs.
    if isinstance(description, str) and build_dtype(description).type is not dtype.type:
        description = dtype.byteorder + dtype.char
    if dtype.hasobject or build_dtype(description) != dtype:
        raise CheckpointError(f"of the dtype {dtype!r}, which cannot be rebuilt from a description")
    return description


def build_dtype(description: Any) -> numpy.dtype[Any]:
    """Return the dtype that a description specifies.

    Args:
        description: Text or list of fields, as `describe_dtype` returns it. It is untrusted.

    Raises:
        CheckpointError, LookupError, TypeError, ValueError: If the description is invalid, or its dtype holds Python
            objects.
    """
    dtype: numpy.dtype[Any] = numpy.lib.format.descr_to_dtype(description)
    if dtype.hasobject:
        raise CheckpointError(
            f"an array of dtype {description!r} contains Python objects, which a checkpoint cannot contain"
        )
    return dtype


def read_values(value: Any) -> Any:
    """Return the values of an array or scalar as bytes, in C order.

    For a structured dtype, return a list with each field's bytes, which leaves out the padding between fields. The
    result is used to compare values.
    """
    return (
        [read_values(value[name]) for name in value.dtype.names] if value.dtype.names is not None else value.tobytes()
    )


def build_array(dtype: numpy.dtype[Any], shape: Any, raw: bytes) -> numpy.ndarray[Any, Any]:
    """Return an array with the given bytes as values, in C order.

    Args:
        dtype: Dtype of the array.
        shape: Shape of the array. It is untrusted.
        raw: Bytes of its values.

    Raises:
        CheckpointError, TypeError, ValueError: If the shape is invalid, or the number of bytes does not match the dtype
            and the shape.
    """
    array: numpy.ndarray[Any, Any] = numpy.ndarray(tuple(shape), dtype, bytearray(raw) or bytearray(dtype.itemsize))
    if array.nbytes != len(raw):
        raise CheckpointError(f"the manifest has {len(raw)} bytes for an array of {array.nbytes}")
    copy: numpy.ndarray[Any, Any] = array.copy()
    return copy
