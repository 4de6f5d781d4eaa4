"""Options of float8 training (mixed_precision="fp8"), by Headway's names and by Accelerate's. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
Filter = Callable[[Any, str], bool]
"""From a module and its name to whether it computes in float8."""


@dataclass(frozen=True)
class Float8Options:
    """How linear layers compute in float8; needs mixed_precision="fp8".

    Attributes:
        recipe: where scales come from, by torchao's names. "tensorwise": one for each tensor, the fastest. "rowwise": one for each
            row. "rowwise_with_gw_hp": the same, and gradients of weights are computed in bfloat16, the most accurate.
        fsdp_all_gather: in layouts with shards, gather weights in float8 instead of bfloat16 (tensorwise only); None: where the
            recipe and the sharding allow it.
        pad_inner_dim: pad what is multiplied to multiples of 16, which hardware requires; without it, a batch with another number
            of tokens is an error in backward.
        emulate: compute in float32 with values rounded to float8: slow, on any device, to try what float8 does to a model.
        keeps: classes, class names or module names; linear layers in these stay in bfloat16.
        keeps_first_and_last: the model's first and last linear layers stay in bfloat16, which training is most sensitive to.
        module_filter: instead of these two: called with each linear layer and its name; False: it stays in bfloat16.
        config: torchao's Float8LinearConfig, instead of the options above it.
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
            raise ConfigError(f"Float8Options(recipe={self.recipe!r}); allowed: {', '.join(RECIPES)}")
        if self.fsdp_all_gather and self.recipe != "tensorwise":
            raise ConfigError(
                f"Float8Options(fsdp_all_gather=True, recipe={self.recipe!r}): rows are scaled by ranks on their own, so only "
                "recipe='tensorwise' can gather weights in float8; leave fsdp_all_gather out, or change the recipe"
            )
        if self.module_filter is not None and (self.keeps or not self.keeps_first_and_last):
            raise ConfigError(
                "Float8Options has a module_filter, which decides alone; leave out keeps and keeps_first_and_last"
            )
        if self.config is not None and self._has_recipe:
            raise ConfigError(
                "Float8Options has a config, which says all that recipe, fsdp_all_gather, pad_inner_dim and emulate say; give one of "
                "the two"
            )

    @property
    def _has_recipe(self) -> bool:
        default = ("tensorwise", None, True, False)
        return (self.recipe, self.fsdp_all_gather, self.pad_inner_dim, self.emulate) != default

    @property
    def is_emulated(self) -> bool:
        """Is float8 emulated, by this or by torchao's configuration?"""
        return self.emulate or bool(getattr(self.config, "emulate", False))

    @property
    def all_gather(self) -> bool | None:
        """Is float8 gathered, by this or by torchao's configuration? None: where it can be."""
        if self.config is None:
            return self.fsdp_all_gather
        return bool(getattr(self.config, "enable_fsdp_float8_all_gather", False))

    @property
    def told(self) -> str:
        """The recipe in a few words."""
        recipe = self.recipe if self.config is None else "a configuration of your own"
        return f"{recipe}, emulated" if self.is_emulated else recipe


@dataclass(frozen=True)
class AORecipeKwargs:
    """Options of float8 training by Accelerate's names; `Float8Options` has the same and more.

    Attributes:
        config: torchao's Float8LinearConfig; None: dynamic scales, one for each tensor.
        module_filter_func: called with each linear layer and its name; False: it stays in bfloat16. None: all but the first and
            the last, and those whose sizes are no multiples of 16.
        pad_inner_dim: as `Float8Options.pad_inner_dim`; None: True.
        enable_fsdp_float8_all_gather: as `Float8Options.fsdp_all_gather`.
    """

    config: Any = None
    module_filter_func: Filter | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    @property
    def options(self) -> Float8Options:
        """The same by Headway's names.

        Raises:
            ConfigError: a configuration, and besides it what that says.
        """
        pads = True if self.pad_inner_dim is None else self.pad_inner_dim
        if self.config is not None and (not pads or self.enable_fsdp_float8_all_gather is not None):
            raise ConfigError(
                "AORecipeKwargs has a config, which says what pad_inner_dim and enable_fsdp_float8_all_gather say; give one of "
                "the two"
            )
        return Float8Options(
            fsdp_all_gather=self.enable_fsdp_float8_all_gather,
            pad_inner_dim=pads,
            module_filter=self.module_filter_func,
            config=self.config,
        )
