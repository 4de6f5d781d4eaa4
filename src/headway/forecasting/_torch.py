"""Private names of torch that forecasting uses, each with the reason for its use and a possible replacement, if any.

Names that must not be imported early are in `LAZY_NAMES`, as "module:attribute". A test checks that all names exist in
the installed torch. Operators (`torch.ops.aten`) are not listed, because other tests call them.
"""

import torch
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses import fake_tensor as fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

# Why each name is used:
#
# - suggest_memory_format tells whether a kernel's output has channels last. There is no public equivalent.
# - fake_tensor, FakeTensor, FakeTensorMode, is_fake: shapes, strides and lifetimes without memory. TorchDynamo and
#   torch.export build on the same module. A public module for fake tensors would replace it.
# - FunctionalTensor wraps fake tensors while torch.compile traces.
# - TorchDispatchMode sees every operation, also those that autograd calls in C++. A torch function mode misses these.
# - is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type recognize subclasses with inner tensors, such as
#   DTensor.
# - tree_leaves, tree_map walk containers as torch itself does. A public pytree module would replace them.

disable_current_modes = _python_dispatch._disable_current_modes
"""Context manager that disables all dispatch modes. There is no public equivalent."""

DisableTorchFunction = torch._C.DisableTorchFunction
"""Context manager that keeps torch function modes and tensor subclasses from intercepting operations.

There is no public equivalent.
"""

ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard
"""Guard that excludes a dispatch key.

An overridden operation uses it to call the original operation without autocast, as torch's C++ kernels do. There is no
public equivalent.
"""
DispatchKey = torch._C.DispatchKey
"""Enumeration of the dispatcher's keys. `ExcludeDispatchKeyGuard` needs its keys to exclude autocast."""
DispatchKeySet = torch._C.DispatchKeySet
"""Set of the dispatcher's keys, the argument of `ExcludeDispatchKeyGuard`."""

has_kernel_for_dispatch_key = torch._C._dispatch_has_kernel_for_dispatch_key
"""Function that returns whether an operation has a kernel for a dispatch key.

With an autocast key, it shows whether autocast casts the operation's inputs. The alternative is a hand-copied table of
these operations. There is no public query.
"""

current_autograd_node = torch._C._current_autograd_node
"""Function that returns the autograd node whose backward is running. There is no public equivalent."""
current_graph_task_id = torch._C._current_graph_task_id
"""Function that returns the ID of the backward pass that is running in this thread, or -1 if none is running.

There is no public equivalent.
"""

foreach_norm = torch._foreach_norm
"""Function that computes the norms of many tensors at once.

`clip_grad_norm_(foreach=True)` uses it on a GPU, but refuses tensors on a CPU.
"""
foreach_mul_ = torch._foreach_mul_
"""Function that multiplies many tensors in place.

`clip_grad_norm_(foreach=True)` uses it on a GPU, but refuses tensors on a CPU.
"""
unscale_gradients_ = torch._amp_foreach_non_finite_check_and_unscale_
"""Kernel with which `GradScaler` unscales gradients.

It is called directly, because `GradScaler` reads tensor values, and fake tensors have none.
"""

LAZY_NAMES = (
    # The rule by which DDP's reducer forms its buckets. torch builds without distributed do not have it.
    "torch._C._distributed_c10d:_compute_bucket_assignment_by_size",
    # Compiled models: load the code that inductor generates without building kernels. Importing inductor takes seconds.
    "torch._functorch.config:patch",
    "torch._functorch.config:enable_autograd_cache",
    "torch._inductor.config:patch",
    "torch._inductor.config:fx_graph_cache",
    "torch._inductor.config:triton.cudagraphs",
    "torch._inductor.codecache:PyCodeCache.load_by_key_path",
    "torch._inductor.async_compile:AsyncCompile.cpp_pybinding",
    "torch._inductor.compile_fx:compile_fx",
    "torch._dynamo:reset",
    "torch._dynamo.eval_frame:OptimizedModule",
    "torch.utils._python_dispatch:TorchDispatchMode.ignore_compile_internals",
)
