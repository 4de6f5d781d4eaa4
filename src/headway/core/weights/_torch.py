"""Private torch names that the code for weights uses, each with the reason for its use and a possible replacement.

A test checks that all names exist in the installed torch. `Module._parameters`, `Module._buffers` and `Module._modules`
are used directly, without a name in this module, because torch's own packages rely on them. These dicts are needed to
find tensors that are None, and to replace a tensor without calling `__setattr__` of the user's class.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# `is_traceable_wrapper_subclass` detects tensors that wrap other tensors, such as quantized weights. torch has no
# public function for this.

COMPILED_MODULE = "_orig_mod"
"""Attribute of a `torch.compile(module)` wrapper that holds the module.

Names in the wrapper's state dict contain this component.
"""

LAZY_NAMES = (
    # Placement of a dimension that is sharded along two mesh axes out of order. torch has no public class for it.
    "torch.distributed.tensor.placement_types:_StridedShard",
    # Describe how a DTensor is split. `DTensor.from_local` would move an offloaded tensor to the mesh's device.
    "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "torch.distributed.tensor._dtensor_spec:TensorMeta",
)
"""Private torch names that are imported only when distributed tensors are used, as "module:attribute"."""


def build_like(like: "DTensor", local: torch.Tensor, stride: Sequence[int]) -> "DTensor":
    """Return a DTensor with the placements of `like` and the given local values, which stay on their device.

    Args:
        like: DTensor whose mesh, placements and global shape are used.
        local: Local values of this rank.
        stride: Stride of the full tensor.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(like.shape, tuple(stride), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def read_inner_float8(tensor: Any) -> torch.Tensor:
    """Return the tensor inside torchao's wrapper for weights that FSDP casts to float8 during the all-gather."""
    values: torch.Tensor = tensor._tensor
    return values


def list_load_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that a module calls before it loads a state dict. torch has no public method for this."""
    return list(module._load_state_dict_pre_hooks.values())


def add_load_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """Register a hook that a module calls before it loads a state dict.

    torch's public method binds the hook to the module. A deep copy of the module would then still pass the original
    module to the hook.
    """
    module._register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]


def export_by_own_method(module: nn.Module) -> dict[str, Any]:
    """Return the part of a state dict that a module itself exports, without hooks and submodules.

    Return an empty dict if its class does not override `_save_to_state_dict`. torch has no public method for this:
    `state_dict()` runs hooks, such as those that gather shards, and includes all submodules.
    """
    if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
        return {}
    exported: dict[str, Any] = {}
    module._save_to_state_dict(exported, "", True)
    return exported
