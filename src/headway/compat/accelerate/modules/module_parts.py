"""What scripts query about a model's parts: unsaved buffers, repeated blocks, layers that float8 leaves out, offloaded weights."""

from collections.abc import Iterable
from typing import Any

import torch

from headway.compat.accelerate.modules.align import align_module_device
from headway.log import get_logger

log = get_logger(__name__)


def get_non_persistent_buffers(module: torch.nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """The names of buffers that state dicts leave out.

    Args:
        module: whose.
        recurse: also those of its submodules.
        fqns: with the submodules' names before them.
    """
    own = set(module._non_persistent_buffers_set)
    if recurse:
        for path, part in module.named_modules():
            own |= {f"{path}.{name}" if fqns else name for name in part._non_persistent_buffers_set}
    return own


def get_module_leaves(module_sizes: Iterable[str]) -> list[str]:
    """The names that are not parents of others, "" left out."""
    names = list(module_sizes)
    parents = {name.rpartition(".")[0] for name in names}
    return [name for name in names if name and name not in parents]


def is_repeated_blocks(module: torch.nn.Module) -> bool:
    """Is it a ModuleList of one class?"""
    return isinstance(module, torch.nn.ModuleList) and len({type(each) for each in module}) == 1


def has_repeated_blocks(module: torch.nn.Module) -> bool:
    """Is there such a list in it?"""
    return any(is_repeated_blocks(each) for each in module.modules())


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Are they the same, "cuda" being "cuda:0"?"""
    return first_device.type == second_device.type and (
        first_device.type == "cpu" or (first_device.index or 0) == (second_device.index or 0)
    )


def find_first_last_linear_layers(model: torch.nn.Module) -> tuple[str | None, str | None]:
    """The names of the first and the last Linear; None where there is none."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: torch.nn.Module, fqn: str, layers_to_filter: Iterable[str | None]) -> bool:
    """May float8 take this layer: none of `layers_to_filter`, and if Linear, with sizes that 16 divides?"""
    if isinstance(module, torch.nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: torch.nn.Module, fqn: str) -> bool:
    """The same for the first and last Linear of `module` itself; give `filter_linear_layers` names to leave out a model's."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def has_ao_layers(model: torch.nn.Module) -> bool:
    """Has torchao converted one of its layers to float8?"""
    return any(type(each).__module__.startswith("torchao.float8") for each in model.modules())


def get_state_dict_offloaded_model(model: torch.nn.Module) -> dict[str, Any]:
    """The weights of a model with offloaded parts, in host memory; tensors without values are left out with a warning."""
    state: dict[str, Any] = {}
    missing = set()
    for path, module in model.named_modules():
        if not path:
            continue
        with align_module_device(module, torch.device("cpu")):
            for name, value in module.state_dict().items():
                if value.is_meta:
                    missing.add(f"{path}.{name}")
                else:
                    state[f"{path}.{name}"] = value.to("cpu")
    if missing - set(state):
        log.warning("left out, as they have no values: %s", ", ".join(sorted(missing - set(state))))
    return state
