"""Communication hooks of DDP, such as hooks that compress gradients."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway.common.optional import LazyModule
from headway.core.config.torch_kwargs import DDPCommunicationHookType as Hook
from headway.core.config.torch_kwargs import DistributedDataParallelKwargs
from headway.core.memory import size_attempt
from headway.core.runtime.group import CPU_BACKEND, find_backend
from headway.errors import UnsupportedError

default_hooks = LazyModule("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
powerSGD_hook = LazyModule("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")  # noqa: N816  (torch's name)


def register_communication_hook(engine: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    """Register the DDP communication hook that the options choose, such as one that compresses gradients.

    Within an attempt at a batch size, the hook is wrapped, so that a rank without memory does not make the others wait.

    Args:
        engine: torch's DDP module.
        options: Options with the hook, its wrapper, and its state.

    Raises:
        UnsupportedError: If the device's backend does not support the hook.
    """
    if options.comm_hook is Hook.NO:
        # DDP's own reduction, unless an attempt at a batch size is in progress.
        if size_attempt.is_attempt_in_progress():
            engine.register_comm_hook(engine.process_group, size_attempt.delay_reductions(default_hooks.allreduce_hook))
        return
    check_communication_hook(options, next(iter(engine.module.parameters())).device, engine.process_group)
    hooks: dict[Hook, Callable[..., Any]] = {
        Hook.FP16: default_hooks.fp16_compress_hook,
        Hook.BF16: default_hooks.bf16_compress_hook,
        Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
        Hook.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers = {Hook.FP16: default_hooks.fp16_compress_wrapper, Hook.BF16: default_hooks.bf16_compress_wrapper}
    hook, state = hooks[options.comm_hook], None
    if options.comm_hook in (Hook.POWER_SGD, Hook.BATCHED_POWER_SGD):
        state = powerSGD_hook.PowerSGDState(engine.process_group, **options.comm_state_option)
    if options.comm_wrapper in wrappers:
        hook = wrappers[options.comm_wrapper](hook)
    engine.register_comm_hook(state, size_attempt.delay_reductions(hook))


def check_communication_hook(
    options: DistributedDataParallelKwargs, device: torch.device, group: dist.ProcessGroup
) -> None:
    """Raise an error if the backend for this device does not support the communication hook.

    Args:
        options: Options with the hook and its wrapper.
        device: Device of the model.
        group: Process group that reduces the gradients.

    Raises:
        UnsupportedError: If the bf16 hook is used with gloo.
    """
    is_bf16 = Hook.BF16 in (options.comm_hook, options.comm_wrapper)
    if is_bf16 and find_backend(device, group) == CPU_BACKEND:
        raise UnsupportedError("the bf16 communication hook needs NCCL; on gloo use comm_hook='fp16' or 'power_sgd'")
