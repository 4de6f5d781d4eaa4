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
    """Kinds of gradient compression for DDP, with the names that Accelerate uses."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of torch's DistributedDataParallel, with torch's names and defaults.

    Attributes that are not listed have the meaning that torch documents.

    Attributes:
        check_reduction: Accepted for compatibility. It has no effect, as in torch.
        comm_hook: Compression of gradients. A PowerSGD hook can be combined with `comm_wrapper` (NO, FP16 or BF16),
            which casts gradients before and after the hook.
        comm_state_option: Keyword arguments of PowerSGD's state.

    Raises:
        ConfigError: If `comm_hook` or `comm_wrapper` is not allowed.
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
    try:
        return DDPCommunicationHookType(value)
    except ValueError:
        raise ConfigError(
            f"{name}={value!r}; allowed: {', '.join(h.value for h in DDPCommunicationHookType)}"
        ) from None


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class AutocastKwargs(KwargsHandler):
    """Options of torch.autocast.

    Attributes:
        enabled, cache_enabled: Passed to torch.autocast.
        half_residual: Whether to cast the outputs of embeddings to autocast's dtype. The residual stream then stays in
            half precision and takes half the memory. Norms still compute in float32. Use it for pre-norm models, not
            for post-norm models.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    half_residual: bool = False


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class GradScalerKwargs(KwargsHandler):
    """Options of the fp16 gradient scaler, with torch's names and defaults."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of torch's init_process_group.

    Attributes:
        backend: Backend of the process group. None: gloo for CPU tensors plus the device's own backend.
        init_method: URL of the rendezvous. None: taken from the launcher's environment.
        timeout: Maximum time that a rank may keep the others waiting. None: `--timeout` or HEADWAY_TIMEOUT.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@report_unknown_keywords
@dataclass(unsafe_hash=True)
class ProfileKwargs(KwargsHandler):
    """Options of torch.profiler.profile.

    Attributes that are not listed have the meaning that torch documents.

    Attributes:
        activities: Names of torch's activities, such as "cpu", "cuda" or "xpu". None: torch's default.
        schedule_option: Keyword arguments of torch.profiler.schedule (wait, warmup, active, repeat, skip_first). None:
            no schedule, all steps are recorded.
        on_trace_ready: Function that is called with the profiler when a trace is ready. None: no function.
        output_trace_dir: Folder in which each rank writes `profile_<rank>.json`, and a table of the slowest operations
            in `profile_<rank>.txt`, even if the profiled block raises. None: no files are written.
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
