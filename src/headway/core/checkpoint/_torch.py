"""Private torch names that checkpoints use, each with the reason for its use and a possible replacement.

A test checks that all names exist in the installed torch. `Module._buffers` and `Module._parameters` are used directly,
without a name in this module. Subclasses and hooks of torch's own packages rely on these dicts. Replacing a tensor in
them does not call `__setattr__` of the user's class.
"""

import torch

make_per_tensor_quantized = torch._make_per_tensor_quantized_tensor
make_per_channel_quantized = torch._make_per_channel_quantized_tensor
"""Functions that rebuild a quantized tensor from its integer codes, with one scale per tensor or per channel.

torch's public functions would quantize the values again, and could round differently.
"""

foreach_copy_ = torch._foreach_copy_
"""Function that copies a list of tensors with few kernels. torch has no public function that copies such lists."""


def read_version(tensor: torch.Tensor) -> int:
    """Return the tensor's version counter, which increases with each in-place change.

    torch has no public function for it.
    """
    return tensor._version


def read_sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and values of a sparse COO tensor.

    The public methods raise an error if the tensor is not coalesced.
    """
    return [tensor._indices(), tensor._values()]
