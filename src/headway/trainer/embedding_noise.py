"""NEFTune: noise on the embeddings of a language model while it trains, which can improve instruction fine-tuning.

Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", ICLR 2024.
"""

import math
from typing import Any

import torch

from headway.core.strategies.blocks import get_class_name
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)


class EmbeddingNoise:
    """Hook that adds the noise of NEFTune to the token embeddings of a model in training mode.

    The noise of each element is uniform in [-x, x] with x = alpha / sqrt(tokens per sequence * width of the embedding).
    Padding tokens count, too. The noise is drawn from torch's default generator of the device. It is added to the output
    of the embedding, not to its weights. In evaluation mode, the hook does nothing.

    Args:
        model: Model whose `get_input_embeddings()` returns the module that embeds tokens, as in transformers.
        alpha: Strength of the noise. The paper on NEFTune uses 5, 10 and 15.

    Raises:
        ConfigError: If the model has no `get_input_embeddings()`, or if it does not return a module.
    """

    def __init__(self, model: torch.nn.Module, alpha: float) -> None:
        get_input_embeddings = getattr(model, "get_input_embeddings", None)
        embedding = get_input_embeddings() if callable(get_input_embeddings) else None
        if not isinstance(embedding, torch.nn.Module):
            raise ConfigError(
                f"neftune_noise_alpha={alpha:g} adds noise to token embeddings, but {get_class_name(model)} does not name its "
                "embedding; give the model a method get_input_embeddings() that returns the module, or leave the argument out"
            )
        self._embedding = embedding
        self._alpha = alpha
        self._has_added_noise = False
        self._has_checked = False
        self._handle = embedding.register_forward_hook(self._add_noise)

    def _add_noise(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        """Return the embedding's output with noise, or None to leave it unchanged. This is a forward hook of torch."""
        if not module.training:
            return None
        # Written without being read: a compiled forward would otherwise be compiled again after the first call.
        self._has_added_noise = True
        limit = self._alpha / math.sqrt(output.shape[-2] * output.shape[-1])
        return output + torch.empty_like(output).uniform_(-limit, limit)

    def warn_if_unused(self) -> None:
        """Warn if the first update used no noise. Call it after each update; only the first call has an effect.

        A rank whose pipeline stage does not hold the embedding does not warn.
        """
        if self._has_checked:
            return
        self._has_checked = True
        is_elsewhere = any(parameter.is_meta for parameter in self._embedding.parameters())
        if not self._has_added_noise and not is_elsewhere:
            log.warning_once(
                "neftune_noise_alpha=%g had no effect in the first update: the model's embedding (%s) was not called in training "
                "mode. If the batches contain inputs_embeds, pass input_ids instead. If the embedding is in evaluation mode, set it "
                "to training mode. Otherwise leave neftune_noise_alpha out",
                self._alpha,
                get_class_name(self._embedding),
            )

    def remove(self) -> None:
        """Remove the hook, which ends the noise."""
        self._handle.remove()
