"""Tensors that share memory, in models and state dicts: found, left out of files, tied again; and batches by their shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.compat.accelerate.data.batches import recursively_apply
from headway.log import get_logger
from headway.runtime.collectives.tree import find_batch_size

log = get_logger(__name__)


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What is the same for tensors over the same memory: device, address, bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict for safetensors: contiguous, one name for each piece of memory; the other names are dropped with a warning."""
    kept: dict[str, Any] = {}
    seen: dict[Any, str] = {}
    left_out = []
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            if value.untyped_storage().nbytes() and seen.setdefault(id_tensor_storage(value), name) != name:
                left_out.append(name)
                continue
            value = value.contiguous()
        kept[name] = value
    if left_out:
        log.warning("left out of the file, as they share the memory of others: %s", ", ".join(sorted(left_out)))
    return kept


def retie_parameters(model: torch.nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make each group of names one parameter again: the first that has memory.

    Args:
        model: the model.
        tied_params: what `find_tied_parameters` gave before they came apart.
    """
    for group in tied_params:
        places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in group]
        known = [getattr(module, name, None) for module, name in places]
        chosen = next((each for each in known if each is not None and not each.is_meta), None)
        if chosen is not None:
            for module, name in places:
                setattr(module, name, chosen)


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
