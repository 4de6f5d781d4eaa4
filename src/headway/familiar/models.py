"""Questions about models: what wraps them, and what they are made of."""

import sys
from typing import Any

import torch


def extract_model_from_parallel(model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True,
                                recursive: bool = False) -> Any:  # fmt: skip
    """The user's own module out of DDP, DataParallel or FSDP1 of his own; what prepare() gave back is that already.

    Args:
        model: a module.
        keep_fp32_wrapper: accepted for the name's sake: outputs are never converted.
        keep_torch_compile: False: also take off torch.compile's wrapper.
        recursive: also unwrap its submodules, in place.
    """
    compiled = model if is_compiled_module(model) else None
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


def is_compiled_module(module: Any) -> bool:
    """Is it what torch.compile returned?"""
    return isinstance(module, torch.nn.Module) and "_orig_mod" in module._modules


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Is a submodule (or the module) what torch.compile returned?"""
    return any(is_compiled_module(each) for each in module.modules())


def is_peft_model(model: Any) -> bool:
    """Is it a PeftModel, wrapped or not? peft is not imported to know: no such model could be there without it."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel)


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Is one of its parameters a DTensor?"""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(each, tensor.DTensor) for each in model.parameters())


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type | None:
    """The class called `name` among the module's and its submodules'; None where there is no such one."""
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
