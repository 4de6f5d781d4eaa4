"""Accelerate's private functions and constants that other projects import, under their names in Accelerate."""

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch

from headway.compat.accelerate.data.batches import broadcast, gather, gather_object
from headway.compat.accelerate.modules.models import is_peft_model
from headway.core.runtime.collectives.tree import Tree
from headway.errors import ConfigError

_PYTORCH_DATALOADER_KWARGS = {
    "batch_size": 1, "shuffle": False, "sampler": None, "batch_sampler": None, "num_workers": 0, "collate_fn": None,
    "pin_memory": False, "drop_last": False, "timeout": 0, "worker_init_fn": None, "multiprocessing_context": None,
    "generator": None, "prefetch_factor": 2, "persistent_workers": False, "pin_memory_device": "", "in_order": True,
}  # fmt: skip
DYNAMO_BACKENDS = [
    "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT", "ONNXRT",
    "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORHCHXLA_TRACE_ONCE", "TVM",
]  # fmt: skip
TYPE_CHECKING = False
USE_TORCH_XLA = True
_TRUTHS = {"True": True, "False": False}


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, None, bool]:
    """Return the arguments of `launch_command` unchanged, because `headway launch` validates them.

    Returns:
        The arguments; None, because `headway launch` reads the config file itself; and False, because no precision was
        read from that file.
    """
    return args, None, False


def _convert_nargs_to_dict(nargs: Sequence[str]) -> dict[str, Any]:
    """Return script arguments of the form `--name value` as a dict.

    Texts that are numbers or booleans are converted to Python numbers and booleans.

    Raises:
        ConfigError: If an option has no value.
    """
    parser = argparse.ArgumentParser(add_help=False)
    for index, argument in enumerate(nargs):
        if argument.startswith("-"):
            if index + 1 == len(nargs) or nargs[index + 1].startswith("-"):
                raise ConfigError(
                    "SageMaker does not support argparse actions for `store_true` or `store_false`. Please define explicit "
                    f"types: {argument} has no value"
                )
            parser.add_argument(argument, type=_convert_number)
    return {name: _TRUTHS.get(value, value) for name, value in vars(parser.parse_args(nargs)).items()}


def _convert_number(text: str) -> float | int | str:
    """Return the number that a text contains, as an int if it is a whole number, or the text itself."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Sequence[str] = ()
) -> argparse.Namespace:
    """Return a namespace with the arguments that a parser defines. Values come from `args` if it contains them.

    Args:
        args: Namespace whose values are used. Arguments that the parser does not define are left out.
        parser: Parser that defines the arguments of the result.
        default_args: Command line from which the parser takes values that `args` lacks. Default: (), the parser's
            defaults.
    """
    filtered, _ = parser.parse_known_args(list(default_args))
    for name in vars(filtered).keys() & vars(args).keys():
        setattr(filtered, name, getattr(args, name))
    return filtered


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    """Whether a package is installed and can be found by an import. A directory without metadata is not sufficient."""
    if importlib.util.find_spec(pkg_name) is None:
        return False
    return any(metadata.distributions(name=metadata_name or pkg_name))


def _get_proper_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the dtype for a name such as "torch.float16" or "float16". A dtype is returned unchanged."""
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


def _get_param_device(param: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of a parameter according to a device map.

    It is the entry for the parameter, else for the innermost module that has an entry and contains the parameter.

    Raises:
        ConfigError: If there is no such entry.
    """
    name = param
    while name not in device_map:
        if not name:
            raise ConfigError(f"The `device_map` does not contain the module {param}.")
        name = name.rpartition(".")[0]
    return device_map[name]


def _gpu_gather(tensor: Tree) -> Tree:
    """Return the tensors of all processes, concatenated along dimension 0. All processes must call it.

    In a single-process run, the input is returned unchanged.
    """
    return gather(tensor)


def _gpu_gather_object(object: Any) -> Any:  # noqa: A002 - its name in Accelerate
    """Return the objects of all processes in one list, in rank order. All processes must call it.

    In a single-process run, the input is returned unchanged.
    """
    return gather_object(object)


def _gpu_broadcast(data: Tree, src: int = 0) -> Tree:
    """Copy the values of process `src` into the tensors of all processes, in place, and return the tensors."""
    return broadcast(data, src)


def _get_model_state_dict(model: torch.nn.Module, adapter_only: bool = False, sd_options: Any = None) -> dict[str, Any]:
    """Return the state dict of a model, or only of its PEFT adapter.

    Args:
        model: Model whose state is read.
        adapter_only: Whether to leave out all weights except those of the PEFT adapter. No effect on other models.
            Default: False.
        sd_options: `StateDictOptions` of torch.distributed.checkpoint. None: use `model.state_dict()`.
    """
    is_adapter = adapter_only and is_peft_model(model)
    if is_adapter and (sd_options is None or not sd_options.full_state_dict):
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(model, adapter_name=model.active_adapter)  # type: ignore[no-any-return]
    if sd_options is None:
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(
        model, options=replace(sd_options, ignore_frozen_params=True) if is_adapter else sd_options
    )


def _set_model_state_dict(
    model: torch.nn.Module, state_dict: dict[str, Any], adapter_only: bool = False, sd_options: Any = None
) -> Any:
    """Load a state dict into a model, or only into its PEFT adapter, and return the missing and unexpected keys.

    Args:
        model: Model to load the state dict into.
        state_dict: State dict that `_get_model_state_dict` returned.
        adapter_only: Whether the state dict contains only a PEFT adapter. No effect on other models. Default: False.
        sd_options: `StateDictOptions` of torch.distributed.checkpoint. None: use `model.load_state_dict`.
    """
    is_adapter = adapter_only and is_peft_model(model)
    if is_adapter and (sd_options is None or not sd_options.full_state_dict):
        from peft import set_peft_model_state_dict

        return set_peft_model_state_dict(model, state_dict, adapter_name=model.active_adapter)
    if sd_options is None:
        return model.load_state_dict(state_dict)
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    return set_model_state_dict(
        model, state_dict, options=replace(sd_options, strict=False) if is_adapter else sd_options
    )
