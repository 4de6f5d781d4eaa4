"""Access to the extension for optimizers that store their state in few bits, such as bitsandbytes' 8-bit optimizers.

The extension is imported only if a package with such optimizers is imported.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway.core import extensions

_LOW_BIT_PACKAGES = {"bitsandbytes", "torchao"}


def load_low_bit_extension() -> Any:
    """Return the extension for low-bit optimizer states, such as bitsandbytes' 8-bit states.

    Return None if no package with such optimizers is imported, which saves the import of the extension.
    """
    return extensions.load("feature", "low_bit_states") if _LOW_BIT_PACKAGES & sys.modules.keys() else None


def find_low_bit_extension(optimizer: torch.optim.Optimizer) -> Any:
    """Return the extension that converts an optimizer's low-bit (such as 8-bit) states, or None if it has none."""
    extension = load_low_bit_extension()
    return extension if extension is not None and extension.keeps_low_bit_state(optimizer) else None


@contextmanager
def dequantize_states(optimizer: torch.optim.Optimizer, is_needed: bool) -> Iterator[None]:
    """Return a context in which an optimizer's low-bit states are dequantized, so that they can be sharded.

    At the end of the context they are quantized again, but not after an error.

    Args:
        optimizer: Any optimizer.
        is_needed: Whether to convert states. If False, the context does nothing.
    """
    extension = find_low_bit_extension(optimizer) if is_needed and optimizer.state else None
    if extension is None:
        yield
        return
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = extension.export_state(optimizer, state)
    yield
    extension.quantize_states(optimizer)
