"""Dtype helpers for scripts: layerwise casting, autocast, gradient scalers and float32 outputs."""

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from headway.compat.accelerate.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING, DistributedType
from headway.compat.accelerate.data.batches import convert_to_fp32
from headway.compat.accelerate.modules.align import PlacedCopy, write_back
from headway.compat.accelerate.modules.hooks import ModelHook, add_hook_to_module
from headway.compat.accelerate.state import AcceleratorState
from headway.core.runtime.device import detect_hardware
from headway.core.weights.locations import map_locations


class LayerwiseCastingHook(ModelHook):
    """Hook that stores a module's floating-point weights in one dtype and runs the forward with copies in another.

    The copies are discarded after each forward pass. A copy that has changed is first cast back to the stored weight.
    Gradients of trainable weights are accumulated in the stored weights.

    Args:
        storage_dtype: Dtype of the weights between forward passes.
        compute_dtype: Dtype of the weights during a forward pass.
        non_blocking: Whether to cast asynchronously.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._placed_copies: list[list[PlacedCopy]] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the module's floating-point parameters and buffers to the storage dtype, and return the module."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the module's weights with copies in the compute dtype, and return the arguments unchanged."""
        placed_copies = []
        for name, location in map_locations(module).items():
            original = location.tensor
            if original.is_floating_point() and original.dtype != self.compute_dtype:
                placed_copies.append(PlacedCopy(location, name, original, self._cast_tensor(original)))
                location.put_tensor(placed_copies[-1].copy)
        self._placed_copies.append(placed_copies)
        return args, kwargs

    def _cast_tensor(self, original: torch.Tensor) -> torch.Tensor:
        """Return a copy in the compute dtype: a Parameter if the original is one without gradients, else a tensor."""
        copy = original.to(self.compute_dtype, non_blocking=self.non_blocking)
        if not isinstance(original, nn.Parameter) or (original.requires_grad and torch.is_grad_enabled()):
            return copy
        return nn.Parameter(copy.detach(), requires_grad=original.requires_grad)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Restore the module's stored weights, and return the output unchanged."""
        for placed in self._placed_copies.pop() if self._placed_copies else []:
            write_back(placed.original, placed)
            placed.location.put_tensor(placed.original)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Attach a LayerwiseCastingHook to every linear layer and convolution.

    Args:
        module: Model, or a part of it.
        storage_dtype: Dtype of the weights between forward passes, such as torch.float8_e4m3fn.
        compute_dtype: Dtype of the weights during a forward pass, such as torch.bfloat16.
        skip_modules_pattern: One or more regular expressions. Modules whose names contain a match are skipped, with
            all their submodules. None (the default): no patterns.
        skip_modules_classes: Classes of modules to skip, with all their submodules. None (the default): no classes.
        non_blocking: Whether to cast asynchronously. Default: False.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    remaining = [("", module)]
    while remaining:
        name, each = remaining.pop()
        if isinstance(each, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(each, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(each, hook, append=True)
            continue
        remaining += [(f"{name}.{inner}" if name else inner, part) for inner, part in each.named_children()]


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Return torch.autocast in the run's precision, or a context manager without effect.

    With the precision "no", torch's default autocast dtype for the device is used, as in Accelerate. With "fp8", it is
    bfloat16.

    Args:
        native_amp: Whether to use autocast. False (the default): the context manager has no effect.
        autocast_kwargs: Options of autocast as an `AutocastKwargs`. None: torch's defaults.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(state.device.type, _DTYPES.get(state.mixed_precision), **options)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
    """Return a gradient scaler for this machine's accelerator, or for CUDA if there is none.

    Args:
        distributed_type: DistributedType.FSDP, to get a scaler for gradients that FSDP1 shards. Default: an ordinary
            GradScaler.
        kwargs: Arguments of the scaler.
    """
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    kind = detect_hardware().kind
    return torch.amp.GradScaler("cuda" if kind == "cpu" else kind, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> Any:
    """Return torch's ordinary GradScaler, which also works for parameters that `fully_shard` has sharded."""
    return get_grad_scaler(**kwargs)


class ConvertOutputsToFp32:
    """Callable that runs a forward function and converts half-precision outputs to float32.

    The callable can be pickled if the function can.

    Args:
        model_forward: Forward function to call.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        from functools import update_wrapper

        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result, with half-precision tensors converted to float32."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))
