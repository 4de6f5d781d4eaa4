"""DeepSpeed's engine with Headway's windows: gradients are accumulated until they are needed, and one correction makes them exact.

DeepSpeed keeps gradients in buffers of its own, divides what it has by its loss scale at the step, and clips there. So
the window's correction is a loss scale for that one step, and clipping a limit for it; norms are asked for beforehand::

    backward ... backward -> final (reduced, in partitions) -> norm, limit, correction -> step, or dropped
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from headway.errors import StateError, UnsupportedError

_NEEDED = ("finalize_gradient_accumulation_boundary", "clear_backward_seen_flag", "loss_scaler")


class ZeroEngine:
    """One model and its optimizer in DeepSpeed's hands.

    Args:
        engine: DeepSpeed's.
        stage: 1, 2 or 3.

    Attributes:
        inner: DeepSpeed's optimizer, around the one it steps.
        is_dirty: gradients have been made since the last step.

    Raises:
        UnsupportedError: a version of DeepSpeed without what is needed, or an optimizer of its that is not served.
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
        self.is_dirty = self._is_final = self._is_forwarded = self._is_closed = False
        self._num_open = 0
        self._correction = 1.0
        self._limit = 0.0
        self.engine.set_gradient_accumulation_boundary(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, through the engine."""
        self._is_forwarded = True
        self._num_open += 1
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, factor: float, **kwargs: Any) -> None:
        """Add the gradient of `loss * factor`, averaged over ranks.

        Raises:
            StateError: the window's gradients have been read already.
            UnsupportedError: options that DeepSpeed does not take.
        """
        if self._is_final:
            raise StateError(
                "backward was called after the window's gradients were clipped or read; with DeepSpeed they are final then. Run all "
                "backwards before clip_grad_norm_, and step() or zero_grad() before the next"
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
            # Another loss over the same forward: DeepSpeed tells one gradient from the next by its forwards.
            self.inner.clear_backward_seen_flag()
        self._is_forwarded, self._is_closed, self.is_dirty = False, False, True
        scaled = loss * (factor / self._correction)
        self.engine.backward(scaled, retain_graph=bool(kwargs.get("retain_graph")), scale_wrt_gas=False)

    # ---------------------------------------------------------------- final gradients

    def close(self) -> None:
        """The window's last backward has returned, unless its micro-batch has another loss."""
        self._is_closed = True

    def local(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's parts of gradients, as DeepSpeed keeps them; none while a window is open."""
        if not self.is_dirty or not self._is_closed:
            return []
        self._finalise()
        parts = [self._part(parameter) for parameter in parameters]
        return [part for part in parts if part is not None]

    def _part(self, parameter: Any) -> torch.Tensor | None:
        inner = self.inner
        if self.stage == 3:
            is_known = hasattr(parameter, "ds_id") and inner.get_param_id(parameter) in inner.grad_position
            return inner._get_fp32_grad_state_partition(parameter, True)[0] if is_known else None
        mapping = getattr(parameter, "_hp_mapping", None)
        part: torch.Tensor | None
        part = None if mapping is None else mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        return part

    def correct(self, factor: float) -> None:
        """Gradients count `factor` times."""
        self._correction *= factor

    def norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, before any limit; infinite where one of them is not finite. All ranks call it.

        While a window is open it is not known: nan.
        """
        if not self.is_dirty:
            return torch.zeros(())
        if not self._is_closed:  # a part of a window's gradient is spread over buffers, and not asked for
            return torch.full((), math.nan)
        from deepspeed.runtime.utils import combine_grad_norm_groups

        self._finalise()
        if self.stage == 3:
            raw = combine_grad_norm_groups(self.inner._get_norm_groups())
        else:
            raw = self.inner.scaled_global_norm()
        norm: torch.Tensor = raw.detach().float() * (self._correction / float(self.inner.loss_scale))
        return norm

    def limit(self, max_norm: float) -> None:
        """The step clips to this norm, and to any smaller one asked for before."""
        self._limit = min(self._limit or max_norm, max_norm)

    def _finalise(self) -> None:
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
        """Make the update; False where there is nothing to learn from, or gradients are not finite.

        Args:
            limit: a norm to clip to where none was asked for; 0: none.
        """
        if not self.is_dirty:
            return False
        from deepspeed.runtime.fp16.loss_scaler import LossScaler

        self._finalise()
        inner, scaler = self.inner, self.inner.loss_scaler
        # DeepSpeed adjusts the scale before it divides by it, so gradients would be halved whenever the scale grows: the step
        # sees a fixed one.
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

    def drop(self) -> None:
        """Forget the window's gradients, wherever its backward has come to."""
        if self.is_dirty or self._is_forwarded:
            drop = _drop_3 if self.stage == 3 else _drop_12
            drop(self.inner)
        self._start_over()

    def _start_over(self) -> None:
        if self.stage == 3:
            # A parameter that the next window's first micro-batch leaves out would keep this one's gradient.
            buffer = getattr(self.inner, "grad_partitions_flat_buffer", None)
            if buffer is not None:
                buffer.zero_()
        self.engine.set_gradient_accumulation_boundary(False)
        self.is_dirty = self._is_final = self._is_forwarded = self._is_closed = False
        self._correction, self._limit, self._num_open = 1.0, 0.0, 0


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
    _reduce_anew(inner.params_already_reduced)
    inner.micro_step_id = -1
    _leave_backward(inner)


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
    _reduce_anew(inner.params_already_reduced)
    inner._partition_all_parameters()
    _leave_backward(inner)
    inner.micro_step_id = 0


def _reduce_anew(flags: Any) -> None:
    keys = flags.keys() if isinstance(flags, dict) else range(len(flags))
    for key in keys:
        flags[key] = False


def _leave_backward(inner: Any) -> None:
    """A backward that failed never left it."""
    while inner._backward_active_depth > 0:
        inner.exit_backward()
    inner.clear_backward_seen_flag()
