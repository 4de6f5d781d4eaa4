"""What scripts query about a model's parts: unsaved buffers, repeated blocks, layers that float8 leaves out, offloaded weights."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from headway.compat.accelerate.modules.align import align_module_device, has_offloaded_params
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


def get_state_dict_from_offload(
    module: torch.nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Put a module's weights into `state_dict` where that has their names; those of an offloaded one come to the device.

    Args:
        module: whose.
        module_name: of one of its parameters.
        state_dict: by full names; changed, and returned.
        device_to_put_offload: where offloaded weights go.
    """
    root = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        values = {f"{root}.{name}": value for name, value in module.state_dict().items()}
    state_dict.update({name: value for name, value in values.items() if name in state_dict})
    return state_dict


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, torch.nn.Module]],
) -> tuple[int, list[str], list[torch.nn.Module]]:
    """A module's bytes with those of the modules that share parameters with it, and the names and modules of these.

    Args:
        tied_params: the shared parameters of other modules.
        module_size: its own bytes.
        module_sizes: of modules and parameters by name.
        modules_to_treat: where the others are among.
    """
    found = {}
    for tied in tied_params:  # where Accelerate finds no module, it raises IndexError
        item = next((each for each in modules_to_treat if tied.startswith(f"{each[0]}.")), None)
        if item is not None:
            found[tied] = item
    more = sum(module_sizes[name] - module_sizes[tied] for tied, (name, _) in found.items())
    return module_size + more, [name for name, _ in found.values()], [module for _, module in found.values()]


def get_parameter_device(parameter: torch.nn.Module) -> torch.device:
    """Where a module's first parameter is."""
    return next(iter(parameter.parameters())).device


def check_tied_parameters_in_config(model: torch.nn.Module) -> bool:
    """Does a transformers model's configuration tie its embeddings?"""
    config = getattr(model, "config", None)
    ties = getattr(config, "tie_word_embeddings", False) and hasattr(model, "get_output_embeddings")
    return bool(ties and model.get_output_embeddings() is not None)  # type: ignore[operator]


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn of tied parameters that a map puts on different devices."""
    for names in tied_params:
        places = {name: _place(name, device_map) for name in names}
        if len(set(places.values())) > 1:
            log.warning("tied parameters are on different devices: %s", places)


def _place(name: str, device_map: Mapping[str, Any]) -> Any:
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def check_os_kernel() -> None:
    """Nothing: what it warns of is Linux before 5.5, which torch does not run on."""
