"""Private torch names that strategies use, with the reason why no public name can replace them.

This file defines the names that are imported or called as functions. Attributes and methods of torch's own objects
are read where they are needed, and are only listed here: in `LAZY_NAMES` ("module:class.name") and in the tables of
attributes that exist only on instances. Attributes of `fully_shard`'s objects are read only in
`fully_sharded/fsdp_state.py` and `fully_sharded/fsdp_collectives.py`. A test checks that all names exist.
"""

from typing import Any

import torch
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves

from headway.common.optional import LazyModule

debug = LazyModule("torch.distributed.tensor.debug")

# Why each name is used:
#
# - is_traceable_wrapper_subclass finds parameters that consist of other tensors, such as quantized parameters. torch
#   has no public query.
# - tree_leaves traverses outputs in the same way as torch itself. torch has no public pytree module.

broadcast_coalesced = _broadcast_coalesced
"""DDP's own broadcast of buffers, which sends many tensors in one message. The public broadcast sends one per
tensor.
"""

BatchNormBase = torch.nn.modules.batchnorm._NormBase
"""Base class of all layers with running statistics. torch has no public base class for them."""

local_scalar_dense = torch.ops.aten._local_scalar_dense.default
"""Operator behind `tensor.item()`. DTensor has no implementation of it for partial values."""

foreach_mul_ = torch._foreach_mul_
"""Multiplies many tensors in one kernel per group.

Public functions on lists of tensors would replace this and the other three `foreach` functions.
"""
foreach_div_ = torch._foreach_div_
"""Divides many tensors in one kernel per group."""
foreach_copy_ = torch._foreach_copy_
"""Copies many tensors in one kernel per group."""
foreach_norm = torch._foreach_norm
"""Computes the norms of many tensors in one kernel per group."""


def clear_sharding_cache() -> None:
    """Clear DTensor's cache of operator results, which can refer to a mesh whose process groups have been destroyed.

    torch has no public function for this.
    """
    debug._clear_sharding_prop_cache()


_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
LAZY_NAMES = (
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    # Splits one mesh axis into two named ones. A public version of this method is planned in torch.
    "torch.distributed.device_mesh:DeviceMesh._unflatten",
    # This rank's shard of a DTensor, without autograd. `to_local()` adds a node to the graph.
    "torch.distributed.tensor:DTensor._local_tensor",
    # DTensor's table of handlers by operator. `tensor.item()` of a partial sum needs one, before sharding rules apply.
    "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",
    # The layout of DDP's buckets, which affects the last bits of sums. There is no public query.
    "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
    "torch._C._distributed_c10d:Reducer._rebuild_buckets",
    # Whether a backward has left gradients unreduced. torch has no public query.
    "torch._C._distributed_c10d:Reducer._check_reducer_finalized",
    # Counter of in-place changes, and hooks on a tensor, which sharding would lose. There is no public query.
    "torch:Tensor._version",
    "torch:Tensor._backward_hooks",
    "torch:Tensor._post_accumulate_grad_hooks",
    # The tensor of which another tensor is a view. There is no public query.
    "torch:Tensor._base",
    # fully_shard: unreduced gradients, gathered parameters and the process groups of its collectives. torch's public methods
    # gather and free units, but show neither gradients that wait for the window's end nor what a collective sends.
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    f"{_STATE}._lazy_init",
    f"{_STATE}._post_forward",
    # Puts hooks on the outputs of a unit, but not on tensors in objects that are no containers, and not so that they remain on
    # a view that is changed in place. The second name is the hook.
    f"{_STATE}._register_pre_backward_hook",
    f"{_STATE}._pre_backward",
    f"{_STATE}._root_post_backward_final_callback",
    f"{_GROUP}._all_gather_process_group",
    f"{_GROUP}._all_reduce_process_group",
    f"{_GROUP}._init_mp_dtypes",
    f"{_GROUP}._is_hsdp",
    f"{_GROUP}._reduce_scatter_process_group",
    f"{_GROUP}._reset_iter_state",
    f"{_GROUP}.post_backward",
    f"{_PARAMETER}.to_accumulated_grad_if_needed",
)
"""Private names that must not be imported early, and private attributes and methods of torch's classes."""

GROUP_ATTRIBUTES = (
    "_all_gather_comm",
    "_orig_dtype",
    "_reduce_scatter_comm",
    "all_reduce_grads",
    "fsdp_params",
    "reduce_grads",
)
"""Attributes of fully_shard's parameter groups. They exist once the model has run a forward."""
PARAMETER_ATTRIBUTES = ("_param_fqn", "_unsharded_param", "sharded_param", "unsharded_accumulated_grad")
"""Attributes of fully_shard's record of a parameter (`FSDPParam`). They exist once the model has run a forward."""
MODULE_ATTRIBUTES = ("_buffers", "_parameters")
"""Dicts of a module's own tensors, in which a tensor can be replaced without the checks of `setattr` on the module."""


def list_param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of one fully_shard unit from its state.

    In older versions of torch, a unit has at most one group.
    """
    found = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return list(filter(None, found))
