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

_NEEDED_MEMBERS = ("finalize_gradient_accumulation_boundary", "clear_backward_seen_flag", "loss_scaler")
"""Members of DeepSpeed's ZeRO optimizer that `ZeroEngine` uses. A version without one of them raises an error."""


class ZeroEngine:
    """Wrapper of DeepSpeed's engine for one model and its optimizer.

    Args:
        engine: DeepSpeed's own engine.
        stage: ZeRO stage, 1, 2 or 3.

    Attributes:
        engine: DeepSpeed's own engine.
        zero_optimizer: DeepSpeed's ZeRO optimizer, which wraps the optimizer that updates the parameters.
        stage: ZeRO stage, 1, 2 or 3.
        has_gradients: Whether gradients were computed since the last step.

    Raises:
        UnsupportedError: If this version of DeepSpeed, or the optimizer that it created, lacks a needed member.
    """

    def __init__(self, engine: Any, stage: int) -> None:
        self.engine = engine
        self.zero_optimizer = engine.optimizer
        self.stage = stage
        missing = [name for name in _NEEDED_MEMBERS if not hasattr(self.zero_optimizer, name)]
        if missing:
            import deepspeed

            raise UnsupportedError(
                f"DeepSpeed {deepspeed.__version__} created a {type(self.zero_optimizer).__name__} without {', '.join(missing)}; "
                "Headway is tested with DeepSpeed 0.19.8: pip install 'deepspeed>=0.19.8'"
            )
        # State of the current accumulation window; `_reset_window` has the same initial values
        self.has_gradients = False
        self._has_final_gradients = False  # whether they are reduced over the ranks and partitioned
        self._is_window_closed = False  # whether the last backward of the window has run, so that gradients can be read
        self._has_run_forward = False  # whether a forward has run since the last backward
        self._num_pending_backwards = 0  # forwards whose backward has not run
        self._correction = 1.0  # factor of the window's gradients
        self._max_norm = 0.0  # 0: `limit_norm` was not called in this window
        self.engine.set_gradient_accumulation_boundary(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward through DeepSpeed's engine, and return its output."""
        self._has_run_forward = True
        self._num_pending_backwards += 1
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
        if self._has_final_gradients:
            raise StateError(
                "backward was called after the gradients of the window were clipped or read, which makes them final with "
                "DeepSpeed. Call backward for all losses before clip_grad_norm_, and call step() or zero_grad() before the next "
                "window"
            )
        unsupported = sorted(key for key, value in kwargs.items() if key != "retain_graph" and value)
        if unsupported:
            raise UnsupportedError(
                f"backward({', '.join(unsupported)}=...) is not supported with DeepSpeed; leave it out"
            )
        if self._num_pending_backwards < 1 and self.stage == 3:
            raise UnsupportedError(
                "backward was called twice through one forward; ZeRO stage 3 frees the parameters after the first. Add the "
                "losses and call backward once, or use stage 2"
            )
        self._num_pending_backwards -= 1
        if not self._has_run_forward:
            # This is a second backward through one forward. DeepSpeed separates gradients by forward: clear its flag.
            self.zero_optimizer.clear_backward_seen_flag()
        self._has_run_forward = False
        self._is_window_closed = False
        self.has_gradients = True
        # The step multiplies all gradients of the window by the correction, which must not change those of this loss.
        scaled_loss = loss * (factor / self._correction)
        self.engine.backward(scaled_loss, retain_graph=bool(kwargs.get("retain_graph")), scale_wrt_gas=False)

    # ---------------------------------------------------------------- final gradients

    def close_window(self) -> None:
        """Mark the accumulation window as complete, so that its gradients can be read.

        A later backward marks it as incomplete again. This happens if a micro-batch has several losses.
        """
        self._is_window_closed = True

    def get_local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's shards of the gradients in DeepSpeed's buffers, multiplied by the loss scale.

        The list is empty while the accumulation window is open, or if no gradients were computed since the last step.
        Reading the gradients makes them final: a later backward in this window raises `StateError`.
        """
        if not self.has_gradients or not self._is_window_closed:
            return []
        self._finalize_gradients()
        shards = [self._get_gradient_shard(parameter) for parameter in parameters]
        return [shard for shard in shards if shard is not None]

    def _get_gradient_shard(self, parameter: Any) -> torch.Tensor | None:
        """Return this rank's shard of a parameter's gradient, or None if the rank has none or it is not trained."""
        shard: torch.Tensor | None = None
        if self.stage == 3:
            optimizer = self.zero_optimizer
            is_partitioned = hasattr(parameter, "ds_id")  # DeepSpeed's mark for parameters that stage 3 has partitioned
            if is_partitioned and optimizer.get_param_id(parameter) in optimizer.grad_position:
                shard = optimizer._get_fp32_grad_state_partition(parameter, True)[0]
        else:
            # DeepSpeed's attribute: where this rank's range is in the flat low-precision (lp) and float32 (hp) tensors
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                shard = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        return shard

    def correct_gradients(self, factor: float) -> None:
        """Multiply the accumulation window's gradients by a factor. The multiplication happens in `step`.

        Gradients of later backward passes in this window are not multiplied.
        """
        self._correction *= factor

    def compute_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients over all ranks, before clipping. All ranks must call this method.

        The norm is infinite if a gradient is not finite, and NaN while the accumulation window is open. It is 0 if
        no gradients were computed since the last step.
        """
        if not self.has_gradients:
            return torch.zeros(())
        if not self._is_window_closed:  # gradients are still spread over buffers
            return torch.full((), math.nan)
        from deepspeed.runtime.utils import combine_grad_norm_groups

        self._finalize_gradients()
        if self.stage == 3:
            scaled_norm = combine_grad_norm_groups(self.zero_optimizer._get_norm_groups())
        else:
            scaled_norm = self.zero_optimizer.scaled_global_norm()
        unscale = self._correction / float(self.zero_optimizer.loss_scale)
        norm: torch.Tensor = scaled_norm.detach().float() * unscale
        return norm

    def limit_norm(self, max_norm: float) -> None:
        """Make the next step clip gradients to `max_norm`, or to a smaller norm that was requested before."""
        self._max_norm = min(self._max_norm or max_norm, max_norm)

    def _finalize_gradients(self) -> None:
        """Make DeepSpeed finish the reduction of the window's gradients, unless they are final already."""
        if self._has_final_gradients:
            return
        self.engine.set_gradient_accumulation_boundary(True)
        if self.stage == 1:
            self.engine.allreduce_gradients()
        else:
            self.zero_optimizer.finalize_gradient_accumulation_boundary()
        self._has_final_gradients = True

    # ---------------------------------------------------------------- the end of a window

    def step(self, default_max_norm: float) -> bool:
        """Update the parameters, discard the gradients, and adjust a dynamic loss scale.

        Args:
            default_max_norm: Gradient norm to clip to if `limit_norm` was not called. 0: no clipping.

        Returns:
            Whether the parameters were updated. False: there are no gradients, or they are not finite.
        """
        if not self.has_gradients:
            return False
        from deepspeed.runtime.fp16.loss_scaler import LossScaler

        self._finalize_gradients()
        zero_optimizer, scaler = self.zero_optimizer, self.zero_optimizer.loss_scaler
        # DeepSpeed adjusts the scale before dividing by it, which would halve gradients whenever the scale grows. A fixed
        # scale for this step avoids that. Dividing by it also multiplies the gradients by the correction.
        zero_optimizer.loss_scaler = LossScaler(scaler.cur_scale / self._correction)
        zero_optimizer.clip_grad = self._max_norm or default_max_norm
        try:
            self.engine.step()
        finally:
            zero_optimizer.loss_scaler, zero_optimizer.clip_grad = scaler, 0.0
        has_overflowed = bool(zero_optimizer.overflow)
        if getattr(scaler, "dynamic", False):
            scaler.update_scale(has_overflowed)
        self._reset_window()
        return not has_overflowed

    def drop_gradients(self) -> None:
        """Discard the gradients of the accumulation window, even in the middle of a backward."""
        if self.has_gradients or self._has_run_forward:
            if self.stage == 3:
                _clear_stage_3_gradients(self.zero_optimizer)
            else:
                _clear_lower_stage_gradients(self.zero_optimizer)
        self._reset_window()

    def _reset_window(self) -> None:
        """Prepare for the next accumulation window."""
        if self.stage == 3:
            # Otherwise a parameter unused in the next window's first micro-batch would keep this window's gradient.
            buffer = getattr(self.zero_optimizer, "grad_partitions_flat_buffer", None)
            if buffer is not None:
                buffer.zero_()
        self.engine.set_gradient_accumulation_boundary(False)
        self.has_gradients = False
        self._has_final_gradients = False
        self._is_window_closed = False
        self._has_run_forward = False
        self._num_pending_backwards = 0
        self._correction = 1.0
        self._max_norm = 0.0


def _clear_lower_stage_gradients(optimizer: Any) -> None:
    """Discard all gradients in the buffers of DeepSpeed's optimizer for ZeRO stages 1 and 2."""
    optimizer.zero_grad(set_to_none=True)
    optimizer._release_preflattened_grad_buffers()
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for key in gradients:
            gradients[key] = None
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
        optimizer._offload_accumulated_param_ids = set()
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer.extra_large_param_to_reduce.clear()
    optimizer._release_ipg_buffers()
    _clear_reduced_flags(optimizer.params_already_reduced)
    optimizer.micro_step_id = -1
    _reset_backward_flags(optimizer)


def _clear_stage_3_gradients(optimizer: Any) -> None:
    """Discard all gradients in the buffers of DeepSpeed's optimizer for ZeRO stage 3."""
    optimizer.zero_grad(set_to_none=True)
    optimizer.averaged_gradients = {}
    optimizer._offload_boundary_param_ids = set()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear_params()
        bucket.elements = 0
        bucket.process_group = None
    _clear_reduced_flags(optimizer.params_already_reduced)
    optimizer._partition_all_parameters()
    _reset_backward_flags(optimizer)
    optimizer.micro_step_id = 0


def _clear_reduced_flags(flags: Any) -> None:
    """Set all flags of a list or a dict to False."""
    keys = flags.keys() if isinstance(flags, dict) else range(len(flags))
    for key in keys:
        flags[key] = False


def _reset_backward_flags(optimizer: Any) -> None:
    """Reset the flags of DeepSpeed's optimizer that remain set when backward raises an error."""
    while optimizer._backward_active_depth > 0:
        optimizer.exit_backward()
    optimizer.clear_backward_seen_flag()
