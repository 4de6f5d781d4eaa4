"""Dtypes for scripts: layerwise casting from a small storage dtype, autocast, gradient scalers, outputs as float32."""

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from headway.compat.accelerate.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING, DistributedType
from headway.compat.accelerate.data.batches import convert_to_fp32
from headway.compat.accelerate.modules.align import PlacedCopy, write_home
from headway.compat.accelerate.modules.hooks import ModelHook, add_hook_to_module
from headway.compat.accelerate.state import AcceleratorState
from headway.runtime.device import detect
from headway.weights.names import places_of


class LayerwiseCastingHook(ModelHook):
    """Stores a module's floating-point weights in one dtype, and replaces them with copies in another for each forward.

    The stored weights stay: they are not cast back, unless the copy was written to. Gradients of weights that learn come to
    the stored ones.

    Args:
        storage_dtype: between forwards.
        compute_dtype: in forwards.
        non_blocking: do not wait for casts.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._uses: list[list[PlacedCopy]] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the weights to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the weights with copies in the compute dtype."""
        uses = []
        for name, place in places_of(module).items():
            home = place.tensor
            if home.is_floating_point() and home.dtype != self.compute_dtype:
                uses.append(PlacedCopy(place, name, home, self._cast(home)))
                place.put(uses[-1].copy)
        self._uses.append(uses)
        return args, kwargs

    def _cast(self, home: torch.Tensor) -> torch.Tensor:
        copy = home.to(self.compute_dtype, non_blocking=self.non_blocking)
        if not isinstance(home, nn.Parameter) or (home.requires_grad and torch.is_grad_enabled()):
            return copy
        return nn.Parameter(copy.detach(), requires_grad=home.requires_grad)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Put the stored weights back."""
        for use in self._uses.pop() if self._uses else []:
            write_home(use.home, use)
            use.place.put(use.home)
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
        module: the model, or a part of it.
        storage_dtype: of the weights between forwards, such as torch.float8_e4m3fn.
        compute_dtype: of the weights in forwards, such as torch.bfloat16.
        skip_modules_pattern: regular expressions, or one; a module whose name one of them finds something in is left as it is,
            with all inside.
        skip_modules_classes: so are modules of these classes.
        non_blocking: do not wait for casts.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    waiting = [("", module)]
    while waiting:
        name, each = waiting.pop()
        if isinstance(each, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(each, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(each, hook, append=True)
            continue
        waiting += [(f"{name}.{inner}" if name else inner, part) for inner, part in each.named_children()]


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """torch.autocast in the run's precision, or nothing.

    Args:
        native_amp: False: nothing.
        autocast_kwargs: an `AutocastKwargs`.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(state.device.type, _DTYPES.get(state.mixed_precision), **options)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
    """A gradient scaler for this machine's accelerator ("cuda" where there is none), or for sharded gradients.

    Args:
        distributed_type: DistributedType.FSDP for sharded ones.
        kwargs: for the scaler.
    """
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    kind = detect().kind
    return torch.amp.GradScaler("cuda" if kind == "cpu" else kind, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> Any:
    """A gradient scaler for parameters that `fully_shard` has sharded: torch's usual one."""
    return get_grad_scaler(**kwargs)


class ConvertOutputsToFp32:
    """A forward function whose half-precision outputs are converted; it can be pickled where the function can.

    Args:
        model_forward: the function.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        from functools import update_wrapper

        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))
