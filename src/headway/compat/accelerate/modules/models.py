"""Helper functions for scripts: unwrap and inspect models, set tensors, and read and write weights."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import nn

from headway.compat.accelerate.state import get_collectives
from headway.core.weights.export import save_object
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the original module inside DDP, DataParallel or FSDP1 wrappers.

    A model that Headway prepared has no such wrapper, and is returned unchanged. If torch.compile's wrapper is kept, it
    is returned after its original module has replaced the wrappers inside, in place.

    Args:
        model: Model, wrapped or not.
        keep_fp32_wrapper: Ignored, because Headway does not wrap a model's forward to convert outputs.
        keep_torch_compile: Whether to keep torch.compile's wrapper. Default: True.
        recursive: Whether to also unwrap submodules, in place. Default: False.
    """
    compiled = model if "_orig_mod" in getattr(model, "_modules", ()) else None  # what torch.compile(model) returned
    inner = model._orig_mod if compiled is not None else model
    while _is_wrapper(inner):
        inner = inner.module
    if recursive:
        for name, child in list(inner.named_children()):
            setattr(inner, name, extract_model_from_parallel(child, recursive=True))
    if compiled is None or not keep_torch_compile:
        return inner
    compiled._orig_mod = inner
    return compiled


def _is_wrapper(model: Any) -> bool:
    """Whether a model is wrapped by torch's DDP, DataParallel or FSDP."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # no FSDP model can exist before this module is imported
    wrapper_classes: tuple[type, ...] = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    if fsdp is not None:
        wrapper_classes += (fsdp.FullyShardedDataParallel,)
    return isinstance(model, wrapper_classes)


def is_peft_model(model: Any) -> bool:
    """Whether the model, or the module inside its wrappers, is a PeftModel.

    The check does not import peft. If peft has not been imported, no such model can exist.
    """
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel)


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Whether any parameter of the model is a DTensor."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(each, tensor.DTensor) for each in model.parameters())


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type | None:
    """Return the class named `name` of a module or one of its submodules, or None if there is none."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return a list of a model's modules, in which children precede their parents. The model itself is last.

    Args:
        model: Model to traverse.
        return_fqns: Whether to return pairs of (name, module) instead of modules. Default: False.
    """
    remaining: list[tuple[str, torch.nn.Module]] = [("", model)]
    ordered = []
    while remaining:
        prefix, module = remaining.pop()
        remaining += [(f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_children()]
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
    """Move a parameter or buffer to a device, optionally with a new value. A parameter keeps its class.

    Args:
        module: Module that contains the tensor, itself or in a submodule.
        tensor_name: Name of the tensor relative to the module, such as "encoder.0.weight".
        device: Device to move it to.
        value: New value. Required if the tensor is on the meta device. None (the default): the current value.
        dtype: Dtype to which a new floating-point value is converted. A new value of integers or booleans then keeps
            its dtype. None: any new value is converted to the tensor's current dtype. Ignored without a new value.
        fp16_statistics: Quantization statistics of bitsandbytes, stored as the parameter's attribute `SCB`.
            None (the default): none.
        tied_params_map: Existing copies of tied tensors, by data pointer and device. Such a copy is used instead of a
            new one. None (the default): no such copies.
        non_blocking: Whether to copy asynchronously. Default: False.
        clear_cache: Ignored, because emptying the CUDA cache for each tensor would only cost time.

    Raises:
        ConfigError: If there is no such tensor, or if the value's shape differs from the tensor's. Also if a tensor on
            the meta device gets no value.
    """
    owner_name, _, name = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
    except AttributeError as error:
        raise ConfigError(f"{type(module).__name__} has no tensor {tensor_name!r}: {error}") from None
    tensors: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    old = tensors.get(name)
    if old is None:
        raise ConfigError(f"{type(module).__name__} has no parameter or buffer {tensor_name!r}")
    target = torch.device(device)
    source = old if value is None else value
    tied = tied_params_map.get(source.data_ptr(), {}).get(target) if tied_params_map else None
    if tied is not None:
        tensors[name] = tied
        return
    _check_new_value(tensor_name, old, target, value)
    with torch.no_grad():
        new = source.to(_choose_dtype(old, value, dtype)).to(target, non_blocking=non_blocking)
        if isinstance(old, nn.Parameter) and (value is not None or new is not old):
            new = type(old)(new.detach(), requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
    tensors[name] = new
    if fp16_statistics is not None:
        new.__dict__["SCB"] = fp16_statistics.to(target)


def _choose_dtype(old: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor's new value.

    Args:
        old: Current tensor.
        value: New value, or None to keep the current one.
        dtype: Dtype for floating-point and complex values. None: the dtype of the current tensor, for any value.
    """
    if value is None or dtype is None:
        return old.dtype
    return dtype if value.is_floating_point() or value.is_complex() else value.dtype


