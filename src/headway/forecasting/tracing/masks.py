"""Attention of transformers' models whose samples have no padding, as a run computes it."""

from typing import Any

from torch import nn

MASK = "attention_mask"

_UNMASKED = "headway_unmasked"


def unmasked(model: nn.Module) -> nn.Module:
    """Attention as in a run whose samples have no padding, in which transformers leaves the causal mask to the kernel.

    Of tensors without values it cannot see that no token is masked, and would build the mask and repeat keys and values for it. For
    an implementation with no mask function of its own it builds none.
    """
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
        model.set_attn_implementation(_UNMASKED)  # type: ignore[operator]
    return model


def drop_masks(model: nn.Module) -> None:
    """Let a transformers model that is called with a mask leave it out, as it does where it sees that nothing is masked."""

    def without(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {key: value for key, value in kwargs.items() if key != MASK}

    model.register_forward_pre_hook(without, with_kwargs=True)
