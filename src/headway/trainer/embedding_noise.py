"""NEFTune: noise on the embeddings of a language model while it trains, which can improve instruction fine-tuning.

Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", ICLR 2024.
"""

import math
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from headway.core.strategies.blocks import get_class_name
from headway.errors import ConfigError


def add_embedding_noise(model: torch.nn.Module, alpha: float) -> RemovableHandle:
    """Register a hook that adds the noise of NEFTune to the token embeddings of a model in training mode.

    The noise of each element is uniform in [-x, x] with x = alpha / sqrt(tokens per sequence * width of the embedding).
    Padding tokens count, too. The noise is drawn from torch's default generator of the device. It is added to the output
    of the embedding, not to its weights. In evaluation mode, the hook does nothing.

    Args:
        model: Model whose `get_input_embeddings()` returns the module that embeds tokens, as in transformers.
        alpha: Strength of the noise. The paper on NEFTune uses 5, 10 and 15.

    Returns:
        Handle of the hook, whose `remove()` ends the noise.

    Raises:
        ConfigError: If the model has no `get_input_embeddings()`, or if it does not return a module.
    """
    get_input_embeddings = getattr(model, "get_input_embeddings", None)
    embedding = get_input_embeddings() if callable(get_input_embeddings) else None
    if not isinstance(embedding, torch.nn.Module):
        raise ConfigError(
            f"neftune_noise_alpha={alpha:g} adds noise to token embeddings, but {get_class_name(model)} does not name its embedding; "
            "give the model a method get_input_embeddings() that returns the module, or leave the argument out"
        )

    def add_noise(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not module.training:
            return None
        limit = alpha / math.sqrt(output.shape[-2] * output.shape[-1])
        return output + torch.empty_like(output).uniform_(-limit, limit)

    return embedding.register_forward_hook(add_noise)
