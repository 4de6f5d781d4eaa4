"""fp16 mixed precision: float16 autocast, with a loss scale that keeps small gradients from underflowing."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from headway.core.config.engines import EngineOptions
from headway.core.precision.mixed import Bf16Precision, GradientParts
from headway.core.runtime.device import Hardware
from headway.errors import StateError, UnsupportedError

_MIXED_SCALES = (
    "unscale_() has already been called on this optimizer since the last update(), and backward() was called in between: its "
    "scaled gradients were added to unscaled ones. Clip or unscale once for each update, behind `if accelerator.sync_gradients:`, "
    "or call zero_grad() before the next backward()"
)


class _Probe:
    """Proxy of an optimizer that torch's GradScaler steps. It records whether the scaler really called `step`.

    Fused optimizers skip updates by themselves. The proxy hides this ability from the scaler, so that the scaler itself
    decides and a skipped update is always recorded.

    Args:
        optimizer: The torch optimizer.
        parts: Object that returns this rank's shards of the gradients. If None, gradients are unsharded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parts: GradientParts | None) -> None:
        self.optimizer = optimizer
        self.did_step = False
        self.run: Callable[[], Any] = optimizer.step
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        if self._parts is None:
            return groups
        every = [p for group in groups for p in group["params"]]
        return [{"params": [_hold_gradient(grad) for grad in self._parts.get_local_gradients(every)]}]

    def step(self) -> None:
        self.did_step = True
        self.run()


