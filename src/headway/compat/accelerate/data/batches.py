"""Functions for nested batches: move, convert, concatenate and measure them, and exchange them between processes.

Arguments of collective operations (gather, reduce, broadcast and others) are checked before any data is moved. Under
`import accelerate`, `gather_for_metrics` also accepts values that do not have one entry per sample, such as one value
per batch (see `gather_and_truncate`). TRL needs this to count tokens. `headway.Accelerator.gather_for_metrics` refuses
such values.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from headway.compat.accelerate.constants import CannotPadNestedTensorWarning
from headway.compat.accelerate.state import GradientState, get_collectives
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.rng import synchronize_rng_states
from headway.core.runtime.collectives.tree import (
    Tree,
    find_batch_size,
    list_leaves,
    list_tensors,
    map_tensors,
    rebuild_mapping,
    rebuild_sequence,
)
from headway.errors import CollectiveError

GATHER = "_gpu_gather_one"
"""Name of Accelerate's internal function for `gather`, which its error messages contain."""
REDUCE = "_reduce_across_processes"
"""Name of Accelerate's internal function for `reduce`, which its error messages contain."""
PAD = "_pad_across_processes"
"""Name of Accelerate's internal function for `pad_across_processes`, which its error messages contain."""


def is_torch_tensor(tensor: object) -> bool:
    """Whether an object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: object) -> bool:
    """Whether an object is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items of an iterable in a container of the same type as `obj`.

    Args:
        obj: List, tuple or named tuple.
        generator: Iterable with the items of the new container.
    """
    return rebuild_sequence(obj, generator)


def recursively_apply(
    func: Callable[..., object],
    data: Tree,
    *args: object,
    test_type: Callable[[object], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: object,
) -> Tree:
    """Return nested containers with `func` applied to all leaves that `test_type` accepts.

    Lists, tuples and dicts keep their types.

    Args:
        func: Function called with each accepted leaf, followed by `args` and `kwargs`.
        data: Nested containers.
        args, kwargs: Other arguments of `func`.
        test_type: Predicate that selects leaves for `func`. Default: tensors.
        error_on_other_type: Whether leaves that `test_type` rejects are an error. If False (the default), they are
            returned unchanged.

    Raises:
        TypeError: If `error_on_other_type` is set and `test_type` rejects a leaf.
    """

    def apply_recursively(node: Tree) -> Tree:
        if isinstance(node, tuple | list):
            return rebuild_sequence(node, (apply_recursively(item) for item in node))
        if isinstance(node, Mapping):
            return rebuild_mapping(node, {key: apply_recursively(value) for key, value in node.items()})
        if test_type(node):
            return func(node, *args, **kwargs)
        if error_on_other_type:
            # Scripts and tests compare the text with this message of Accelerate.
            raise TypeError(
                f"Unsupported types ({type(node)}) passed to `{getattr(func, '__name__', func)}`. Only nested list/tuple/dicts of "
                f"objects that are valid for `{getattr(test_type, '__name__', test_type)}` should be passed."
            )
        return node

    return apply_recursively(data)


def require_tensors(data: Tree, function: str) -> None:
    """Raise `TypeError` unless all leaves are tensors.

    Args:
        data: Argument of a collective operation, such as `gather`.
        function: Name of Accelerate's internal function for the operation, which the error message contains.

    Raises:
        TypeError: If a leaf is not a tensor, for example None.
    """

    def return_unchanged(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    return_unchanged.__name__ = function
    recursively_apply(return_unchanged, data, error_on_other_type=True)


def send_to_device(
    tensor: Tree, device: object, non_blocking: bool = False, skip_keys: str | Sequence[str] | None = None
) -> Tree:
    """Return nested containers with all tensors moved to a device. Other objects are moved if they have a `to` method.

    Args:
        tensor: Nested containers of tensors.
        device: Device, or its name or index.
        non_blocking: Whether to copy asynchronously. Default: False.
        skip_keys: Keys of dict entries that are not moved. None (the default): all are moved.
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())

    def move_recursively(node: Tree) -> Tree:
        if hasattr(node, "to"):
            try:
                return node.to(device, non_blocking=non_blocking)
            except TypeError:  # a custom `to` without this option
                return node.to(device)
        if isinstance(node, tuple | list):
            return rebuild_sequence(node, (move_recursively(item) for item in node))
        if isinstance(node, Mapping):
            moved = {key: value if key in skipped else move_recursively(value) for key, value in node.items()}
            return rebuild_mapping(node, moved)
        return node

    return move_recursively(tensor)


