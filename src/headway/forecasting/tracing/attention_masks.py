"""Make a transformers model on fake tensors treat attention masks as in a real run in which no token is masked."""

import copy
from typing import Any

from torch import nn

MASK = "attention_mask"
"""Key of the attention mask in the batches of transformers models."""
POSITIONS = "position_ids"
"""Key of the position IDs in the batches of transformers models."""

_UNMASKED = "headway_unmasked"
"""Name under which an attention implementation without a mask function is registered in transformers."""


def skip_causal_mask(model: nn.Module) -> nn.Module:
    """Make a transformers model build no causal mask, as in a real run without padding, and return the model.

    In a real run, transformers reads the values of the attention mask, and builds no causal mask if no token is masked.
    Fake and meta tensors have no values, so transformers would always build one. Therefore the model is switched to an
    attention implementation that has no registered mask function. For such an implementation, transformers builds no
    mask. A model whose attention implementation is not "sdpa" is returned unchanged.
    """
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
        set_attention(model, _UNMASKED)
    return model


def set_attention(model: nn.Module, implementation: str) -> None:
    """Switch a transformers model to another attention implementation, without changing the config that it was made from.

    transformers stores the name of the implementation in the model's config. Users make several models from one config,
    also models that they train after a forecast. So the model first gets a copy of its config.

    Args:
        model: Model to change.
        implementation: Name of the attention implementation, such as "sdpa" or "eager".
    """
    copies: dict[
        int, Any
    ] = {}  # by `id` of the original, as for `copy.deepcopy`, so that modules share the copies, too
    for module in model.modules():
        config: Any = vars(module).get("config")
        if hasattr(config, "_attn_implementation"):
            module.config = copy.deepcopy(config, copies)
    model.set_attn_implementation(implementation)  # type: ignore[operator]


def drop_masks(model: nn.Module) -> None:
    """Change a transformers model so that it ignores its `attention_mask` argument, as if no token were masked."""

    def drop_mask(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {key: value for key, value in kwargs.items() if key != MASK}

    model.register_forward_pre_hook(drop_mask, with_kwargs=True)