def _check_new_value(name: str, old: torch.Tensor, device: torch.device, value: torch.Tensor | None) -> None:
    """Raise `ConfigError` if a tensor without values gets none, or if the shape of the new value differs."""
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
    """Write an object with torch.save, or a dict of tensors as safetensors, on the main process only.

    Args:
        obj: Object to write.
        f: Path of the file.
        save_on_each_node: Whether the first process of every machine writes the file, instead of only the main process.
            Default: False.
        safe_serialization: Whether to write safetensors. Default: False.
    """
    runtime = get_collectives().runtime
    if runtime.is_local_main_process if save_on_each_node else runtime.is_main_process:
        save_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return the contents of a file that torch.save wrote. By default, no code in the file is executed.

    In addition to what torch.load accepts with `weights_only=True`, NumPy arrays are accepted.

    Args:
        f: File or path.
        map_location: Device for tensors, as in torch.load. None (the default): the device from which each was saved.
        kwargs: Other arguments of torch.load. `weights_only=False` allows code in the file to be executed.
    """
    dtype_classes = [
        type(numpy.dtype(name)) for name in ("uint8", "uint32", "int32", "int64", "float32", "float64", "bool")
    ]
    reconstruct: Any = numpy.empty(0).__reduce__()[0]
    with torch.serialization.safe_globals([reconstruct, numpy.ndarray, numpy.dtype, *dtype_classes]):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def load_state_dict(checkpoint_file: str | Path, device_map: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a weights file by name, from safetensors or torch's format.

    Args:
        checkpoint_file: Path of the file.
        device_map: Device map with a single device, to which the tensors are loaded. None: the CPU.

    Raises:
        UnsupportedError: If the device map contains several devices.
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


# -------------------------------------------------------------------- properties of a model's parts


def get_non_persistent_buffers(module: torch.nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of a module's buffers that are not part of its state dict.

    Args:
        module: Module that has the buffers.
        recurse: Whether to include buffers of submodules. Default: False.
        fqns: Whether to return full names, such as "encoder.mask" instead of "mask". Default: False.
    """
    names = set(module._non_persistent_buffers_set)
    if recurse:
        for path, submodule in module.named_modules():
            names |= {f"{path}.{name}" if fqns else name for name in submodule._non_persistent_buffers_set}
    return names


def get_module_leaves(module_sizes: Iterable[str]) -> list[str]:
    """Return those names that are not parents of other names. For "", "a" and "a.b", the result is ["a.b"]."""
    names = list(module_sizes)
    parents = {name.rpartition(".")[0] for name in names}
    return [name for name in names if name and name not in parents]


def is_repeated_blocks(module: torch.nn.Module) -> bool:
    """Whether the module is a ModuleList whose items all have the same class."""
    return isinstance(module, torch.nn.ModuleList) and len({type(each) for each in module}) == 1


