"""Private torch names that the extras use, each with the reason for its use and possible replacements.

Names that must not be imported early are in `LAZY_NAMES`, as "module:attribute". A test resolves all names.
"""

import torch
from torch._C._autograd import _get_sequence_nr
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Why each name is used:
#
# - TorchDispatchMode sees every operation. A torch function mode misses those that autograd calls in C++.

disable_current_modes = _python_dispatch._disable_current_modes
"""Context that disables all dispatch modes. There is no public equivalent."""
get_current_dispatch_mode = _python_dispatch._get_current_dispatch_mode
"""Function that returns the innermost dispatch mode.

It is used to detect whether the user has entered another mode inside the mode that counts operations.
There is no public equivalent.
"""

get_sequence_number = _get_sequence_nr
"""Function that returns the sequence number that autograd will give to the next node.

In backward, a node's number shows which module's forward created the node. There is no public query.
"""
current_autograd_node = torch._C._current_autograd_node
"""Function that returns the autograd node whose backward is running. There is no public query."""

get_privateuse1_backend_name = torch._C._get_privateuse1_backend_name
"""Function that returns the name under which a vendor's package has registered its device type (PrivateUse1).

The public `torch.utils.rename_privateuse1_backend` can only set the name.
"""

foreach_norm = torch._foreach_norm
"""Function that returns the norm of each tensor in a list.

`torch.nn.utils.get_total_norm` returns only the total norm of all tensors.
"""
foreach_copy_ = torch._foreach_copy_
"""Function that copies many tensors at once. A loop of `copy_` launches a kernel for each tensor."""
foreach_add_ = torch._foreach_add_
"""Function that adds many tensors at once. A loop of `add_` launches a kernel for each tensor."""

foreach_lerp_ = torch._foreach_lerp_
"""Function that interpolates between two lists of tensors. A loop of `lerp_` launches a kernel for each tensor."""

LAZY_NAMES = (
    # Which backends torch.compile knows, and which modules it does not trace. `torch.compiler.list_backends` is public,
    # but leaves out experimental backends. Importing dynamo takes seconds.
    "torch._dynamo:list_backends",
    "torch._dynamo:trace_rules.check",
    # Whether inductor finds a C++ compiler, before the first batch needs it. There is no public query.
    "torch._inductor.cpp_builder:get_cpp_compiler",
    "torch._inductor.exc:InvalidCxxCompiler",
)
