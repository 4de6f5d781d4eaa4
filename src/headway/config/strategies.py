"""Options of the engines underneath: DDP, autocast, fp16 scaler, process group, profiler, activation checkpointing.

The names are those of Accelerate's `kwargs_handlers`; each is a frozen dataclass, and each may be given once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

from headway.config.float8 import AORecipeKwargs, Float8Options
from headway.config.layout.context import TorchContextParallelConfig
from headway.config.layout.pipeline import PipelineOptions
from headway.config.layout.sharding import ShardingOptions
from headway.config.layout.tensor import TensorParallelOptions
from headway.config.values import known_keywords
from headway.errors import ConfigError


class DDPCommunicationHookType(str, Enum):
    """How DDP compresses gradients on their way."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@known_keywords
@dataclass(frozen=True)
class DistributedDataParallelKwargs:
    """Options of torch's DistributedDataParallel, by its own names and defaults.

    Attributes:
        check_reduction: accepted for the name's sake: torch ignores it too.
        comm_hook: how gradients are compressed; `comm_wrapper` (NO, FP16 or BF16) casts around a PowerSGD hook.
        comm_state_option: keyword arguments of PowerSGD's state.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "comm_hook", _hook(self.comm_hook, "comm_hook"))
        object.__setattr__(self, "comm_wrapper", _hook(self.comm_wrapper, "comm_wrapper"))
        if self.comm_wrapper.value not in ("no", "fp16", "bf16"):
            raise ConfigError(f"comm_wrapper={self.comm_wrapper.value!r}; allowed: no, fp16, bf16")


def _hook(value: DDPCommunicationHookType | str, name: str) -> DDPCommunicationHookType:
    try:
        return DDPCommunicationHookType(value)
    except ValueError:
        raise ConfigError(
            f"{name}={value!r}; allowed: {', '.join(h.value for h in DDPCommunicationHookType)}"
        ) from None


@dataclass(frozen=True)
class AutocastKwargs:
    """Options of torch.autocast."""

    enabled: bool = True
    cache_enabled: bool | None = None


@known_keywords
@dataclass(frozen=True)
class GradScalerKwargs:
    """Options of the fp16 gradient scaler, by torch's names and defaults."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@known_keywords
@dataclass(frozen=True)
class InitProcessGroupKwargs:
    """Options of torch's init_process_group; None: Headway's choice (see `headway.runtime.process.start`)."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@known_keywords
@dataclass(frozen=True)
class ProfileKwargs:
    """Options of torch.profiler.profile.

    Attributes:
        activities: any of torch's, "cpu", "cuda", "xpu" and their like by the device's name; None: torch's choice.
        schedule_option: keyword arguments of torch.profiler.schedule (wait, warmup, active, repeat, skip_first).
        on_trace_ready: called with the profiler when a trace is ready.
        output_trace_dir: where each rank writes `profile_<rank>.json`, and a table of the operations that took longest in
            `profile_<rank>.txt`, also where the profiled block raises.
    """

    activities: list[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@known_keywords
@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which blocks of a model drop their activations, and what they keep.

    Attributes:
        every: every n-th block; 1: all of them.
        policy: "recompute": keep only a block's inputs. "keep_matmul": also the outputs of matrix products, convolutions
            and fused attention; "keep_attention": also those of fused attention. "keep_all": compute nothing again (for
            `offload`). A callable is a policy of your own, as for torch's create_selective_checkpoint_contexts.
        offload: what is kept for backward lies in host memory meanwhile.
        blocks: classes, class names or module names; none: what is repeated in the module tree.
    """

    every: int = 1
    policy: str | Callable[..., Any] = "recompute"
    offload: bool = False
    blocks: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"every={self.every!r}; give 1 to checkpoint all blocks, n for every n-th")
        allowed = ("recompute", "keep_matmul", "keep_attention", "keep_all")
        if not callable(self.policy) and self.policy not in allowed:
            raise ConfigError(f"policy={self.policy!r}; allowed: {', '.join(allowed)}, or a callable")
        if self.policy == "keep_all" and not self.offload:
            raise ConfigError("policy='keep_all' changes nothing without offload=True; give both, or another policy")


@dataclass(frozen=True)
class EngineOptions:
    """One of each kind of option."""

    ddp: DistributedDataParallelKwargs = DistributedDataParallelKwargs()
    autocast: AutocastKwargs = AutocastKwargs()
    scaler: GradScalerKwargs = GradScalerKwargs()
    process_group: InitProcessGroupKwargs = InitProcessGroupKwargs()
    profile: ProfileKwargs = ProfileKwargs()
    checkpointing: ActivationCheckpointing | None = None
    sharding: ShardingOptions | None = None
    tensor: TensorParallelOptions | None = None
    pipeline: PipelineOptions | None = None
    context: TorchContextParallelConfig | None = None
    float8: Float8Options | None = None


def collect_options(handlers: list[Any] | None) -> EngineOptions:
    """Sort `kwargs_handlers` by what they are for; a subclass counts as its parent.

    Raises:
        ConfigError: an object that is not a handler, or two of one kind.
    """
    kinds: dict[str, type] = {
        "ddp": DistributedDataParallelKwargs,
        "autocast": AutocastKwargs,
        "scaler": GradScalerKwargs,
        "process_group": InitProcessGroupKwargs,
        "profile": ProfileKwargs,
        "checkpointing": ActivationCheckpointing,
        "sharding": ShardingOptions,
        "tensor": TensorParallelOptions,
        "pipeline": PipelineOptions,
        "context": TorchContextParallelConfig,
        "float8": Float8Options,
    }
    chosen: dict[str, Any] = {}
    for given in handlers or []:
        handler = given.options if isinstance(given, AORecipeKwargs) else given
        name = next((name for name, kind in kinds.items() if isinstance(handler, kind)), None)
        if name is None:
            allowed = ", ".join(kind.__name__ for kind in kinds.values())
            raise ConfigError(f"kwargs_handlers holds a {type(handler).__name__}; allowed: {allowed}")
        if name in chosen:
            raise ConfigError(f"kwargs_handlers holds two {kinds[name].__name__}; give one")
        chosen[name] = handler
    return EngineOptions(**chosen)
