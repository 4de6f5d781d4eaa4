"""Options of float8 training: Headway's `Float8Options`, and Accelerate's `AORecipeKwargs`.

This module does not import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.core.config.other_library_names import BLOCK_FORMATS
from headway.errors import ConfigError

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")

Filter = Callable[[Any, str], bool]
"""Function that returns whether a linear layer, given as (module, name), computes in float8."""


@dataclass(frozen=True)
class Float8Options:
    """Options of float8 training, one of `kwargs_handlers` with `mixed_precision="fp8"`.

    torchao's linear layers compute forward and backward in float8, everything else under bf16 autocast. Weights,
    gradients and optimizer state keep their dtype. Layers are converted in `prepare`. Without `emulate`, a GPU with
    float8 units is needed, such as an H100.

    Attributes:
        recipe: Name of a torchao recipe, which determines how scales are computed. "tensorwise" (the default): one scale
            per tensor, which is fastest. "rowwise": one scale per row. "rowwise_with_gw_hp": one scale per row, with
            weight gradients computed in bfloat16, which is most accurate.
        fsdp_all_gather: Whether sharded layouts all-gather weights in float8 instead of bfloat16 (tensorwise only).
            None (the default): True if recipe and sharding allow it.
        pad_inner_dim: Whether to pad the inner dim of matrix products to multiples of 16, as the hardware requires.
            Without padding, backward raises an error if a batch's number of tokens is not such a multiple. Default:
            True.
        emulate: Whether to compute in float32 with values rounded to float8. This is slow, but runs on any device, so
            that float8 can be tried out. Default: False.
        keeps: Classes, class names or module names. Linear layers inside these modules stay in bfloat16. Default: none.
        keeps_first_and_last: Whether the model's first and last linear layers stay in bfloat16. These layers are the
            most sensitive ones. Default: True.
        module_filter: Function that is called with each linear layer and its name, and returns False to keep the layer
            in bfloat16. It cannot be combined with `keeps` and `keeps_first_and_last`. None (the default): no function.
        config: torchao's Float8LinearConfig. It cannot be combined with `recipe`, `fsdp_all_gather`, `pad_inner_dim` and
            `emulate`, which it contains. None (the default): built from these.

    Raises:
        ConfigError: If the recipe is unknown, or options contradict each other.

    Example::

        options = Float8Options(recipe="rowwise", emulate=True)
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[options])
    """

    recipe: str = "tensorwise"
    fsdp_all_gather: bool | None = None
    pad_inner_dim: bool = True
    emulate: bool = False
    keeps: tuple[Any, ...] = ()
    keeps_first_and_last: bool = True
    module_filter: Filter | None = None
    config: Any = None

    def __post_init__(self) -> None:
        keeps = self.keeps
        object.__setattr__(self, "keeps", (keeps,) if isinstance(keeps, str | type) else tuple(keeps))
        if self.recipe not in RECIPES:
            hint = BLOCK_FORMATS.get(str(self.recipe).lower(), "")
            raise ConfigError(f"Float8Options(recipe={self.recipe!r}); allowed: {', '.join(RECIPES)}{hint}")
        if self.fsdp_all_gather and self.recipe != "tensorwise":
            raise ConfigError(
                f"Float8Options(fsdp_all_gather=True, recipe={self.recipe!r}): rows are scaled by ranks on their own, so only "
                "recipe='tensorwise' can gather weights in float8; leave fsdp_all_gather out, or change the recipe"
            )
        if self.module_filter is not None and (self.keeps or not self.keeps_first_and_last):
            raise ConfigError(
                "Float8Options has a module_filter, which alone selects the layers; leave out keeps and keeps_first_and_last"
            )
        if self.config is not None and self._has_recipe:
            raise ConfigError(
                "Float8Options has a config, which contains recipe, fsdp_all_gather, pad_inner_dim and emulate; "
                "give either the config or these"
            )

    @property
    def _has_recipe(self) -> bool:
        """Whether any option differs from its default."""
        default = ("tensorwise", None, True, False)
        return (self.recipe, self.fsdp_all_gather, self.pad_inner_dim, self.emulate) != default

    @property
    def is_emulated(self) -> bool:
        """Whether float8 is emulated, according to `emulate` or torchao's config."""
        return self.emulate or bool(getattr(self.config, "emulate", False))

    @property
    def all_gather(self) -> bool | None:
        """Whether weights are all-gathered in float8, according to `fsdp_all_gather` or torchao's config.

        None: weights are all-gathered in float8 if recipe and sharding allow it.
        """
        if self.config is None:
            return self.fsdp_all_gather
        return bool(getattr(self.config, "enable_fsdp_float8_all_gather", False))

    @property
    def description(self) -> str:
        """Short description of the recipe for log messages, such as "tensorwise, emulated"."""
        recipe = self.recipe if self.config is None else "a configuration of your own"
        return f"{recipe}, emulated" if self.is_emulated else recipe


@dataclass(frozen=True)
class AORecipeKwargs:
    """Options of float8 training, with the names that Accelerate uses. `Float8Options` has more options.

    It is one of `kwargs_handlers` with `mixed_precision="fp8"`.

    Attributes:
        config: torchao's Float8LinearConfig. None (the default): dynamic scales, one per tensor.
        module_filter_func: Function that is called with each linear layer and its name, and returns False to keep the
            layer in bfloat16. None (the default): all layers but the first, the last, and those whose sizes are not
            multiples of 16 are converted.
        pad_inner_dim: Whether to pad the inner dim of matrix products to multiples of 16. None (the default): True.
        enable_fsdp_float8_all_gather: Whether sharded layouts all-gather weights in float8 instead of bfloat16. None
            (the default): True if the sharding allows it.
    """

    config: Any = None
    module_filter_func: Filter | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    @property
    def options(self) -> Float8Options:
        """The float8 options of this object as a `Float8Options`.

        Raises:
            ConfigError: If `config` and an option that it contains are both given.
        """
        pads = True if self.pad_inner_dim is None else self.pad_inner_dim
        if self.config is not None and (not pads or self.enable_fsdp_float8_all_gather is not None):
            raise ConfigError(
                "AORecipeKwargs has a config, which contains pad_inner_dim and enable_fsdp_float8_all_gather; give "
                "either the config or these"
            )
        return Float8Options(
            fsdp_all_gather=self.enable_fsdp_float8_all_gather,
            pad_inner_dim=pads,
            module_filter=self.module_filter_func,
            config=self.config,
        )
