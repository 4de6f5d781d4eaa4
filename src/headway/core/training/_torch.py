"""Private torch names that the training code uses, with the reason why no public name can replace them.

A test checks that all of them exist.
"""

import torch
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.nn.utils.stateless import _functional_call
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils.data.dataloader import _BaseDataLoaderIter

# Why each name is used:
#
# - is_fake identifies optimizers of memory forecasts, whose parameters have no values. torch has no public query.
# - is_traceable_wrapper_subclass finds tensors that consist of other tensors, such as quantized weights. torch has no
#   public query.

functional_call = _functional_call
"""Implementation of `torch.func.functional_call`. If its frame is on the call stack, a model is being called with
substituted parameters.
"""

peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
"""Returns the active torch.func transform, such as vmap or grad, or None if no transform is active. torch has no public
query.
"""

foreach_norm = torch._foreach_norm
"""Computes the norm of each tensor in a list. `torch.nn.utils.get_total_norm` returns only one norm over the whole
list.
"""

DataLoaderIterator = _BaseDataLoaderIter
"""Base class of DataLoader iterators. It is used to find the live iterators of unprepared loaders in memory.

A patch of the public `DataLoader.__iter__` would miss the iterators of loops that have already started.
"""

DATA_LOADER_ITERATOR_ATTRIBUTES = ("_dataset", "_index_sampler")
"""Attributes of a `DataLoaderIterator` that hold its dataset and its sampler.

An iterator has no public reference to its loader.
"""
