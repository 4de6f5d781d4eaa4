"""Replace a model's parameters and buffers with fake tensors, which have shapes but no values."""

import torch
from torch import nn

from headway.forecasting._torch import FakeTensorMode, is_fake
from headway.forecasting.tracing.four_bit import is_unpacked_four_bit, pack_four_bit
from headway.forecasting.tracing.tensors import make_empty_like


def fill_model(model: nn.Module, fake: FakeTensorMode) -> dict[int, torch.Tensor]:
    """Replace every parameter and buffer with a fake tensor that has its own storage. Tied tensors stay tied.

    Tensors that are already fake are kept.

    Args:
        model: Model to change in place.
        fake: Fake mode that the new tensors belong to.

    Returns:
        The replacement of each tensor, by the `id` of the original.
    """
    replacements: dict[int, torch.Tensor] = {}  # by `id` of the original

    def make_fake(tensor: torch.Tensor) -> torch.Tensor:
        if is_fake(tensor):
            return tensor
        if id(tensor) not in replacements:
            with fake:
                replacements[id(tensor)] = make_empty_like(tensor)
        return replacements[id(tensor)]

    for module in model.modules():
        if is_unpacked_four_bit(module):
            pack_four_bit(module, fake)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = make_fake(tensor)  # type: ignore[assignment]
    return replacements
