"""Make the model of a forecast or a plan with the user's function, and prepare it for a trace without values."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from headway.errors import ConfigError
from headway.forecasting.tracing.attention_masks import POSITIONS, skip_causal_mask


def make_model(model_fn: Callable[[], nn.Module], batch: Any, argument: str = "model_fn") -> nn.Module:
    """Make the model, and prepare a transformers model for a trace without values.

    A transformers model is changed to build no causal mask, as in a run without padding, unless the batch has position
    IDs. With position IDs, rows might be packed sequences, in which the mask separates the documents.

    Args:
        model_fn: Function that makes the model.
        batch: Batch for the trace of the model, or None if it is unknown.
        argument: Name of the argument with which the user gave the function, for error messages. Default: "model_fn".

    Raises:
        ConfigError: If `model_fn` is a module or does not return a module.
    """
    if isinstance(model_fn, nn.Module):
        raise ConfigError(
            f"{argument} is a {type(model_fn).__name__}; give a function that makes the model, so that it can be made without memory"
        )
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{argument} returned {type(model).__name__}; it must return a torch.nn.Module")
    # transformers reads the values of a mask, and skips it if nothing is masked. Fake tensors have no values to read. With
    # a mask, attention also communicates differently under context parallelism.
    if hasattr(model, "set_attn_implementation") and not has_key(batch, POSITIONS):
        return skip_causal_mask(model)
    return model


def has_key(batch: Any, name: str) -> bool:
    """Whether the batch is a mapping with this key, such as a dict or transformers' BatchEncoding."""
    return isinstance(batch, Mapping) and name in batch
