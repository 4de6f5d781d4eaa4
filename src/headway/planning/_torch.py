"""Private names of torch that planning uses, each with the reason for its use and a possible replacement.

Names that must not be imported early are in `LAZY_NAMES`, as "module:attribute". A test resolves all names.
"""

from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

# Why each name is used:
#
# - FakeTensor, FakeTensorMode, is_fake: a rank's model, optimizer and step without memory. TorchDynamo and torch.export
#   build on the same module. A public module for fake tensors would replace it.
# - unset_fake_temporarily keeps tensors outside of the model, such as RNG states, real within a fake mode.
# - TorchDispatchMode sees every operation, also those that autograd calls in C++. A torch function mode misses these.
# - tree_leaves walks containers as torch itself does. A public pytree module would replace it.

disable_current_modes = _python_dispatch._disable_current_modes
"""Context manager that disables all dispatch modes. There is no public equivalent."""

LAZY_NAMES = (
    # The store of the process group that sends nothing. Its import registers the backend "fake", which no public
    # module does.
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    # Finds a process group by its name, which is an argument of operations. `get_process_group_ranks` needs the group.
    "torch.distributed.distributed_c10d:_resolve_process_group",
)
