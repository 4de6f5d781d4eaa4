"""fp16 mixed precision: float16 autocast, with a loss scale that keeps small gradients from underflowing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.config.engines import EngineOptions
from headway.core.precision.mixed import Bf16Precision, GradientShards
from headway.core.runtime.device import Hardware
from headway.errors import StateError, UnsupportedError

_MIXED_SCALES = (
    "unscale_() has already been called on this optimizer since the last update(), and backward() was called in between: its "
    "scaled gradients were added to unscaled ones. Clip or unscale once for each update, behind `if accelerator.sync_gradients:`, "
    "or call zero_grad() before the next backward()"
)


@dataclass(frozen=True)
class ScalerSnapshot:
    """Copy of a gradient scaler's state, from which the scaler is restored when a batch is run again.

    Attributes:
        scale: Loss scale, as a tensor on the device. None before the first backward.
        growth_tracker: Number of steps since the scale last changed, as a tensor on the device. None before the first
            backward.
        optimizer_states: The scaler's state of each optimizer, such as whether it was unscaled, by the proxy's ID.
        proxies: Proxies by the ID of their optimizer.
        unscaled: IDs of the optimizers whose gradients were unscaled.
        stepped: IDs of the optimizers that stepped since the scale was last updated.
        discarded_proxies: Proxies whose gradients were discarded.
    """

    scale: torch.Tensor | None
    growth_tracker: torch.Tensor | None
    optimizer_states: dict[int, dict[str, Any]]
    proxies: "dict[int, _OptimizerProxy]"
    unscaled: set[int]
    stepped: set[int]
    discarded_proxies: "list[_OptimizerProxy]"


class _OptimizerProxy:
    """Proxy of an optimizer that torch's GradScaler steps. It records whether the scaler really called `step`.

    Fused optimizers skip updates by themselves. The proxy hides this ability from the scaler, so that the scaler itself
    decides and a skipped update is always recorded. The scaler keeps its state of an optimizer by the proxy's ID.

    Args:
        optimizer: The torch optimizer.
        shards: Object that returns this rank's shards of the gradients. If None, gradients are unsharded.

    Attributes:
        optimizer: The torch optimizer.
        did_step: Whether `step` was called since the attribute was set to False.
        run: Function that makes the update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: GradientShards | None) -> None:
        self.optimizer = optimizer
        self.did_step = False
        self.run: Callable[[], Any] = optimizer.step
        self._shards = shards

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups whose gradients the scaler unscales, as plain tensors even if gradients are sharded."""
        groups = self.optimizer.param_groups
        if self._shards is None:
            return groups
        parameters = [p for group in groups for p in group["params"]]
        return [{"params": [_make_parameter(grad) for grad in self._shards.get_local_gradients(parameters)]}]

    def step(self) -> None:
        """Make the update. The scaler calls it unless a gradient overflowed."""
        self.did_step = True
        self.run()


def _make_parameter(grad: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose `grad` is the given gradient, so that the scaler treats it as a parameter."""
    parameter = grad.detach()
    parameter.grad = grad
    return parameter