def has_repeated_blocks(module: torch.nn.Module) -> bool:
    """Whether the module contains a ModuleList whose items all have the same class."""
    return any(is_repeated_blocks(each) for each in module.modules())


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are equal. A missing index counts as 0, and indices of CPUs are ignored."""
    return first_device.type == second_device.type and (
        first_device.type == "cpu" or (first_device.index or 0) == (second_device.index or 0)
    )


def find_first_last_linear_layers(model: torch.nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer, or None for both if there is none."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: torch.nn.Module, fqn: str, layers_to_filter: Iterable[str | None]) -> bool:
    """Whether a layer may be converted to float8.

    False if `layers_to_filter` contains the layer's name. Also False for a linear layer whose input or output size is
    not divisible by 16.

    Args:
        module: Layer.
        fqn: Name of the layer in the model.
        layers_to_filter: Names of layers that are not converted. Entries that are None match no layer.
    """
    if isinstance(module, torch.nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: torch.nn.Module, fqn: str) -> bool:
    """Whether a layer may be converted to float8. False for the first and the last linear layer in `module`.

    Also False for a linear layer whose input or output size is not divisible by 16. To exclude the first and the last
    layer of an entire model, pass their names to `filter_linear_layers`.

    Args:
        module: Layer, or a module that contains linear layers.
        fqn: Name of the layer.
    """
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def has_ao_layers(model: torch.nn.Module) -> bool:
    """Whether torchao has converted any layer of the model to float8."""
    return any(type(each).__module__.startswith("torchao.float8") for each in model.modules())


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, torch.nn.Module]],
) -> tuple[int, list[str], list[torch.nn.Module]]:
    """Return the total size of a module and of those modules that share parameters with it.

    Args:
        tied_params: Names under which other modules contain the shared parameters.
        module_size: Size of the module itself in bytes.
        module_sizes: Sizes of modules and parameters in bytes, by name.
        modules_to_treat: Pairs of (name, module), in which the other modules are searched for.

    Returns:
        Tuple of (total size in bytes, names of the other modules, these modules). A shared parameter counts once.
    """
    module_by_tied_name = {}
    for tied in tied_params:  # a missing module is ignored, for which Accelerate raises IndexError
        item = next((each for each in modules_to_treat if tied.startswith(f"{each[0]}.")), None)
        if item is not None:
            module_by_tied_name[tied] = item
    additional_bytes = sum(module_sizes[name] - module_sizes[tied] for tied, (name, _) in module_by_tied_name.items())
    return (
        module_size + additional_bytes,
        [name for name, _ in module_by_tied_name.values()],
        [module for _, module in module_by_tied_name.values()],
    )


def get_parameter_device(parameter: torch.nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(iter(parameter.parameters())).device


def check_tied_parameters_in_config(model: torch.nn.Module) -> bool:
    """Whether a transformers model's configuration ties the input and output embeddings."""
    config = getattr(model, "config", None)
    ties = getattr(config, "tie_word_embeddings", False) and hasattr(model, "get_output_embeddings")
    return bool(ties and model.get_output_embeddings() is not None)  # type: ignore[operator]


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn about tied parameters that a device map places on different devices."""
    for names in tied_params:
        places = {name: _find_place(name, device_map) for name in names}
        if len(set(places.values())) > 1:
            log.warning("tied parameters are on different devices: %s", places)


def _find_place(name: str, device_map: Mapping[str, Any]) -> Any:
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def check_os_kernel() -> None:
    """Do nothing. Accelerate warns about Linux kernels before 5.5, which supported versions of torch do not run on."""


# -------------------------------------------------------------------- tensors that share memory


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return a tuple of (device, address, size in bytes) that identifies a tensor's storage.

    The tuples of tensors that share a storage are equal.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict that safetensors can store, with contiguous tensors and only one name per storage.

    All names of a shared storage but the first are left out with a warning. Values that are not tensors are kept.
    """
    cleaned: dict[str, Any] = {}
    name_by_storage: dict[Any, str] = {}
    left_out = []
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            if value.untyped_storage().nbytes() and name_by_storage.setdefault(id_tensor_storage(value), name) != name:
                left_out.append(name)
                continue
            value = value.contiguous()
        cleaned[name] = value
    if left_out:
        log.warning("left out of the file, as they share the memory of others: %s", ", ".join(sorted(left_out)))
    return cleaned


def retie_parameters(model: torch.nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Retie parameters that became separate tensors when a model was loaded.

    In each group, all parameters are replaced by the first one that is not on the meta device. A group without such a
    parameter is not changed.

    Args:
        model: Model with the parameters.
        tied_params: Groups of parameter names that `find_tied_parameters` returned before the load.
    """
    for group in tied_params:
        locations = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in group]
        parameters = [getattr(module, name, None) for module, name in locations]
        shared = next((each for each in parameters if each is not None and not each.is_meta), None)
        if shared is not None:
            for module, name in locations:
                setattr(module, name, shared)
