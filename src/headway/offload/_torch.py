"""Private names of torch that offload uses, each with the reason and a possible replacement.

A test checks that all names exist.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# Why each name is used:
#
# - TorchDispatchMode sees every operation, also those that are called in C++. A torch function mode misses these.
# - is_traceable_wrapper_subclass recognizes quantized weights, which have inner tensors. There is no public query.
# - tree_leaves, tree_map_only walk containers as torch itself does. A public pytree module would replace them.

DisableTorchFunction = torch._C.DisableTorchFunction
"""Context manager that keeps torch function modes and tensor subclasses from intercepting operations.

There is no public equivalent.
"""
