"""Nested batches as functions: moving, converting, joining and walking them, their shapes, and a size of them that fits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from headway.runtime.collectives.tree import Tree, find_batch_size, like_mapping, like_sequence, map_tensors, tensors


def is_torch_tensor(tensor: object) -> bool:
    """Is it a tensor?"""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: object) -> bool:
    """Is it a named tuple?"""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items of `generator` in a container of the type of `obj` (a list, tuple or named tuple)."""
    return like_sequence(obj, generator)


def recursively_apply(
    func: Callable[..., object],
    data: Tree,
    *args: object,
    test_type: Callable[[object], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: object,
) -> Tree:
    """Apply `func` to what `test_type` accepts in nested lists, tuples and dicts; the containers keep their types.

    Args:
        func: called with each accepted leaf and the further arguments.
        data: nested containers.
        args, kwargs: for `func`.
        test_type: what is a leaf for `func`; default: tensors.
        error_on_other_type: False: other leaves pass through.

    Raises:
        TypeError: another leaf, where that is an error.
    """

    def walk(node: Tree) -> Tree:
        if isinstance(node, tuple | list):
            return like_sequence(node, (walk(item) for item in node))
        if isinstance(node, Mapping):
            return like_mapping(node, {key: walk(value) for key, value in node.items()})
        if test_type(node):
            return func(node, *args, **kwargs)
        if error_on_other_type:
            name = getattr(func, "__name__", "the function")
            raise TypeError(f"{name} got a {type(node).__name__}; give lists, tuples or dicts of what it takes")
        return node

    return walk(data)


def send_to_device(
    tensor: Tree, device: object, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> Tree:
    """The same structure with every tensor on `device`; objects with a `to` method of their own move themselves.

    Args:
        tensor: nested containers.
        device: a torch.device or what makes one.
        non_blocking: do not wait for the copies.
        skip_keys: entries of dicts that stay where they are.
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())

    def walk(node: Tree) -> Tree:
        if hasattr(node, "to"):
            try:
                return node.to(device, non_blocking=non_blocking)
            except TypeError:  # a `to` of its own that knows no such option
                return node.to(device)
        if isinstance(node, tuple | list):
            return like_sequence(node, (walk(item) for item in node))
        if isinstance(node, Mapping):
            moved = {key: value if key in skipped else walk(value) for key, value in node.items()}
            return like_mapping(node, moved)
        return node

    return walk(tensor)


def convert_to_fp32(tensor: Tree) -> Tree:
    """The same structure with float16 and bfloat16 tensors as float32."""
    halves = (torch.float16, torch.bfloat16)
    return map_tensors(lambda leaf: leaf.float() if leaf.dtype in halves else leaf, tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., object]) -> Callable[..., Any]:
    """Decorator: what the function returns in half precision comes back in float32."""

    @wraps(model_forward)
    def forward(*args: object, **kwargs: object) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def concatenate(data: Sequence[Tree], dim: int = 0) -> Tree:
    """Join structures of one shape tensor by tensor along `dim`.

    Args:
        data: a list of tensors, or of nested lists, tuples and dicts of them.
        dim: the dimension.

    Raises:
        TypeError: leaves that are not tensors, of several structures.
    """
    first = data[0]
    if isinstance(first, tuple | list):
        return like_sequence(first, (concatenate([each[index] for each in data], dim) for index in range(len(first))))
    if isinstance(first, Mapping):
        return like_mapping(first, {key: concatenate([each[key] for each in data], dim) for key in first})
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if len(data) == 1:
        return first
    raise TypeError(f"concatenate got a {type(first).__name__}; give tensors, or lists, tuples or dicts of them")


def slice_tensors(
    data: Tree, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Tree:
    """The same structure with every tensor cut to `tensor_slice`; the last two arguments are accepted and not needed."""
    return map_tensors(lambda leaf: leaf[tensor_slice], data)


def listify(data: Tree) -> Tree:
    """The same structure with every tensor as a (nested) list of numbers."""
    return map_tensors(lambda leaf: (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).tolist(), data)


def find_device(data: Tree) -> torch.device | None:
    """Where the first tensor lies; None without one."""
    return next((tensor.device for tensor in tensors(data)), None)


# -------------------------------------------------------------------- shapes


@dataclass
class TensorInformation:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: object) -> bool:
    """Is it a `TensorInformation`?"""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """The batch with a `TensorInformation` in place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The batch with the shape, a list, in place of each tensor."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The output of `get_data_structure` with an uninitialised tensor in place of each `TensorInformation`."""

    def make(about: TensorInformation) -> torch.Tensor:
        return torch.empty(about.shape, dtype=about.dtype)

    return recursively_apply(make, data_structure, test_type=is_tensor_information)


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`; None if there is no tensor, or only one without rows."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """Tensors in nested lists, tuples and dicts on a device."""
    return recursively_apply(lambda tensor: tensor.to(device), state)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Is it on an XPU?"""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def verify_operation(function: Any) -> Any:
    """The function: every exchange is checked before it moves data."""
    return function


chained_operation = verify_operation

_KINDS = "float double half bfloat16 uint8 int8 int16 int32 int64 bool"
TENSOR_TYPE_TO_INT = {getattr(torch, kind): number for number, kind in enumerate(_KINDS.split(), 1)}
TENSOR_INT_TO_DTYPE = {number: kind for kind, number in TENSOR_TYPE_TO_INT.items()}


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Tensors with zeros below, by Accelerate's rule, which may give more rows than `num_processes` divides.

    Args:
        tensor: or nested ones.
        batch_size: their rows.
        num_processes: among which they are to be shared.
        dim: the dimension that is filled from the front.
    """
    each, rest = divmod(batch_size, num_processes)
    more = num_processes - (each or batch_size)
    if more < 1 and rest > more:
        more = rest - more

    def pad(given: torch.Tensor) -> torch.Tensor:
        made = given.new_zeros([batch_size + more, *given.shape[1:]])
        made.narrow(dim, 0, given.shape[dim]).copy_(given)
        return made

    return recursively_apply(pad, tensor, error_on_other_type=True)


# -------------------------------------------------------------------- a size that fits


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Call a function with a batch size that fits into memory, the same on all ranks.

    Args:
        function: takes the batch size first; None: a decorator is returned.
        starting_batch_size: of the first attempt.
        reduce_batch_size_fn: gives the next one; None: nine tenths of it (Headway's own takes half).
    """
    from headway.memory import batch_size

    call: Any = batch_size.find_executable_batch_size
    return call(function, starting_batch_size, reduce_batch_size_fn or (lambda size: int(size * 0.9)))
