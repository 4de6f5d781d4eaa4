"""Private names of torch that tensor and expert parallelism use, each with the reason and a possible replacement.

Names that are imported only when they are used are in `LAZY_NAMES`, as "module:class.name". A test checks that all
names exist.
"""

import torch
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

# Why each name is used:
#
# - is_fake: a forecast on fake tensors has no values, so checks that need values are skipped. A public module for fake tensors
#   would replace it.
# - unset_fake_temporarily: a plan is tested with real values on a copy of a module, even while a forecast uses fake tensors.
# - is_traceable_wrapper_subclass finds weights that torchao has quantized. torch has no public query.

functional_collectives = torch.ops._c10d_functional
"""Collectives that return new tensors, so that `torch.compile` can trace them in compiled blocks.

The public collectives of `torch.distributed` write into tensors and cause graph breaks. Public functional collectives
would replace these.
"""

LAZY_NAMES = (
    # Placement for several matrices that are packed along one dimension and sharded separately. There is no public class.
    "torch.distributed.tensor.placement_types:_StridedShard",
    # Applies a style of the user's own plan to a module. `parallelize_module` would apply a whole plan at once.
    "torch.distributed.tensor.parallel:ParallelStyle._apply",
)
"""Private classes and methods of torch that are imported only when they are used, as "module:class.name"."""

MODULE_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters")
"""Private dicts of a module that contain its hooks, submodules and parameters.

During a forward, local tensors replace the parameters in these dicts. Hooks are removed from the copy on which a plan
is tested.
"""