class Fp16Precision(Bf16Precision):
    """float16 autocast for forward passes. The loss is scaled so that small gradients do not underflow.

    Args:
        hardware: Device type that this process computes on.
        options: Options for autocast and the gradient scaler.
        shards: Object that returns this rank's shards of the gradients (the strategy). Default: None, gradients are
            unsharded.
    """

    name = "fp16"
    dtype = torch.float16

    def __init__(self, hardware: Hardware, options: EngineOptions, shards: GradientShards | None = None) -> None:
        super().__init__(hardware, options)
        self._shards = None if shards is None or shards.capabilities.whole_gradients else shards
        scaler_options = options.scaler
        self.scaler: torch.amp.GradScaler = torch.amp.GradScaler(
            hardware.kind,
            init_scale=scaler_options.init_scale,
            growth_factor=scaler_options.growth_factor,
            backoff_factor=scaler_options.backoff_factor,
            growth_interval=scaler_options.growth_interval,
            enabled=scaler_options.enabled,
        )
        # By the ID of the optimizer. The two sets hold the IDs of optimizers that have unscaled their gradients, and of
        # those that have stepped, since the loss scale last changed.
        self._proxies: dict[int, _OptimizerProxy] = {}
        self._unscaled_ids: set[int] = set()
        self._stepped_ids: set[int] = set()
        # Proxies of gradients that were unscaled and then discarded. The scaler still needs them until `update`.
        self._discarded_proxies: list[_OptimizerProxy] = []
        # Number of losses that were scaled so far, and its value when each optimizer last unscaled its gradients.
        self._num_scaled_losses = 0
        self._num_losses_at_unscale: dict[int, int] = {}

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, in float32 because a scale of 65536 overflows in float16.

        If the scaler is disabled, return the loss in float32.
        """
        self._num_scaled_losses += 1
        return self.scaler.scale(loss.float())

    def get_gradient_scale(self) -> float:
        """Return the current loss scale, by which gradients are multiplied. The host waits for the device.

        Return 1.0 if the scaler is disabled.
        """
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
        if (self._stepped_ids or self._discarded_proxies) and self._unscaled_ids <= self._stepped_ids:
            self.scaler.update()
            self._unscaled_ids.clear()
            self._stepped_ids.clear()
            self._discarded_proxies.clear()

    def adjust_if_all_stepped(self, num_optimizers: int) -> None:
        """Update the loss scale if all optimizers have stepped, so that no gradients of the old scale remain.

        Args:
            num_optimizers: Number of optimizers that step in each accumulation window.
        """
        if len(self._stepped_ids) >= num_optimizers:
            self.update_scale()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale, once per accumulation window.

        Do nothing if they are already unscaled, or the scaler is disabled.

        Raises:
            StateError: If a loss was scaled after the gradients were unscaled, without a step or `discard_gradients` in
                between. Its gradients were added to unscaled ones.
        """
        key = id(optimizer)
        are_unscaled = key in self._unscaled_ids and key not in self._stepped_ids
        if are_unscaled and self._num_losses_at_unscale.get(key, self._num_scaled_losses) != self._num_scaled_losses:
            raise StateError(_MIXED_SCALES)
        self._num_losses_at_unscale[key] = self._num_scaled_losses
        self._unscale_once(optimizer)

    def _unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the optimizer's gradients, unless this was done since the loss scale last changed."""
        if id(optimizer) not in self._unscaled_ids and self.scaler.is_enabled():
            self.scaler.unscale_(self._get_proxy(optimizer))  # type: ignore[arg-type]
            if self._shards is not None:
                self._agree_on_overflow(self._get_proxy(optimizer), self._shards)
            self._unscaled_ids.add(id(optimizer))

    def _agree_on_overflow(self, proxy: _OptimizerProxy, shards: GradientShards) -> None:
        """Tell all ranks whether gradients overflowed on any rank, so that all of them skip the update if one did.

        Every rank must call it. It synchronizes the host with the device.

        Args:
            proxy: Proxy of the optimizer, whose gradients have just been unscaled.
            shards: Object with the collectives over all ranks.
        """
        # By device: a tensor that is 1 if a gradient overflowed, else 0. Empty if this rank has no gradients.
        overflows = self.scaler._per_optimizer_states[id(proxy)]["found_inf_per_device"]
        own_total = sum((each.item() for each in overflows.values()), 0.0)
        (total,) = shards.everyone.reduce_numbers([own_total])
        device = next(iter(overflows), torch.device(self._kind))
        overflows[device] = torch.full((), total, dtype=torch.float32, device=device)

    def discard_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the optimizer's gradients are discarded without a step.

        The next gradients are then unscaled again. Do nothing if the gradients have not been unscaled since the last
        step.
        """
        key = id(optimizer)
        if key in self._unscaled_ids and key not in self._stepped_ids:
            # The next proxy gets a new state in the scaler. An overflow in the old state still counts when the loss scale
            # is updated next.
            self._unscaled_ids.remove(key)
            self._discarded_proxies.append(self._proxies.pop(key))

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
        proxy = self._get_proxy(optimizer)
        proxy.did_step = False
        proxy.run = run or optimizer.step
        self.scaler.step(proxy)  # type: ignore[arg-type]
        self._stepped_ids.add(id(optimizer))
        return proxy.did_step

    def _get_proxy(self, optimizer: torch.optim.Optimizer) -> _OptimizerProxy:
        """Return the optimizer's proxy, which is created at the first call and after `discard_gradients`."""
        return self._proxies.setdefault(id(optimizer), _OptimizerProxy(optimizer, self._shards))

    def snapshot(self) -> "ScalerSnapshot | None":
        """Return copies of the loss scale, its growth tracker and the per-optimizer state for `restore`.

        The host is not synchronized with the device. Return None if the scaler is disabled.
        """
        scaler = self.scaler
        if not scaler.is_enabled():
            return None
        return ScalerSnapshot(
            scale=None if scaler._scale is None else scaler._scale.clone(),
            growth_tracker=None if scaler._growth_tracker is None else scaler._growth_tracker.clone(),
            optimizer_states=_copy_states(scaler._per_optimizer_states),
            proxies=dict(self._proxies),
            unscaled=set(self._unscaled_ids),
            stepped=set(self._stepped_ids),
            discarded_proxies=list(self._discarded_proxies),
        )

    def restore(self, snapshot: Any) -> None:
        """Restore the loss scale, its growth tracker and the per-optimizer state from a snapshot.

        Do nothing if the snapshot is None, as of a disabled scaler. A snapshot can be restored several times.
        """
        if snapshot is None:
            return
        scaler = self.scaler
        scaler._scale = None if snapshot.scale is None else snapshot.scale.clone()
        scaler._growth_tracker = None if snapshot.growth_tracker is None else snapshot.growth_tracker.clone()
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update(_copy_states(snapshot.optimizer_states))
        self._proxies = dict(snapshot.proxies)
        self._unscaled_ids = set(snapshot.unscaled)
        self._stepped_ids = set(snapshot.stepped)
        self._discarded_proxies = list(snapshot.discarded_proxies)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, after updating the loss scale for completed steps."""
        self.update_scale()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scaler's state, as returned by `state_dict`. Steps and gradients from before it are forgotten."""
        self.scaler.load_state_dict(state)
        self.scaler._per_optimizer_states.clear()
        self._proxies.clear()
        self._unscaled_ids.clear()
        self._stepped_ids.clear()
        self._discarded_proxies.clear()


def _copy_states(states: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return a copy of the scaler's per-optimizer state whose dicts are independent of the original."""
    return {
        key: {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}
        for key, state in states.items()
    }
