"""Private names of torch that pipelines use, each with the reason and a possible replacement.

Names of `torch.distributed.pipelining` are in `LAZY_NAMES`, as "module:name". Only `stage.py` imports them, because
torch's schedules take a second to import. A test checks that all names exist.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

# is_fake: a forecast on fake tensors has no values to compare. A public module for fake tensors would replace it.
# is_traceable_wrapper_subclass: finds tensors that consist of other tensors, such as torchao's quantized weights. torch has no
# public query.

LAZY_NAMES = (
    # Compute a stage's gradients as torch's schedules expect: all at once, or separately for inputs and weights (zero bubble).
    # The public `PipelineStage` uses them, but needs a module per stage.
    "torch.distributed.pipelining._backward:stage_backward",
    "torch.distributed.pipelining._backward:stage_backward_input",
    "torch.distributed.pipelining._backward:stage_backward_weight",
    # Base class that torch's schedules accept. The public `PipelineStage` fixes all shapes; a public base class would replace it.
    "torch.distributed.pipelining.stage:_PipelineStageBase",
    # Shows which outputs share memory with other tensors and must be copied. There is no public query.
    "torch:Tensor._is_view",
)

MODULE_ATTRIBUTES = ("_buffers", "_parameters")
"""Private dicts of a module that contain its buffers and parameters.

In modules of other stages, these dicts contain meta tensors, which have no values.
"""


def get_total_norm() -> Any:
    """Return the function with which torch's `clip_grad_norm_` computes the norm of all gradients."""
    return clip_grad._get_total_norm


def replace_total_norm(function: Any) -> None:
    """Replace the function with which torch's `clip_grad_norm_` computes the norm of all gradients.

    Scripts import `clip_grad_norm_` itself in several ways, but it always looks up this private name when it is called.
    A hook of torch would replace it. The function is public as `torch.nn.utils.get_total_norm`, which is replaced, too.
    """
    clip_grad._get_total_norm = function
    torch.nn.utils.get_total_norm = function
