"""Context in which a model is in evaluation mode, after which each of its modules gets its earlier mode."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Return a context in which the model is in evaluation mode. At its end, each module gets its earlier mode.

    A module that the user has set to evaluation mode, such as a frozen batch norm, thus stays in it. Modes are restored
    with `train()` instead of by assignment, because some modules, such as LoRA layers, change their weights in it.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:  # `train` also changes the modules inside, which come later in this list
            if module.training != is_training:
                module.train(is_training)
