"""Private names of torch that tensor and expert parallelism use, each with the reason and a possible replacement.

Names that are imported only when they are used are in `LAZY_NAMES`, as "module:class.name". A test checks that all
names exist.
"""

import torch
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

# Why each name is used:
#
# - is_fake: a forecast on fake tensors has no values, so checks of values are left out. A public module for fake tensors would
#   replace it.
# - unset_fake_temporarily: tests of a plan compute real numbers on a small copy, also while a forecast uses fake tensors.

functional_collectives = torch.ops._c10d_functional
"""Collectives that return new tensors, which `torch.compile` can trace in compiled blocks.

The public collectives of `torch.distributed` write into tensors and cause graph breaks. Public functional collectives
would replace these.
"""

LAZY_NAMES = (
    # Placement of several matrices that are packed along one dimension, each of which is sharded. There is no public class.
    "torch.distributed.tensor.placement_types:_StridedShard",
    # Applies a style of the user's own plan to a module. `parallelize_module` would apply a whole plan at once.
    "torch.distributed.tensor.parallel:ParallelStyle._apply",
)
"""Private classes and methods of torch that are imported only when they are used, as "module:class.name"."""

MODULE_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters")
"""Private dicts of a module that contain its hooks, submodules and parameters.

Parameters are replaced in them during a forward. A copy on which a plan is tested must not have hooks.
"""
