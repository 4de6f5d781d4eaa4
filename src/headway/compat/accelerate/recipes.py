"""Settings of libraries that Headway does not support: Transformer Engine, MS-AMP and Megatron-LM."""

import warnings
from dataclasses import dataclass
from typing import Any

from headway.core.config.values import KwargsHandler
from headway.errors import ConfigError, UnsupportedError


class _UnsupportedRecipe(KwargsHandler):
    """Base class of settings for float8 libraries that Headway does not support.

    An Accelerator that gets such settings raises `UnsupportedError`.
    """


def check_handlers(handlers: list[Any] | None) -> list[Any] | None:
    """Return the argument `kwargs_handlers` of an Accelerator, or None, unchanged if all its items are supported.

    Raises:
        UnsupportedError: If an item configures Transformer Engine or MS-AMP.
    """
    for each in handlers or ():
        if isinstance(each, _UnsupportedRecipe):
            raise UnsupportedError(
                f"{type(each).__name__} in kwargs_handlers: Headway drives neither Transformer Engine nor MS-AMP; float8 runs "
                "through torchao: kwargs_handlers=[AORecipeKwargs()] (docs/float8.md)"
            )
    return handlers


def _check_word(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}; allowed: {', '.join(allowed)}")
    return value


@dataclass
class TERecipeKwargs(_UnsupportedRecipe):
    """Settings of Transformer Engine, which Headway does not support.

    An Accelerator that gets them raises `UnsupportedError`. The fields are those of Accelerate's class. They are stored
    without effect.

    Raises:
        ConfigError: If `fp8_format` or `amax_compute_algo` is not an allowed word.
    """

    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = 1
    fp8_format: str = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: str = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False

    def __post_init__(self) -> None:
        self.fp8_format = _check_word("fp8_format", str(self.fp8_format).upper(), ("HYBRID", "E4M3", "E5M2"))
        algorithm = str(self.amax_compute_algo).lower()
        self.amax_compute_algo = _check_word("amax_compute_algo", algorithm, ("max", "most_recent"))


@dataclass
class MSAMPRecipeKwargs(_UnsupportedRecipe):
    """Settings of MS-AMP, which Headway does not support. An Accelerator that gets them raises `UnsupportedError`.

    Attributes:
        opt_level: Optimization level of MS-AMP, "O1" or "O2". Stored without effect.

    Raises:
        ConfigError: If `opt_level` is another word.
    """

    opt_level: str = "O2"

    def __post_init__(self) -> None:
        self.opt_level = _check_word("opt_level", self.opt_level, ("O1", "O2"))


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Deprecated settings of Transformer Engine or MS-AMP. An Accelerator that gets them raises `UnsupportedError`.

    Attributes:
        backend: Library that the settings are for: "TE" (Transformer Engine) or "MSAMP".

    Raises:
        ConfigError: If `backend` or another field is not an allowed word.
    """

    backend: str = "TE"

    def __post_init__(self) -> None:
        warnings.warn(
            "FP8RecipeKwargs is deprecated and will be removed in Accelerate v2.0.0. Please use one of the proper FP8 recipe kwargs "
            "classes such as TERecipeKwargs or MSAMPRecipeKwargs instead.",
            FutureWarning,
            stacklevel=3,
        )
        self.backend = _check_word("backend", str(self.backend).upper(), ("TE", "MSAMP"))
        TERecipeKwargs.__post_init__(self)
        MSAMPRecipeKwargs.__post_init__(self)


class MegatronLMPlugin:
    """Settings of Megatron-LM, which Headway does not support. An Accelerator that gets them raises `UnsupportedError`.

    Args:
        args: Values of up to five fields of Accelerate's class: tp_degree, pp_degree, num_micro_batches,
            gradient_clipping and sequence_parallelism.
        options: Values of other fields by name. All values are stored as given.

    Raises:
        TypeError: If more than five values are given by position.
    """

    tp_degree = pp_degree = num_micro_batches = 1
    gradient_clipping = 1.0
    sequence_parallelism = recompute_activations = use_distributed_optimizer = False

    def __init__(self, *args: Any, **options: Any) -> None:
        positional_names = ("tp_degree", "pp_degree", "num_micro_batches", "gradient_clipping", "sequence_parallelism")
        if len(args) > len(positional_names):
            raise TypeError(
                f"MegatronLMPlugin takes {len(positional_names)} arguments by position, {len(args)} were given"
            )
        self.__dict__.update(dict(zip(positional_names, args)) | options)

    def __repr__(self) -> str:
        return f"MegatronLMPlugin({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
