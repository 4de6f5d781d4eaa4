"""Options that the script passes as `kwargs_handlers`: for DDP, autocast, GradScaler, the process group and layouts.

At most one object of each class may be given. This module does not import torch.
"""

from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_type_hints

from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.config.float8 import AORecipeKwargs, Float8Options
from headway.core.config.parallelism import (
    PipelineOptions,
    ShardingOptions,
    TensorParallelOptions,
    TorchContextParallelConfig,
)
from headway.core.config.torch_kwargs import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from headway.core.config.values import KwargsHandler
from headway.errors import ConfigError


@dataclass(frozen=True)
class EngineOptions:
    """Options that the script passes as `kwargs_handlers`, with one field per class of options.

    The script may give at most one object of each class. If it gives none, the defaults of the class apply.

    Attributes:
        ddp: Options of DistributedDataParallel.
        autocast: Options of torch.autocast.
        scaler: Options of the fp16 gradient scaler.
        process_group: Options of init_process_group.
        profile: Options of the profiler.
        checkpointing: Options of activation checkpointing. None: not given.
        sharding: Options of sharded layouts (FSDP). None: not given.
        tensor: Options of tensor parallelism. None: not given.
        pipeline: Options of pipeline parallelism. None: not given.
        context: Options of context parallelism. None: not given.
        float8: Options of float8 training. None: not given.
    """

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    process_group: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)
    checkpointing: ActivationCheckpointing | None = None
    sharding: ShardingOptions | None = None
    tensor: TensorParallelOptions | None = None
    pipeline: PipelineOptions | None = None
    context: TorchContextParallelConfig | None = None
    float8: Float8Options | None = None

    def disable_loss_scaling(self) -> "EngineOptions":
        """Return these options with torch's GradScaler disabled, for engines that scale fp16 losses themselves."""
        return replace(self, scaler=replace(self.scaler, enabled=False))


def collect_options(handlers: list[Any] | None) -> EngineOptions:
    """Return an `EngineOptions` whose fields hold the objects in `kwargs_handlers`.

    An instance of a subclass is assigned to the field of its parent class, and `AORecipeKwargs` to the field `float8`.
    Objects that could be changed later are copied.

    Args:
        handlers: Argument `kwargs_handlers` of the Accelerator. None: no objects.

    Raises:
        ConfigError: If an object has an unknown class, or two have the same class.
    """
    classes: dict[str, type] = {}
    for name, hint in get_type_hints(EngineOptions).items():
        alternatives = get_args(hint)  # of `Options | None`; empty for a plain class
        classes[name] = alternatives[0] if alternatives else hint
    defaults = {name: each().freeze_copy() for name, each in classes.items() if issubclass(each, KwargsHandler)}
    options: dict[str, Any] = {}
    for each in handlers or []:
        handler = each.options if isinstance(each, AORecipeKwargs) else each
        name = next((name for name, option_class in classes.items() if isinstance(handler, option_class)), "")
        if not name:
            allowed = ", ".join(option_class.__name__ for option_class in classes.values())
            raise ConfigError(f"kwargs_handlers contains a {type(handler).__name__}; allowed: {allowed}")
        if name in options:
            raise ConfigError(f"kwargs_handlers contains two {classes[name].__name__}; give one")
        options[name] = handler.freeze_copy() if isinstance(handler, KwargsHandler) else handler
    return EngineOptions(**defaults | options)
