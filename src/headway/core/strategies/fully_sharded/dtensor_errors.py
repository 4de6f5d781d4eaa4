"""Advice that is appended to torch's error messages about DTensors, sharded blocks and parameters of other pipeline stages."""

import os
import sys
import traceback

import torch

_DTENSOR_ADVICE = (
    "the parameters of a sharded model are DTensors outside of its forward, and torch cannot do everything with them. Call the model "
    "itself, not model.forward() or a part of it. For arithmetic of your own with parameters or gradients, take p.full_tensor() on "
    "all ranks. If the model's own forward uses a part of a block outside of the block's forward, pass "
    "ShardingOptions(reshard_after_forward=False), or units= with smaller modules. To average weights, use "
    "headway.ExponentialMovingAverage(model). If an optimizer's step failed, try foreach=False"
)
_METHOD_ADVICE = (
    "{name}() uses parameters of a sharded model outside of the model's forward, where they are DTensors. If it is a method of "
    "the prepared model, pass Accelerator(kwargs_handlers=[ShardingOptions(forward_methods=[{name!r}])])"
)
_ADVICE = {
    "got mixed torch.Tensor and DTensor": _DTENSOR_ADVICE,
    "is not supported for tensor subclasses": _DTENSOR_ADVICE,
    "appears to not have been used in the graph": "if these are parameters of a sharded model, torch.autograd.grad does not find "
    "them: accelerator.backward(loss) puts their gradients into p.grad",
    "of RegisterPostBackwardFunction is a view and is being modified inplace": (
        "a sharded block cannot change its input in place. Write x = x + y instead of x += y, and pass inplace=False to an "
        "activation or a dropout that gets the block's input"
    ),
    "Tensor on device meta is not on the expected device": (
        "in a pipeline, parameters of other stages are on the meta device. Compute the loss only from the model's outputs. "
        "Instead of a weight penalty, use the optimizer's weight_decay"
    ),
}
"""Advice for torch errors, by a substring of the error message."""


def explain_error(error: BaseException) -> str:
    """Return advice to append to a torch error message, or "" if there is none for this message.

    The advice is about DTensors, sharded blocks and the parameters of other pipeline stages.
    """
    innermost = traceback.extract_tb(error.__traceback__, limit=-1)
    is_from_dtensor = any("/torch/distributed/tensor/" in frame.filename.replace(os.sep, "/") for frame in innermost)
    default = _DTENSOR_ADVICE if is_from_dtensor else ""
    advice = next((advice for text, advice in _ADVICE.items() if text in str(error)), default)
    if advice == _DTENSOR_ADVICE:
        method = _find_called_method(error)
        advice = advice if method is None else _METHOD_ADVICE.format(name=method)
    return f"headway: {advice}" if advice else ""


def _find_called_method(error: BaseException) -> str | None:
    """Return the name of the method of a sharded model that the script has called, and that does not gather parameters.

    Returns:
        None if the error did not come from a method of a sharded model, or if the model's forward was called.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and isinstance(owner, fsdp.FSDPModule):
            name = frame.f_code.co_name
            is_forward = name == "forward" or getattr(torch.nn.Module, name, None) is not None
            gathers_already = name in vars(owner)  # register_fsdp_forward_method sets an attribute of the model
            is_candidate = callable(getattr(owner, name, None)) and not is_forward and not gathers_already
            return name if is_candidate else None
    return None
