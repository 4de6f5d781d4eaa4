"""Low-rank adapters (peft's LoRA) around matrices that are split: which of their own matrices are split with these.

::

    matrix                 colwise                      rowwise
    input                  whole                        cut
    lora_A                 whole                        rowwise
    lora_B                 colwise                      whole
    output                 cut (or gathered)            whole

Dropout on the input draws as the input is: the same numbers on all ranks where it is whole.
"""

from typing import Any

import torch

from headway.strategies.tensor.rng import SplitRNG
from headway.strategies.tensor.styles import Colwise, Rowwise, SplitStyle

_VARIANTS = ("lora_magnitude_vector", "lora_variant", "lora_embedding_A")


def is_adapted(module: torch.nn.Module) -> bool:
    """Is it a layer of peft's around another one?"""
    return isinstance(getattr(module, "base_layer", None), torch.nn.Module)


def parts(module: torch.nn.Module, style: SplitStyle) -> list[str]:
    """The modules within that are split as the layer is: names below it."""
    inner = "lora_B" if isinstance(style, Colwise) else "lora_A"
    return ["base_layer", *(f"{inner}.{name}" for name in module.get_submodule(inner)._modules)]


def misfit(module: torch.nn.Module, style: SplitStyle) -> str | None:
    """Why the layer and its adapters cannot be split so; None: they can."""
    if not isinstance(module._modules.get("lora_A"), torch.nn.ModuleDict):
        return "of peft's adapters, only LoRA can be split"
    special = next((name for name in _VARIANTS if len(getattr(module, name, ()))), None)
    if special is not None:
        return f"its adapters are no plain LoRA ({special})"
    return None if isinstance(style, Colwise | Rowwise) else "LoRA is split with colwise and rowwise matrices only"


class AdaptedCall:
    """Random streams around a layer with adapters.

    Args:
        style: of the layer.
        streams: of random numbers.
    """

    def __init__(self, style: SplitStyle, streams: SplitRNG) -> None:
        self._style, self._streams = style, streams

    def before(self, *_: Any) -> None:
        """Its input is whole, unless the style says otherwise."""
        if self._style.opens:
            self._streams.join()

    def after_any(self, module: torch.nn.Module, *_: Any) -> None:
        """However the forward has ended."""
        if self._style.closes:
            self._streams.join()
        elif self._style.opens and module.training:
            self._streams.part()
