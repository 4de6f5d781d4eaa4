"""Nested batches as functions: moved, converted, joined, walked, measured, and exchanged between processes.

Each exchange (gather, reduce, broadcast and the like) is checked before it moves data. `gather_for_metrics` takes, besides entries
per sample, one value for the batch, say: TRL counts tokens and sums entropies by it. Headway's own refuses such values, since
nothing says what they would be joined to.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from headway.compat.accelerate.state import GradientState, collectives
from headway.data.loader import PreparedLoader
from headway.errors import CollectiveError
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.ranks import synchronize_rng_states
from headway.runtime.collectives.tree import (
    Tree,
    find_batch_size,
    leaves,
    like_mapping,
    like_sequence,
    map_tensors,
    tensors,
)


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


# -------------------------------------------------------------------- exchange between processes


def gather(tensor: Tree) -> Tree:
    """Every rank's tensors, concatenated along dim 0 in rank order; on one process what was given.

    First dimensions may differ between ranks. Nested structures keep their shape.
    """
    return tensor if collectives().world_size == 1 else collectives().gather(tensor)


def gather_object(object: Any) -> Any:  # noqa: A002 - its name in Accelerate
    """The items of every rank's list in one list, by rank; on one process what was given.

    Args:
        object: a list, tuple or set of what pickle can carry; anything else counts as one item.
    """
    if collectives().world_size == 1:
        return object
    found = collectives().gather_objects(object)
    return [item for part in found for item in (part if isinstance(part, list | tuple | set | frozenset) else (part,))]


def gather_and_cut(values: Any, is_objects: bool) -> Any:
    """What every rank has, joined; of a loader's last round only as many entries as samples were left for it.

    That is wrong where a rank's entries are not its samples, but scripts count on it: a loss of each rank, for their mean.

    Args:
        values: tensors in nested containers, or objects.
        is_objects: gather them as objects whatever they are.
    """
    is_objects = is_objects or not all(isinstance(each, torch.Tensor) for each in leaves(values))
    joined = gather_object(values) if is_objects else gather(values)
    state = GradientState()
    if not state.end_of_dataloader or state.remainder <= 0:
        return joined
    if is_objects:
        return joined[: state.remainder] if isinstance(joined, list | tuple | str) else joined
    return map_tensors(lambda each: each[: state.remainder] if each.ndim else each, joined)


def broadcast(tensor: Tree, from_process: int = 0) -> Tree:
    """Rank `from_process`'s values into every rank's tensors, in place; the same objects come back.

    Args:
        tensor: tensors of the same shapes and dtypes on all ranks, in nested containers.
        from_process: whose values.
    """
    for own, sent in zip(tensors(tensor), tensors(collectives().broadcast(tensor, from_process))):
        if own is not sent:
            own.detach().copy_(sent)
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Rank `from_process`'s objects into every rank's list, in place; the same list comes back.

    Args:
        object_list: on every rank as long as there; what it holds elsewhere does not matter.
        from_process: whose objects.
    """
    object_list[:] = collectives().broadcast_object(list(object_list), from_process)
    return object_list


def reduce(tensor: Tree, reduction: str = "mean", scale: float = 1.0) -> Tree:
    """Combine tensors of equal shapes over ranks: "mean" (the default here), "sum", "max" or "min", times `scale`."""
    return collectives().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Tree, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Tree:
    """Pad tensors along `dim` to the longest of all ranks, so that they can be gathered."""
    return collectives().pad_across_processes(tensor, dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor that one rank has, on every rank's device; the others give None.

    Raises:
        CollectiveError: not exactly one rank gave a tensor.
    """
    way = collectives()
    given = [rank for rank, (has,) in enumerate(way.gather_numbers([float(tensor is not None)])) if has]
    if len(given) != 1:
        raise CollectiveError(
            f"copy_tensor_to_devices got a tensor on ranks {given}; give it on one, and None on the others"
        )
    shape, dtype = way.broadcast_object(None if tensor is None else (tensor.shape, tensor.dtype), given[0])
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype)
    moved: torch.Tensor = way.broadcast(tensor.to(way.runtime.device), given[0])
    return moved


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Give all ranks rank 0's state of one random stream (see `synchronize_rng_states`)."""
    synchronize_rng_states([rng_type or "torch"], generator)


def is_per_sample(tree: Tree, loader: PreparedLoader | None, collectives: Collectives) -> bool:
    """Do the tensors have a row for each sample of the batch, on all ranks? Called on all.

    Args:
        tree: True where it holds anything but tensors.
        loader: whose batch it is; None: nothing is known, and any tensor with a dimension will do.
        collectives: among the ranks.
    """
    try:
        recursively_apply(lambda tensor: tensor, tree, error_on_other_type=True)
    except TypeError:
        return True
    fits = all(_fits(tensor, loader) for tensor in tensors(tree))
    return fits if collectives.world_size == 1 else all(row[0] for row in collectives.gather_numbers([float(fits)]))


def _fits(tensor: torch.Tensor, loader: PreparedLoader | None) -> bool:
    if tensor.ndim == 0:
        return False
    if loader is None or loader.num_rows is None or tensor.shape[0] == loader.num_rows:
        return True
    # Values repeated to the batch size in a short last batch: Headway's own cuts them and says so.
    total, counts = loader.total_batch_size, loader.valid_counts
    if not total or not counts:
        return False
    return tensor.shape[0] == total // len(counts) > loader.num_rows
