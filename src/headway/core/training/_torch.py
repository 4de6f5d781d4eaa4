"""Private names of torch that training uses, each with the reason and its possible public replacement.

A test checks that all of them exist.
"""

import torch
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.nn.utils.stateless import _functional_call
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils.data.dataloader import _BaseDataLoaderIter

# Why each name is used:
#
# - is_fake finds optimizers of forecasts, which have no values. There is no public query.
# - is_traceable_wrapper_subclass finds tensors that consist of others, such as quantized weights. There is no public
#   query.

functional_call = _functional_call
"""Implementation of `torch.func.functional_call`. If its frame is on the call stack, a model is being called with
substituted parameters.
"""

peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
"""Returns the current transform of torch.func (vmap, grad and the like), or None outside of them. torch has no public
query.
"""

foreach_norm = torch._foreach_norm
"""Computes the norm of each tensor in a list. `torch.nn.utils.get_total_norm` returns only one norm over the whole
list.
"""

DataLoaderIterator = _BaseDataLoaderIter
"""Base class of a DataLoader's iterators, with which live iterators of unprepared loaders are found in memory.

The public `DataLoader.__iter__` could only be observed before the loop starts.
"""

DATA_LOADER_ITERATOR_ATTRIBUTES = ("_dataset", "_index_sampler")
"""Attributes of `DataLoaderIterator` that hold its dataset and its sampler. An iterator has no public reference to its
loader.
"""
