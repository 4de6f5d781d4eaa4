"""Models for scripts: unwrapping, naming and measuring their parts, setting tensors, those that share memory, and files."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import nn

from headway.compat.accelerate.state import collectives
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger
from headway.weights.export import save_object

log = get_logger(__name__)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The user's own module out of DDP, DataParallel or FSDP1 of the user's making; what prepare() gave back is that already.

    Args:
        model: a module.
        keep_fp32_wrapper: accepted for the name's sake: outputs are never converted.
        keep_torch_compile: False: also take off torch.compile's wrapper.
        recursive: also unwrap its submodules, in place.
    """
    compiled = model if "_orig_mod" in getattr(model, "_modules", ()) else None  # what torch.compile(model) returned
    inner = model._orig_mod if compiled is not None else model
    while _wraps(inner):
        inner = inner.module
    if recursive:
        for name, child in list(inner.named_children()):
            setattr(inner, name, extract_model_from_parallel(child, recursive=True))
    if compiled is None or not keep_torch_compile:
        return inner
    compiled._orig_mod = inner
    return compiled


def _wraps(model: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model of it cannot be there before
    kinds: tuple[type, ...] = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    if fsdp is not None:
        kinds += (fsdp.FullyShardedDataParallel,)
    return isinstance(model, kinds)


def is_peft_model(model: Any) -> bool:
    """Is it a PeftModel, wrapped or not? peft is not imported to know: no such model could be there without it."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel)


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Is one of its parameters a DTensor?"""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(each, tensor.DTensor) for each in model.parameters())


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type | None:
    """The class called `name` among the module's and its submodules'; None where there is none."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """The model's modules, children before their parents; the model comes last.

    Args:
        model: a module.
        return_fqns: pairs of name and module instead.
    """
    waiting: list[tuple[str, torch.nn.Module]] = [("", model)]
    ordered = []
    while waiting:
        prefix, module = waiting.pop()
        waiting += [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
        ordered.append((prefix, module) if return_fqns else module)
    return ordered[::-1]


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer on `device`, with `value` where one is given; a parameter stays a parameter of its class.

    Args:
        module: the module, or one above it.
        tensor_name: the tensor's name from there, "encoder.0.weight" say.
        device: where it goes.
        value: its new value; needed where it has none yet (meta device).
        dtype: of the value; None: that of the tensor there. Whole numbers and truth values keep theirs.
        fp16_statistics: bitsandbytes' statistics, kept with the parameter as `SCB`.
        tied_params_map: values by where they lie, and the copies of them that are on devices already: such a one is used.
        non_blocking: do not wait for the copy.
        clear_cache: accepted for the name's sake: emptying the cache for each tensor only costs time.

    Raises:
        ConfigError: no such tensor, a value of another shape, or none for a tensor without memory.
    """
    owner, _, name = tensor_name.rpartition(".")
    try:
        holder = module.get_submodule(owner)
    except AttributeError as error:
        raise ConfigError(f"{type(module).__name__} has no tensor {tensor_name!r}: {error}") from None
    held: dict[str, Any] = holder._parameters if name in holder._parameters else holder._buffers
    old = held.get(name)
    if old is None:
        raise ConfigError(f"{type(module).__name__} has no parameter or buffer {tensor_name!r}")
    target = torch.device(device)
    given = old if value is None else value
    tied = tied_params_map.get(given.data_ptr(), {}).get(target) if tied_params_map else None
    if tied is not None:
        held[name] = tied
        return
    _check(tensor_name, old, target, value)
    with torch.no_grad():
        new = given.to(_dtype(old, value, dtype)).to(target, non_blocking=non_blocking)
        if isinstance(old, nn.Parameter) and (value is not None or new is not old):
            new = type(old)(new.detach(), requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
    held[name] = new
    if fp16_statistics is not None:
        new.__dict__["SCB"] = fp16_statistics.to(target)


def _dtype(old: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    if value is None or dtype is None:
        return old.dtype
    return dtype if value.is_floating_point() or value.is_complex() else value.dtype


def _check(name: str, old: torch.Tensor, device: torch.device, value: torch.Tensor | None) -> None:
    if value is None and old.is_meta and device.type != "meta":
        raise ConfigError(f"{name} has no memory yet (meta device), so it cannot go to {device} as it is; give value=")
    if value is not None and value.shape != old.shape:
        raise ConfigError(
            f"{name} has the shape {tuple(old.shape)}, but value has {tuple(value.shape)}; give one of its shape"
        )


WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


def save(obj: Any, f: str | Path, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object with torch.save (or a dict of tensors with safetensors), from the main process only.

    Args:
        obj: the object.
        f: the file.
        save_on_each_node: from the first process of every machine.
        safe_serialization: with safetensors.
    """
    runtime = collectives().runtime
    if runtime.is_local_main_process if save_on_each_node else runtime.is_main_process:
        save_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """torch.load, which runs no code of the file's (`weights_only=True`) unless told so; numpy arrays may be in it.

    Args:
        f: a file or its path.
        map_location: where tensors go.
        kwargs: for torch.load.
    """
    kinds = [type(numpy.dtype(kind)) for kind in ("uint8", "uint32", "int32", "int64", "float32", "float64", "bool")]
    reconstruct: Any = numpy.empty(0).__reduce__()[0]
    with torch.serialization.safe_globals([reconstruct, numpy.ndarray, numpy.dtype, *kinds]):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def load_state_dict(checkpoint_file: str | Path, device_map: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a weights file by name, safetensors or torch's own.

    Args:
        checkpoint_file: the file.
        device_map: a map whose parts lie on one device: tensors go there. None: the CPU.

    Raises:
        UnsupportedError: a map over several devices.
    """
    devices = set((device_map or {"": "cpu"}).values())
    if len(devices) > 1:
        raise UnsupportedError(
            f"load_state_dict got a device_map over {len(devices)} devices; use load_checkpoint_in_model(model, file, "
            "device_map), which puts each tensor where it belongs"
        )
    device = torch.device(devices.pop())
    if str(checkpoint_file).endswith(".safetensors"):
        return load_file(checkpoint_file, device=str(device))
    loaded: dict[str, torch.Tensor] = torch.load(checkpoint_file, map_location=device, weights_only=True)
    return loaded


# -------------------------------------------------------------------- what scripts ask about a model's parts


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


# -------------------------------------------------------------------- tensors that share memory


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
