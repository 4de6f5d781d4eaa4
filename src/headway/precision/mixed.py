"""What a number format is to a training step: full precision, which does nothing, is the base of the others.

Mixed precision by torch.autocast: bf16, fp16 with one gradient scaler for all optimizers, and fp8 (see `float8.py`).

The fp16 scale changes only when no optimizer waits for a step: with several optimizers, all gradients of a window are
unscaled by the scale they were made with. Whether a step was skipped is seen from the step itself, not guessed from
the scale.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Protocol

import torch

from headway.config.engines import EngineOptions
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger
from headway.precision.float8 import check_float8
from headway.runtime.collectives.checked import Collectives
from headway.runtime.device import Hardware

log = get_logger(__name__)


class GradientParts(Protocol):
    """Where gradients lie, as the strategy knows."""

    @property
    def capabilities(self) -> Any: ...

    @property
    def everyone(self) -> Collectives: ...

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank holds of each gradient that there is, as plain tensors that may be changed in place."""


class Precision:
    """What a number format adds to a training step. This one is full precision: tensors keep the dtypes they have."""

    name = "no"
    is_mixed = False
    scaler: torch.amp.GradScaler | None = None

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        return nullcontext()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as backward should see it."""
        return loss

    def gradient_scale(self) -> float:
        """What gradients that are not unscaled yet have been multiplied by; on an accelerator the host waits for it."""
        return 1.0

    def unscaled_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of gradients that are not unscaled yet as that of their true values; nobody waits."""
        return norm

    def adjust(self) -> None:
        """No optimizer waits for a step: the scale may change now."""

    def settle(self, num_optimizers: int) -> None:
        """Adjust where all of so many optimizers have stepped; what is asked about the scale now is up to date."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's gradients true values; harmless when repeated."""

    def discard(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's gradients are dropped: the next ones are not unscaled yet."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Step the optimizer; False where the update was skipped."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def snapshot(self) -> Any:
        """What `restore` needs to take a window back."""
        return None

    def restore(self, snapshot: object) -> None:
        """Go back to a snapshot, which stays good."""

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""


def halve_embeddings(model: torch.nn.Module) -> torch.nn.Module:
    """Cast what embeddings put into the residual stream to autocast's type (`AutocastKwargs(half_residual=True)`)."""
    found = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    if not found:
        log.warning_once("half_residual=True has no effect on %s, which has no embeddings", type(model).__name__)
    for module in found:
        module.register_forward_hook(_halve)
    return model


def _halve(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    kind = output.device.type
    is_cast = torch.is_autocast_enabled(kind) and output.dtype == torch.float32
    return output.to(torch.get_autocast_dtype(kind)) if is_cast else output


class Bf16Precision(Precision):
    """Forward passes autocast to bfloat16; weights, gradients and optimizer state keep their dtype."""

    name = "bf16"
    is_mixed = True
    dtype = torch.bfloat16

    def __init__(self, hardware: Hardware, options: EngineOptions) -> None:
        self._kind = hardware.kind
        self._options = options.autocast

    def autocast(self) -> AbstractContextManager[Any]:
        """torch.autocast for the hardware in use."""
        chosen = self._options
        return torch.autocast(self._kind, dtype=self.dtype, enabled=chosen.enabled, cache_enabled=chosen.cache_enabled)


class Float8Precision(Bf16Precision):
    """bf16's autocast, around linear layers that multiply in float8."""

    name = "fp8"


class _Probe:
    """Stands for an optimizer towards torch's scaler, and notes whether its step was called.

    It hides that fused optimizers skip by themselves, so that a skip is always seen here.

    Args:
        optimizer: torch's.
        parts: shows the part of each gradient that lies here; None: all of them do.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parts: GradientParts | None) -> None:
        self.optimizer = optimizer
        self.did_step = False
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        if self._parts is None:
            return groups
        every = [p for group in groups for p in group["params"]]
        return [{"params": [_holder(grad) for grad in self._parts.local_gradients(every)]}]

    def step(self) -> None:
        self.did_step = True
        self.optimizer.step()


def _holder(grad: torch.Tensor) -> torch.Tensor:
    """What has this tensor as its gradient."""
    held = grad.detach()
    held.grad = grad
    return held


class Fp16Precision(Bf16Precision):
    """Forward passes autocast to float16; losses are scaled so that small gradients survive."""

    name = "fp16"
    dtype = torch.float16

    def __init__(self, hardware: Hardware, options: EngineOptions, parts: GradientParts | None = None) -> None:
        super().__init__(hardware, options)
        self._parts = None if parts is None or parts.capabilities.whole_gradients else parts
        chosen = options.scaler
        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler(
            hardware.kind,
            init_scale=chosen.init_scale,
            growth_factor=chosen.growth_factor,
            backoff_factor=chosen.backoff_factor,
            growth_interval=chosen.growth_interval,
            enabled=chosen.enabled,
        )
        self._probes: dict[int, _Probe] = {}
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        self._dropped: list[_Probe] = []

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale, in float32: a scale of 65536 is infinite in float16."""
        return self.scaler.scale(loss.float())

    def gradient_scale(self) -> float:
        """The scale in force."""
        return self.scaler.get_scale()

    def unscaled_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Divided by the scale where it lies."""
        scale = self.scaler._scale
        return norm if scale is None else norm / scale.to(norm.device, non_blocking=True)

    def adjust(self) -> None:
        """Grow or shrink the scale once for all the steps since the last time, unless one is still to come."""
        if (self._stepped or self._dropped) and self._unscaled <= self._stepped:
            self.scaler.update()
            self._unscaled.clear()
            self._stepped.clear()
            self._dropped.clear()

    def settle(self, num_optimizers: int) -> None:
        """Adjust where all of so many optimizers have stepped: none of them waits with the old scale."""
        if len(self._stepped) >= num_optimizers:
            self.adjust()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once per window."""
        if id(optimizer) not in self._unscaled and self.scaler.is_enabled():
            self.scaler.unscale_(self._probe(optimizer))  # type: ignore[arg-type]
            if self._parts is not None:
                self._agree(self._probe(optimizer), self._parts)
            self._unscaled.add(id(optimizer))

    def _agree(self, probe: _Probe, parts: GradientParts) -> None:
        """An overflow in one rank's part is known to all of them."""
        found = self.scaler._per_optimizer_states[id(probe)]["found_inf_per_device"]
        total = sum((each.item() for each in found.values()), 0.0)
        (total,) = parts.everyone.reduce_numbers([total])
        device = next(iter(found), torch.device(self._kind))
        found[device] = torch.full((), total, dtype=torch.float32, device=device)

    def discard(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget that gradients were unscaled, where they are dropped without a step."""
        key = id(optimizer)
        if key in self._unscaled and key not in self._stepped:
            # A new probe has a new state in the scaler; the old one's overflow still counts at the next adjustment.
            self._unscaled.remove(key)
            self._dropped.append(self._probes.pop(key))

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Step unless a gradient overflowed.

        Raises:
            UnsupportedError: a closure was given.
        """
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) cannot be undone under fp16; use bf16, or step without a closure"
            )
        self.unscale(optimizer)
        probe = self._probe(optimizer)
        probe.did_step = False
        self.scaler.step(probe)  # type: ignore[arg-type]
        self._stepped.add(id(optimizer))
        return probe.did_step

    def _probe(self, optimizer: torch.optim.Optimizer) -> _Probe:
        return self._probes.setdefault(id(optimizer), _Probe(optimizer, self._parts))

    def snapshot(self) -> Any:
        """The scale, its growth, and which optimizers wait for what. No value is read from the device."""
        scaler = self.scaler
        if not scaler.is_enabled():
            return None
        tensors = [None if value is None else value.clone() for value in (scaler._scale, scaler._growth_tracker)]
        states = _copied(scaler._per_optimizer_states)
        return tensors, states, dict(self._probes), set(self._unscaled), set(self._stepped), list(self._dropped)

    def restore(self, snapshot: Any) -> None:
        """Put all of that back."""
        if snapshot is None:
            return
        (scale, growth), states, probes, unscaled, stepped, dropped = snapshot
        scaler = self.scaler
        scaler._scale, scaler._growth_tracker = (None if v is None else v.clone() for v in (scale, growth))
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update(_copied(states))
        self._probes, self._unscaled = dict(probes), set(unscaled)
        self._stepped, self._dropped = set(stepped), list(dropped)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, adjusted for the steps done."""
        self.adjust()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a scaler's state."""
        self.scaler.load_state_dict(state)


def _copied(states: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What torch's scaler knows of each optimizer, in dicts of its own."""
    return {
        key: {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}
        for key, state in states.items()
    }


def is_bf16_emulated(hardware: Hardware) -> bool:
    """Does torch compute in bfloat16 there without units for it, as on a V100 or a T4?"""
    probe = getattr(hardware.module, "is_bf16_supported", None)
    if probe is None or "including_emulation" not in signature(probe).parameters:
        return False
    return not probe(including_emulation=False)


def _name_of(hardware: Hardware) -> str:
    name = getattr(hardware.module, "get_device_name", None)
    return f"this {hardware.kind} device" if name is None else str(name())


def build_precision(
    name: str, hardware: Hardware, options: EngineOptions, parts: GradientParts | None = None
) -> Precision:
    """The precision called `name`.

    Args:
        name: "no", "bf16", "fp16" or "fp8".
        hardware: what computes.
        options: of autocast, the scaler and float8.
        parts: knows which part of the gradients lies here (the strategy); None: all of them do.

    Raises:
        ConfigError: an unknown name, or options of another format.
        UnsupportedError: the hardware cannot compute in it.
        OptionalDependencyMissing: torchao is not installed.
    """
    check_float8(name, hardware, options)
    if name == "no":
        return Precision()
    if name in ("bf16", "fp8"):
        if not hardware.supports_bf16():
            raise UnsupportedError(
                f"mixed_precision={name!r}, but this {hardware.kind} device has no bfloat16; use 'fp16' or 'no'"
            )
        if is_bf16_emulated(hardware):
            log.warning_once(
                "mixed_precision='%s', but %s only emulates bfloat16, which is slower than float32: it has no bfloat16 units "
                "(CUDA devices have them from compute capability 8.0). Use mixed_precision='fp16'",
                name,
                _name_of(hardware),
            )
        _check_autocast(hardware, name, torch.bfloat16)
        return Bf16Precision(hardware, options) if name == "bf16" else Float8Precision(hardware, options)
    if name == "fp16":
        _check_autocast(hardware, name, torch.float16)
        return Fp16Precision(hardware, options, parts)
    raise ConfigError(f"mixed_precision={name!r} is unknown; allowed: 'no', 'bf16', 'fp16', 'fp8'")


def _check_autocast(hardware: Hardware, name: str, dtype: torch.dtype) -> None:
    if not hardware.supports_autocast(dtype):
        raise UnsupportedError(
            f"mixed_precision={name!r}, but torch.autocast does not cast to {str(dtype).removeprefix('torch.')} on {hardware.kind} "
            "devices; use 'no', or convert the model itself (model.to(dtype))"
        )