def convert_to_fp32(tensor: Tree) -> Tree:
    """Return nested containers with float16 and bfloat16 tensors converted to float32.

    Args:
        tensor: Tensor, or nested lists, tuples and dicts of tensors. Other values and dtypes are returned unchanged.
    """
    halves = (torch.float16, torch.bfloat16)
    return map_tensors(lambda leaf: leaf.float() if leaf.dtype in halves else leaf, tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that calls `model_forward` and converts half-precision tensors in its result to float32."""

    @wraps(model_forward)
    def forward(*args: object, **kwargs: object) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def concatenate(data: Sequence[Tree], dim: int = 0) -> Tree:
    """Return equally structured containers of tensors, concatenated along one dimension.

    In a list with only one item, leaves that are not tensors are returned unchanged.

    Args:
        data: List of tensors, or of nested lists, tuples and dicts of tensors.
        dim: Dimension to concatenate along. Default: 0.

    Raises:
        TypeError: If a leaf is not a tensor and `data` has more than one item.
    """
    first = data[0]
    if isinstance(first, tuple | list):
        return rebuild_sequence(
            first, (concatenate([each[index] for each in data], dim) for index in range(len(first)))
        )
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: concatenate([each[key] for each in data], dim) for key in first})
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if len(data) == 1:
        return first
    raise TypeError(f"concatenate got a {type(first).__name__}; give tensors, or lists, tuples or dicts of them")


def slice_tensors(
    data: Tree, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Tree:
    """Return nested containers with every tensor sliced along its first dimension.

    Args:
        data: Nested containers of tensors.
        tensor_slice: Slice of the first dimension, such as `slice(0, 4)`.
        process_index, num_processes: Ignored, as in Accelerate.
    """
    return map_tensors(lambda leaf: leaf[tensor_slice], data)


def listify(data: Tree) -> Tree:
    """Return nested containers with every tensor converted to a (nested) list of numbers."""
    return map_tensors(lambda leaf: (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).tolist(), data)


def find_device(data: Tree) -> torch.device | None:
    """Return the device of the first tensor in nested containers; None if there is no tensor."""
    return next((tensor.device for tensor in list_tensors(data)), None)


# -------------------------------------------------------------------- shapes


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor, without its values.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: object) -> bool:
    """Whether an object is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """Return nested containers with each tensor replaced by its `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return nested containers with each tensor replaced by its shape as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return nested containers with each `TensorInformation` replaced by an uninitialized tensor.

    Args:
        data_structure: Return value of `get_data_structure`.
    """

    def make_empty(information: TensorInformation) -> torch.Tensor:
        return torch.empty(information.shape, dtype=information.dtype)

    return recursively_apply(make_empty, data_structure, test_type=is_tensor_information)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the batch size of nested containers, or None if no tensor has a first dimension."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """Return nested lists, tuples and dicts with their tensors moved to a device."""
    return recursively_apply(lambda tensor: tensor.to(device), state)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether an object is a tensor on an XPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def verify_operation(function: Any) -> Any:
    """Return the function unchanged.

    Accelerate's decorator of this name checks the arguments of collectives. Headway always checks them.
    """
    return function


chained_operation = verify_operation

_KINDS = "float double half bfloat16 uint8 int8 int16 int32 int64 bool"
TENSOR_TYPE_TO_INT = {getattr(torch, kind): number for number, kind in enumerate(_KINDS.split(), 1)}
TENSOR_INT_TO_DTYPE = {number: kind for kind, number in TENSOR_TYPE_TO_INT.items()}


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return tensors padded with rows of zeros, as Accelerate pads them before it splits a batch among processes.

    As in Accelerate, the new number of rows is not always divisible by `num_processes`.

    Args:
        tensor: Tensor, or nested containers of tensors.
        batch_size: Number of rows of the tensors.
        num_processes: Number of processes among which the rows will be split.
        dim: Leave it at 0 (the default), because rows are always added along dimension 0.
    """
    # This is Accelerate's formula. Its number of rows is not always divisible, but scripts may depend on the number.
    rows_per_process, num_remaining = divmod(batch_size, num_processes)
    num_added = num_processes - (rows_per_process or batch_size)
    if num_added < 1 and num_remaining > num_added:
        num_added = num_remaining - num_added

    def pad_with_zeros(rows: torch.Tensor) -> torch.Tensor:
        padded = rows.new_zeros([batch_size + num_added, *rows.shape[1:]])
        padded.narrow(dim, 0, rows.shape[dim]).copy_(rows)
        return padded

    return recursively_apply(pad_with_zeros, tensor, error_on_other_type=True)


# -------------------------------------------------------------------- batch size search


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Wrap a function so that it is called with smaller and smaller batch sizes until it does not run out of memory.

    All ranks use the same batch size.

    Args:
        function: Function that takes the batch size as its first argument. None: return a decorator.
        starting_batch_size: Batch size of the first attempt. Default: 128.
        reduce_batch_size_fn: Function that maps a batch size to the next smaller one. None: 90 % of the size, whereas
            `headway.find_executable_batch_size` uses 50 %.

    Raises:
        BatchSizeError: From the call, if not even the smallest batch size fits.
        CallError: From the call, if a batch size was passed.
    """
    from headway.core.memory import batch_size

    call: Any = batch_size.find_executable_batch_size
    return call(function, starting_batch_size, reduce_batch_size_fn or (lambda size: int(size * 0.9)))


# -------------------------------------------------------------------- exchange between processes


def gather(tensor: Tree) -> Tree:
    """Return tensors of all ranks, concatenated along dimension 0 in rank order.

    In a single-process run, the input is returned unchanged. The size of dimension 0 can differ between ranks. Nested
    structures are kept. All ranks must call it, and all get the result, on the device of their input.

    Args:
        tensor: Tensor, or nested containers of tensors. A 0-d tensor counts as one row.

    Raises:
        TypeError: If there are several processes and a leaf is not a tensor.
    """
    if get_collectives().world_size == 1:
        return tensor
    require_tensors(tensor, GATHER)
    return get_collectives().gather(tensor)


def gather_object(object: Any) -> Any:  # noqa: A002 - its name in Accelerate
    """Return a list of all ranks' objects in rank order. All ranks must call it.

    In a single-process run, the input is returned unchanged.

    Args:
        object: List, tuple or set of objects that can be pickled. Any other object counts as one item.
    """
    if get_collectives().world_size == 1:
        return object
    objects_by_rank = get_collectives().gather_objects(object)
    joined: list[Any] = []
    for rank_object in objects_by_rank:
        if isinstance(rank_object, list | tuple | set | frozenset):
            joined += rank_object
        else:
            joined.append(rank_object)
    return joined


def gather_and_truncate(values: Any, is_objects: bool) -> Any:
    """Return the concatenated values of all ranks. All ranks must call it.

    After the last batch of a loader, if the last global batch is incomplete, values are truncated to the number of
    samples in that batch. This is wrong for values that do not have one entry per sample. But scripts depend on it, for
    example scripts that gather one mean loss per rank.

    Args:
        values: Tensors in nested containers, or objects.
        is_objects: Whether to gather the values as objects even if all of them are tensors.
    """
    is_objects = is_objects or not all(isinstance(each, torch.Tensor) for each in list_leaves(values))
    gathered = gather_object(values) if is_objects else gather(values)
    state = GradientState()
    if not state.end_of_dataloader or state.remainder <= 0:
        return gathered
    if is_objects:
        return gathered[: state.remainder] if isinstance(gathered, list | tuple | str) else gathered
    return map_tensors(lambda each: each[: state.remainder] if each.ndim else each, gathered)


def broadcast(tensor: Tree, from_process: int = 0) -> Tree:
    """Copy the tensors of one rank into the tensors of all ranks, in place, and return them. All ranks must call it.

    Args:
        tensor: Nested containers of tensors, with equal shapes and dtypes on all ranks.
        from_process: Rank that sends its values. Default: 0.

    Raises:
        TypeError: If there are several processes and a leaf is not a tensor.
    """
    if get_collectives().world_size == 1:
        return tensor
    require_tensors(tensor, "_gpu_broadcast_one")
    for target, source in zip(list_tensors(tensor), list_tensors(get_collectives().broadcast(tensor, from_process))):
        if target is not source:
            target.detach().copy_(source)
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list on all ranks with those of one rank, in place, and return the list.

    All ranks must call it. In a single-process run, nothing changes.

    Args:
        object_list: List of objects that can be pickled, of equal length on all ranks.
        from_process: Rank that sends its objects. Default: 0.
    """
    object_list[:] = get_collectives().broadcast_object(list(object_list), from_process)
    return object_list


def reduce(tensor: Tree, reduction: str = "mean", scale: float = 1.0) -> Tree:
    """Return the tensors combined over all ranks. Shapes must be equal on all ranks, and all ranks must call it.

    Args:
        tensor: Tensor, or nested containers of tensors.
        reduction: "mean" (the default), "sum", "max" or "min".
        scale: Factor by which the result is multiplied. Default: 1.

    Raises:
        TypeError: If a leaf is not a tensor.
    """
    require_tensors(tensor, REDUCE)
    return get_collectives().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
    """Return tensors padded along `dim` to the largest size of all ranks, so that they can be gathered.

    All ranks must call it. If any tensor is a nested tensor, which torch cannot pad, nothing is padded, and a
    `CannotPadNestedTensorWarning` is given.

    Args:
        tensor: Tensor, or nested containers of tensors.
        dim: Dimension to pad. Default: 0.
        pad_index: Value of the padding. Default: 0.
        pad_first: Whether to pad at the beginning. Default: False.

    Raises:
        TypeError: If a leaf is not a tensor.
    """
    require_tensors(tensor, PAD)
    if any(each.is_nested for each in list_tensors(tensor)):
        warnings.warn(
            "Cannot pad nested tensors without more information. Leaving unprocessed.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
        return tensor
    return get_collectives().pad_across_processes(tensor, dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a tensor from one rank to the devices of all ranks, and return the copy on this rank's device.

    All ranks must call it.

    Args:
        tensor: Tensor on the rank that sends it; None on all other ranks.

    Raises:
        CollectiveError: If not exactly one rank passes a tensor.
    """
    collectives = get_collectives()
    has_tensor_by_rank = collectives.gather_numbers([float(tensor is not None)])
    senders = [rank for rank, (has_tensor,) in enumerate(has_tensor_by_rank) if has_tensor]
    if len(senders) != 1:
        raise CollectiveError(
            f"copy_tensor_to_devices got a tensor on ranks {senders}; give it on one, and None on the others"
        )
    shape, dtype = collectives.broadcast_object(None if tensor is None else (tensor.shape, tensor.dtype), senders[0])
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype)
    copy: torch.Tensor = collectives.broadcast(tensor.to(collectives.runtime.device), senders[0])
    return copy


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Copy rank 0's state of one random number generator to all ranks. All ranks must call it.

    Args:
        rng_type: Name of the generator, as in `synchronize_rng_states`. None (the default): "torch".
        generator: Generator to synchronize if `rng_type` is "generator". Otherwise ignored. Default: None.

    Raises:
        ConfigError: If the name is unknown, or is "generator" and no generator is given.
    """
    synchronize_rng_states([rng_type or "torch"], generator)


def is_per_sample(tree: Tree, loader: PreparedLoader | None, collectives: Collectives) -> bool:
    """Whether tensors have one row per sample of the current batch, on all ranks. All ranks must call it.

    Rows can also be those of a full batch, which includes samples that were repeated to fill it.

    Args:
        tree: Nested containers of tensors. If a leaf is not a tensor on any rank, the result is True without a check.
        loader: Loader that the batch came from. None: any tensor with at least one dimension is accepted.
        collectives: Collectives over the ranks.
    """
    try:
        recursively_apply(lambda tensor: tensor, tree, error_on_other_type=True)
        has_objects = False
    except TypeError:
        has_objects = True
    fits = has_objects or all(_has_row_per_sample(tensor, loader) for tensor in list_tensors(tree))
    if collectives.world_size == 1:
        return fits
    # A rank with objects takes part, too. Otherwise a rank with tensors would exchange these numbers with its objects.
    rows = collectives.gather_numbers([float(has_objects), float(fits)])
    return any(row[0] for row in rows) or all(row[1] for row in rows)


def _has_row_per_sample(tensor: torch.Tensor, loader: PreparedLoader | None) -> bool:
    """Whether a tensor has one row per sample of the loader's current batch on this rank, or of a full batch.

    Args:
        tensor: Tensor of results.
        loader: Loader that the batch came from. None: any tensor with at least one dimension is accepted.
    """
    if tensor.ndim == 0:
        return False
    if loader is None or loader.num_rows is None or tensor.shape[0] == loader.num_rows:
        return True
    # The tensor can include samples repeated to fill the last batch. Headway's own method removes them with a warning.
    total, counts = loader.total_batch_size, loader.valid_counts
    if not total or not counts:
        return False
    return tensor.shape[0] == total // len(counts) > loader.num_rows
