"""Wrapper of DeepSpeed's engine that adds Headway's accumulation windows.

DeepSpeed keeps gradients in its own buffers. Its optimizer step divides them by the loss scale, and clips them. To
divide the gradients of a window by its total weight, Headway sets the loss scale for one step. To clip them, it sets
DeepSpeed's maximum norm for this step. The norm is computed before the step::

    backward ... backward -> reduced and partitioned gradients -> norm, loss scale, maximum norm -> step or drop
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from headway.errors import StateError, UnsupportedError

_NEEDED = ("finalize_gradient_accumulation_boundary", "clear_backward_seen_flag", "loss_scaler")
"""Members of DeepSpeed's ZeRO optimizer that `ZeroEngine` uses. A version without one of them raises an error."""


class ZeroEngine:
    """Wrapper of DeepSpeed's engine for one model and its optimizer.

    Args:
        engine: DeepSpeed's own engine.
        stage: ZeRO stage, 1, 2 or 3.

    Attributes:
        inner: DeepSpeed's ZeRO optimizer, which wraps the optimizer that updates the parameters.
        is_dirty: Whether gradients were computed since the last step.

    Raises:
        UnsupportedError: If this version of DeepSpeed, or the optimizer that it created, lacks a needed member.
    """

    def __init__(self, engine: Any, stage: int) -> None:
        self.engine = engine
        self.inner = engine.optimizer
        self.stage = stage
        lacking = [name for name in _NEEDED if not hasattr(self.inner, name)]
        if lacking:
            import deepspeed

            raise UnsupportedError(
                f"DeepSpeed {deepspeed.__version__} created a {type(self.inner).__name__} without {', '.join(lacking)}; "
                "Headway is tested with DeepSpeed 0.19.8: pip install 'deepspeed>=0.19.8'"
            )
        self.is_dirty = False
        self._is_final = False
        self._is_forwarded = False
        self._is_closed = False
        self._num_open = 0
        self._correction = 1.0
        self._limit = 0.0
        self.engine.set_gradient_accumulation_boundary(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward through the engine."""
        self._is_forwarded = True
        self._num_open += 1
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, factor: float, **kwargs: Any) -> None:
        """Run DeepSpeed's backward on `loss * factor`, and accumulate the gradients averaged over ranks.

        Args:
            loss: Loss of the micro-batch.
            factor: Factor by which the loss is multiplied, from its weight in the accumulation window.
            kwargs: Other arguments of `backward`. Only `retain_graph` is supported.

        Raises:
            StateError: If the accumulation window's gradients were already clipped or read.
            UnsupportedError: If `kwargs` sets an option other than `retain_graph`, or if ZeRO stage 3 gets a second
                backward through one forward.
        """
        if self._is_final:
            raise StateError(
                "backward was called after the gradients of the window were clipped or read, which makes them final with "
                "DeepSpeed. Call backward for all losses before clip_grad_norm_, and call step() or zero_grad() before the next "
                "window"
            )
        odd = sorted(key for key, value in kwargs.items() if key != "retain_graph" and value)
        if odd:
            raise UnsupportedError(f"backward({', '.join(odd)}=...) is not supported with DeepSpeed; leave it out")
        if self._num_open < 1 and self.stage == 3:
            raise UnsupportedError(
                "backward was called twice through one forward; ZeRO stage 3 frees the parameters after the first. Add the "
                "losses and call backward once, or use stage 2"
            )
        self._num_open -= 1
        if not self._is_forwarded:
            # This is a second backward through one forward. DeepSpeed separates gradients by forward: clear its flag.
            self.inner.clear_backward_seen_flag()
        self._is_forwarded = False
        self._is_closed = False
        self.is_dirty = True
        scaled = loss * (factor / self._correction)
        self.engine.backward(scaled, retain_graph=bool(kwargs.get("retain_graph")), scale_wrt_gas=False)

    # ---------------------------------------------------------------- final gradients

    def close_window(self) -> None:
        """Mark the accumulation window as complete, so that its gradients can be read.

        A later backward marks it as incomplete again. This happens if a micro-batch has several losses.
        """
        self._is_closed = True

    def get_local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's shards of the gradients in DeepSpeed's buffers, multiplied by the loss scale.

        The list is empty while the accumulation window is open, or if no gradients were computed since the last step.
        Reading the gradients makes them final: a later backward in this window raises `StateError`.
        """
        if not self.is_dirty or not self._is_closed:
            return []
        self._finalize_gradients()
        parts = [self._get_part(parameter) for parameter in parameters]
        return [part for part in parts if part is not None]

    def _get_part(self, parameter: Any) -> torch.Tensor | None:
        inner = self.inner
        if self.stage == 3:
            is_known = hasattr(parameter, "ds_id") and inner.get_param_id(parameter) in inner.grad_position
            return inner._get_fp32_grad_state_partition(parameter, True)[0] if is_known else None
        mapping = getattr(parameter, "_hp_mapping", None)
        part: torch.Tensor | None
        part = None if mapping is None else mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        return part

    def correct_gradients(self, factor: float) -> None:
        """Multiply the accumulation window's gradients by a factor. The multiplication happens in `step`."""
        self._correction *= factor

    def compute_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients over all ranks, before clipping. All ranks must call this method.

        The norm is infinite if a gradient is not finite, and NaN while the accumulation window is open. It is 0 if
        no gradients were computed since the last step.
        """
        if not self.is_dirty:
            return torch.zeros(())
        if not self._is_closed:  # gradients are still spread over buffers
            return torch.full((), math.nan)
        from deepspeed.runtime.utils import combine_grad_norm_groups

        self._finalize_gradients()
        if self.stage == 3:
            raw = combine_grad_norm_groups(self.inner._get_norm_groups())
        else:
            raw = self.inner.scaled_global_norm()
        norm: torch.Tensor = raw.detach().float() * (self._correction / float(self.inner.loss_scale))
        return norm

    def limit_norm(self, max_norm: float) -> None:
        """Make the next step clip gradients to `max_norm`, or to a smaller norm that was requested before."""
        self._limit = min(self._limit or max_norm, max_norm)

    def _finalize_gradients(self) -> None:
        if self._is_final:
            return
        self.engine.set_gradient_accumulation_boundary(True)
        if self.stage == 1:
            self.engine.allreduce_gradients()
        else:
            self.inner.finalize_gradient_accumulation_boundary()
        self._is_final = True

    # ---------------------------------------------------------------- the end of a window

    def step(self, limit: float) -> bool:
        """Update the parameters. Return False if there are no gradients, or if they are not finite.

        Args:
            limit: Gradient norm to clip to if `limit_norm` was not called. 0: no clipping.
        """
        if not self.is_dirty:
            return False
        from deepspeed.runtime.fp16.loss_scaler import LossScaler

        self._finalize_gradients()
        inner, scaler = self.inner, self.inner.loss_scaler
        # DeepSpeed adjusts the scale before dividing by it, which would halve gradients whenever the scale grows. A fixed
        # scale for this step avoids that.
        inner.loss_scaler = LossScaler(scaler.cur_scale / self._correction)
        inner.clip_grad = self._limit or limit
        try:
            self.engine.step()
        finally:
            inner.loss_scaler, inner.clip_grad = scaler, 0.0
        has_overflowed = bool(inner.overflow)
        if getattr(scaler, "dynamic", False):
            scaler.update_scale(has_overflowed)
        self._start_over()
        return not has_overflowed

    def drop_gradients(self) -> None:
        """Discard the gradients of the accumulation window, even in the middle of a backward."""
        if self.is_dirty or self._is_forwarded:
            drop = _drop_3 if self.stage == 3 else _drop_12
            drop(self.inner)
        self._start_over()

    def _start_over(self) -> None:
        if self.stage == 3:
            # Otherwise a parameter unused in the next window's first micro-batch would keep this window's gradient.
            buffer = getattr(self.inner, "grad_partitions_flat_buffer", None)
            if buffer is not None:
                buffer.zero_()
        self.engine.set_gradient_accumulation_boundary(False)
        self.is_dirty = False
        self._is_final = False
        self._is_forwarded = False
        self._is_closed = False
        self._correction = 1.0
        self._limit = 0.0
        self._num_open = 0


def _drop_12(inner: Any) -> None:
    inner.zero_grad(set_to_none=True)
    inner._release_preflattened_grad_buffers()
    for held in (inner.averaged_gradients, inner.all_grad_tensors):
        for key in held:
            held[key] = None
    if inner.cpu_offload:
        inner.reset_cpu_buffers()
        inner._offload_accumulated_param_ids = set()
    for bucket in inner.ipg_buckets.values():
        bucket.clear()
    inner.extra_large_param_to_reduce.clear()
    inner._release_ipg_buffers()
    _clear_reduced_flags(inner.params_already_reduced)
    inner.micro_step_id = -1
    _reset_backward_flags(inner)


def _drop_3(inner: Any) -> None:
    inner.zero_grad(set_to_none=True)
    inner.averaged_gradients = {}
    inner._offload_boundary_param_ids = set()
    if inner.offload_optimizer:
        inner.reset_cpu_buffers()
    for bucket in inner.ipg_buckets.values():
        bucket.clear_params()
        bucket.elements = 0
        bucket.process_group = None
    _clear_reduced_flags(inner.params_already_reduced)
    inner._partition_all_parameters()
    _reset_backward_flags(inner)
    inner.micro_step_id = 0


def _clear_reduced_flags(flags: Any) -> None:
    keys = flags.keys() if isinstance(flags, dict) else range(len(flags))
    for key in keys:
        flags[key] = False


def _reset_backward_flags(inner: Any) -> None:
    """Reset the flags of DeepSpeed's optimizer that remain set when backward raises an error."""
    while inner._backward_active_depth > 0:
        inner.exit_backward()
    inner.clear_backward_seen_flag()