def _hold_gradient(grad: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose `grad` is the given gradient, so that the scaler treats it as a parameter."""
    held = grad.detach()
    held.grad = grad
    return held


class Fp16Precision(Bf16Precision):
    """float16 autocast for forward passes. The loss is scaled so that small gradients do not underflow.

    Args:
        hardware: Device type that this process computes on.
        options: Options for autocast and the gradient scaler.
        parts: Object that returns this rank's shards of the gradients (the strategy). Default: None, gradients are
            unsharded.
    """

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
        self._num_scaled = 0
        self._unscaled_after: dict[int, int] = {}

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, in float32 because a scale of 65536 overflows in float16.

        If the scaler is disabled, return the loss in float32.
        """
        self._num_scaled += 1
        return self.scaler.scale(loss.float())

    def get_gradient_scale(self) -> float:
        """Return the current loss scale. Synchronizes the host with the device."""
        return self.scaler.get_scale()

    def unscale_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return a gradient norm divided by the loss scale, computed on its device without a host synchronization.

        The norm is returned unchanged if no loss has been scaled yet, or the scaler is disabled.
        """
        scale = self.scaler._scale
        return norm if scale is None else norm / scale.to(norm.device, non_blocking=True)

    def update_scale(self) -> None:
        """Grow or shrink the loss scale once for all steps since the last change.

        Do nothing if no optimizer has stepped or discarded gradients since then. Also do nothing while an optimizer's
        gradients are unscaled: between its `unscale` and its `step` or `discard_gradients`.
        """
        if (self._stepped or self._dropped) and self._unscaled <= self._stepped:
            self.scaler.update()
            self._unscaled.clear()
            self._stepped.clear()
            self._dropped.clear()

    def adjust_if_all_stepped(self, num_optimizers: int) -> None:
        """Update the loss scale if all optimizers have stepped, so that no gradients of the old scale remain.

        Args:
            num_optimizers: Number of optimizers that step in each accumulation window.
        """
        if len(self._stepped) >= num_optimizers:
            self.update_scale()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, once per accumulation window.

        Do nothing if they are already unscaled, or the scaler is disabled.

        Raises:
            StateError: If a loss was scaled after the gradients were unscaled, without a step or `discard_gradients` in between.
        """
        key = id(optimizer)
        is_waiting = key in self._unscaled and key not in self._stepped
        if is_waiting and self._unscaled_after.get(key, self._num_scaled) != self._num_scaled:
            raise StateError(_MIXED_SCALES)
        self._unscaled_after[key] = self._num_scaled
        self._unscale_once(optimizer)

    def _unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._unscaled and self.scaler.is_enabled():
            self.scaler.unscale_(self._get_probe(optimizer))  # type: ignore[arg-type]
            if self._parts is not None:
                self._agree_on_overflow(self._get_probe(optimizer), self._parts)
            self._unscaled.add(id(optimizer))

    def _agree_on_overflow(self, probe: _Probe, parts: GradientParts) -> None:
        """Tell all ranks whether gradients overflowed on any rank, so that all of them skip the update if one did.

        Every rank must call it. It synchronizes the host with the device.

        Args:
            probe: Proxy of the optimizer, whose gradients have just been unscaled.
            parts: Object with the collectives over all ranks.
        """
        found = self.scaler._per_optimizer_states[id(probe)]["found_inf_per_device"]
        total = sum((each.item() for each in found.values()), 0.0)
        (total,) = parts.everyone.reduce_numbers([total])
        device = next(iter(found), torch.device(self._kind))
        found[device] = torch.full((), total, dtype=torch.float32, device=device)

    def discard_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the optimizer's gradients are discarded without a step.

        The next gradients are then unscaled again. Do nothing if the gradients have not been unscaled since the last
        step.
        """
        key = id(optimizer)
        if key in self._unscaled and key not in self._stepped:
            # The next probe gets a new state in the scaler. An overflow in the old state still counts at the next
            # adjustment.
            self._unscaled.remove(key)
            self._dropped.append(self._probes.pop(key))

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any] | None,
        run: Callable[[], Any] | None = None,
    ) -> bool:
        """Step the optimizer unless a gradient overflowed. Return False if the update was skipped.

        Gradients that are still scaled are unscaled first. With sharded gradients, every rank must call this method.

        Args:
            optimizer: torch's own optimizer.
            closure: Must be None, because gradient scaling does not support closures.
            run: Function that makes the update instead of `optimizer.step`. Default: None, which calls
                `optimizer.step`.

        Raises:
            UnsupportedError: If a closure was given.
        """
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) cannot be undone under fp16; use bf16, or step without a closure"
            )
        self._unscale_once(optimizer)
        probe = self._get_probe(optimizer)
        probe.did_step = False
        probe.run = run or optimizer.step
        self.scaler.step(probe)  # type: ignore[arg-type]
        self._stepped.add(id(optimizer))
        return probe.did_step

    def _get_probe(self, optimizer: torch.optim.Optimizer) -> _Probe:
        return self._probes.setdefault(id(optimizer), _Probe(optimizer, self._parts))

    def snapshot(self) -> Any:
        """Return copies of the loss scale, its growth tracker and the per-optimizer state for `restore`.

        The host is not synchronized with the device. Return None if the scaler is disabled.
        """
        scaler = self.scaler
        if not scaler.is_enabled():
            return None
        tensors = [None if value is None else value.clone() for value in (scaler._scale, scaler._growth_tracker)]
        states = _copy_states(scaler._per_optimizer_states)
        return tensors, states, dict(self._probes), set(self._unscaled), set(self._stepped), list(self._dropped)

    def restore(self, snapshot: Any) -> None:
        """Restore the loss scale, its growth tracker and the per-optimizer state from a snapshot.

        Do nothing if the snapshot is None, as of a disabled scaler. A snapshot can be restored several times.
        """
        if snapshot is None:
            return
        (scale, growth), states, probes, unscaled, stepped, dropped = snapshot
        scaler = self.scaler
        scaler._scale, scaler._growth_tracker = (None if v is None else v.clone() for v in (scale, growth))
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update(_copy_states(states))
        self._probes = dict(probes)
        self._unscaled = set(unscaled)
        self._stepped = set(stepped)
        self._dropped = list(dropped)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, after updating the loss scale for completed steps."""
        self.update_scale()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scaler's state, as returned by `state_dict`. Steps and gradients from before it are forgotten."""
        self.scaler.load_state_dict(state)
        self.scaler._per_optimizer_states.clear()
        self._probes.clear()
        self._unscaled.clear()
        self._stepped.clear()
        self._dropped.clear()


def _copy_states(states: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return a copy of the scaler's per-optimizer state whose dicts are independent of the original."""
    return {
        key: {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}
        for key, state in states.items()
    }
