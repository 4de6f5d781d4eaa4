"""Private names of torch that offload uses, each with the reason and what would replace it. A test resolves all names."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# Why each name is used:
#
# - TorchDispatchMode sees the storages of every operation. A torch function mode misses those made in C++.
# - is_traceable_wrapper_subclass finds the inner tensors of quantized weights. There is no public query.
# - tree_leaves, tree_map_only walk containers as torch itself does. A public pytree module would replace them.

DisableTorchFunction = torch._C.DisableTorchFunction
"""Context in which torch function modes and subclasses do not intercept operations. There is no public equivalent."""
