"""Keyword arguments for torch's DDP, autocast, gradient scaler, process group and profiler.

The names are those of Accelerate's `kwargs_handlers`. This module does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

from headway.core.config.values import KwargsHandler, report_unknown_keywords
from headway.errors import ConfigError


class DDPCommunicationHookType(str, Enum):
    """Kinds of gradient compression for DDP, with the names that Accelerate uses. Their strings are accepted, too.

    NO: gradients are reduced in their dtype. FP16 and BF16: they are cast to half precision for the reduction.
    POWER_SGD and BATCHED_POWER_SGD: torch's low-rank compression (Vogels et al. 2019, arXiv 1905.13727).
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of torch's DistributedDataParallel, with torch's names and defaults, for `kwargs_handlers`.

    They apply to the layout "ddp" with several processes. Other layouts ignore them.

    Attributes:
        dim: Dimension along which DDP would split inputs. Without effect with one device per process. Default: 0.
        broadcast_buffers: Whether rank 0's buffers are copied to all ranks at the start of each forward. Default: True.
        bucket_cap_mb: Size in MiB of the buckets in which gradients are reduced. Default: 25.
        find_unused_parameters: Whether DDP searches the graph for parameters that do not take part in the loss. It is
            needed if the set of parameters varies, and costs time in each backward. Default: False.
        check_reduction: Accepted for compatibility. It has no effect, as in torch.
        gradient_as_bucket_view: Whether `.grad` is a view of the buckets, which saves one copy of the gradients.
            Default: False.
        static_graph: Whether the set of used parameters and the order of backward never change. Default: False.
        comm_hook: Compression of gradients, a `DDPCommunicationHookType` or its string, such as "bf16". Default: NO.
        comm_wrapper: NO (the default), FP16 or BF16: dtype to which gradients are cast before `comm_hook`.
        comm_state_option: Keyword arguments of torch's PowerSGDState, such as `matrix_approximation_rank`. Default: {}.

    Raises:
        ConfigError: If `comm_hook` or `comm_wrapper` is not allowed.

    Example::

        options = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(kwargs_handlers=[options])
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
        self.comm_hook = _parse_hook(self.comm_hook, "comm_hook")
        self.comm_wrapper = _parse_hook(self.comm_wrapper, "comm_wrapper")
        if self.comm_wrapper.value not in ("no", "fp16", "bf16"):
            raise ConfigError(f"comm_wrapper={self.comm_wrapper.value!r}; allowed: no, fp16, bf16")


def _parse_hook(value: DDPCommunicationHookType | str, name: str) -> DDPCommunicationHookType:
    """Return the DDP communication hook of this name. Raise `ConfigError` if there is none."""
    try:
        return DDPCommunicationHookType(value)
    except ValueError:
        raise ConfigError(
            f"{name}={value!r}; allowed: {', '.join(h.value for h in DDPCommunicationHookType)}"
        ) from None


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class AutocastKwargs(KwargsHandler):
    """Options of torch.autocast, for `kwargs_handlers` or `Accelerator.autocast`. They need `mixed_precision`.

    Attributes:
        enabled: Whether autocast is on. False: prepared models compute in the dtype of their parameters. Default: True.
        cache_enabled: Whether casts of weights are cached within one autocast context. None (the default): torch's
            setting, which is on.
        half_residual: Whether to cast the outputs of embeddings to autocast's dtype. The residual stream then stays in
            half precision and takes half the memory. Norms still compute in float32. Use it for pre-norm models, not
            for post-norm models. Used only in `kwargs_handlers`. Default: False.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    half_residual: bool = False


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class GradScalerKwargs(KwargsHandler):
    """Options of the fp16 gradient scaler (torch.amp.GradScaler), with torch's names and defaults, for `kwargs_handlers`.

    The scaler multiplies losses by a scale, so that small fp16 gradients do not become 0. It skips an update whose
    gradients overflow. Other precisions ignore the options.

    Attributes:
        init_scale: Loss scale at the start. Default: 65536.
        growth_factor: Factor of the scale after `growth_interval` updates in a row without overflow. Default: 2.
        backoff_factor: Factor of the scale after an overflow. Default: 0.5.
        growth_interval: Number of updates without overflow after which the scale grows. Default: 2000.
        enabled: Whether losses are scaled. Default: True.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of torch's init_process_group, for `kwargs_handlers`.

    Only the first Accelerator of a process uses them, because it starts the process group.

    Attributes:
        backend: Backend of the process group, such as "nccl". None (the default): gloo for CPU tensors plus the
            device's own backend.
        init_method: URL of the rendezvous, such as "tcp://host:29500". None (the default): taken from the launcher's
            environment.
        timeout: Maximum time that a rank may keep the others waiting, a `timedelta`. Then all ranks raise an error.
            `timedelta(0)`: no limit. None (the default): `--timeout` or HEADWAY_TIMEOUT in seconds, else 10 minutes.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class ProfileKwargs(KwargsHandler):
    """Options of torch.profiler.profile, for `Accelerator.profile` or `kwargs_handlers`.

    Attributes:
        activities: Names of torch's activities, such as "cpu", "cuda" or "xpu". None (the default): all that this
            machine supports.
        schedule_option: Keyword arguments of torch.profiler.schedule (wait, warmup, active, repeat, skip_first), in
            calls of `profiler.step()`. None (the default): no schedule, everything is recorded.
        on_trace_ready: Function that is called with the profiler when a trace is ready. None (the default): no function.
        record_shapes: Whether to record the shapes of inputs. Default: False.
        profile_memory: Whether to record allocations. Default: False.
        with_stack: Whether to record the source line of each operation. Default: False.
        with_flops: Whether to estimate the FLOPs of matrix products and convolutions. Default: False.
        with_modules: Whether to record the module of each operation (TorchScript models only). Default: False.
        output_trace_dir: Directory in which each rank writes `profile_<rank>.json`, and a table of the slowest
            operations in `profile_<rank>.txt`, even if the profiled block raises. None (the default): no files.

    Example::

        with accelerator.profile(ProfileKwargs(record_shapes=True)) as profiler:
            model(inputs)
        print(profiler.key_averages().table(row_limit=5))
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
