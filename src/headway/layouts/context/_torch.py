"""Private names of torch that context parallelism uses, each with the reason and a possible replacement.

A test checks that all names exist.
"""

import torch
from torch._subclasses.fake_tensor import is_fake as is_fake

# is_fake: in a forecast on fake tensors there are no values, so the dry run on a few tokens compares only shapes. A
# public module for fake tensors would replace it.

flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Attention kernel that also returns the log-sum-exp of the scores, which is needed to merge partial results.

`scaled_dot_product_attention` does not return it. A public function that does would replace this one.
"""
flash_attention_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Backward of `flash_attention_on_cpu`."""

RING_MODULE = "torch.distributed.tensor.experimental._attention"
"""Module with torch's ring attention. It is imported only if the device has a kernel for it.

The public `context_parallel` also splits buffers, and needs the shapes of all inputs for that.
"""
RING_NAMES = (
    "_ContextParallel", "_enable_context_parallel_dispatcher", "_disable_context_parallel_dispatcher", "_cp_options",
    "set_rotate_method",
)  # fmt: skip
"""Names of `RING_MODULE` that are used. If one is missing, keys and values are all-gathered instead."""
LAZY_NAMES = tuple(f"{RING_MODULE}:{name}" for name in RING_NAMES)
