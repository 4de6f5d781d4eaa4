"""Spike guard: detect, on all ranks, a loss or gradient norm that is far above the recent values.

A spike is detected before the update.

The limit is computed from the values of the last `window` updates. Q1 and Q3 are the quartiles of the logarithms of
these values, or of the values themselves if any is not positive. A value is a spike if it is above the fence

    Q3 + fence * max(Q3 - Q1, 0.1)         with a fence of 5 for losses and of 8 for norms

This is the upper one of Tukey's fences (J. W. Tukey, Exploratory Data Analysis, 1977, 2C), computed over a moving
window. The log scale is used because norms vary by factors, and the 0.1 is a minimum width. Quartiles do not change
while less than a quarter of the values are outliers. Nothing is a spike before there are `warm_up` values. A spike is
not added to the values.

The gradient norm is that of reduced gradients before clipping. Replicas have it without communication. Ranks with
shards add up their squared norms in the collective in which they agree on the update. Losses differ between ranks and
between backward passes. The gradient of a loss above the fence is made NaN, as `finite.py` does for a non-finite
loss. The reduction of gradients spreads the NaN to the other ranks. On an accelerator, losses are compared on the
device, and read together with the norms.

The action "go_back" returns to an earlier state and skips the bad batches. This follows A. Chowdhery et al., PaLM
(2022), section 5.1, who restarted from a checkpoint about 100 updates earlier. Here the state comes from a copy in
memory (`replay/rewind.py`).
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from headway.core.config.guards import NonFinitePolicy, SpikePolicy
from headway.core.runtime.events import RunEvent, notify_listeners, subscribe
from headway.core.training.checks.finite import FiniteGuard, has_scaler
from headway.core.training.checks.window_records import BadLosses, RecordedLoss, WindowRecord
from headway.core.training.run import Run
from headway.core.training.windows import AccumulationWindow
from headway.errors import SpikeError, UnsupportedError
from headway.extras._torch import foreach_norm
from headway.extras.replay.rewind import RewindCopies, StateHolder
from headway.log import get_logger

log = get_logger(__name__)

NOTE = "spikes"
"""Key in the notes of a checkpoint's manifest, under which the spike guard saves recent losses and gradient norms."""
_MIN_WIDTH = 0.1
"""Smallest distance between the quartiles that is used for the fence, on the log scale."""
_MAX_LOG_DISTANCE = 600.0
"""Largest distance between the fence and the third quartile, on the log scale. `exp` of a larger one could overflow."""


class RecentValues:
    """Moving window of the losses or gradient norms of recent updates, with the limit above which a value is a spike.

    Args:
        policy: Policy that sets the length of the window and the fence.
        values: Initial values, oldest first. Default: none.
        fence: Multiple of the interquartile range that is added to the third quartile to get the limit. None (the
            default): the policy's `fence`.

    Attributes:
        limit: Largest value that is not a spike. Infinite until there are enough values.
    """

    def __init__(self, policy: SpikePolicy, values: Sequence[float] = (), fence: float | None = None) -> None:
        self._policy, self._fence = policy, policy.fence if fence is None else fence
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self.limit = math.inf
        for value in values:
            self._insert_value(value)
        self._compute_limit()

    @property
    def values(self) -> list[float]:
        """Recorded values of recent updates, oldest first."""
        return list(self._values)

    @property
    def median(self) -> float:
        """Median of the values; NaN if there are none."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else math.nan

    def add(self, value: float) -> None:
        """Add the value of an update to the window, and recompute the limit. Non-finite values are ignored."""
        if math.isfinite(value):
            self._insert_value(value)
            self._compute_limit()

    def _insert_value(self, value: float) -> None:
        """Add a value to the window of recent values, and remove the oldest one from a full window."""
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._sorted) > self._policy.window:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    def _compute_limit(self) -> None:
        """Set the limit to the upper fence: the third quartile plus a multiple of the interquartile range."""
        ordered, count = self._sorted, len(self._sorted)
        if count < self._policy.warm_up:
            self.limit = math.inf
            return
        first_quartile, third_quartile = ordered[count // 4], ordered[3 * count // 4]
        if ordered[0] > 0:  # all values are positive: use their logarithms
            width = max(math.log(third_quartile / first_quartile), _MIN_WIDTH)
            self.limit = third_quartile * math.exp(min(self._fence * width, _MAX_LOG_DISTANCE))
        else:
            width = max(third_quartile - first_quartile, _MIN_WIDTH * abs(third_quartile))
            self.limit = third_quartile + self._fence * width


class RegisteredState(Protocol):
    """Interface of the run's additional checkpoint state.

    Attributes:
        notes: Additional values to store in checkpoint manifests, by key.
    """

    notes: dict[str, Any]

    @property
    def custom(self) -> Sequence[StateHolder]:
        """Objects registered for checkpoints."""


class SpikeGuard(FiniteGuard):
    """Guard that skips updates whose loss or gradient norm is far above the recent values.

    Non-finite values are spikes, too, unless `on_non_finite` is set.

    Args:
        on_spike: Policy for spikes, or only its action.
        on_non_finite: Policy for `FiniteGuard`. None: a non-finite value is a spike.
        run: Run of the Accelerator.
        get_state: Function that returns the run's registered state, called only when it is needed.

    Attributes:
        spike_policy: Policy for spikes.
        has_own_policy: Whether `on_non_finite` was given, so that a non-finite value is no spike.
        num_spikes: Number of updates that were refused as spikes.

    Raises:
        ConfigError: If the action is unknown.
        UnsupportedError: If gradients are scaled, or the strategy cannot restore an earlier state of the run.
    """

    def __init__(
        self,
        on_spike: str | SpikePolicy,
        on_non_finite: str | NonFinitePolicy | None,
        run: Run,
        get_state: Callable[[], RegisteredState],
    ) -> None:
        policy = on_spike if isinstance(on_spike, SpikePolicy) else SpikePolicy(on_spike)
        if has_scaler(run):
            raise UnsupportedError(
                "on_spike reads gradients before the update, where they still have fp16's loss scale and may overflow; use "
                "mixed_precision='bf16', or leave on_spike out"
            )
        super().__init__(on_non_finite or "skip", run)
        self.spike_policy = policy
        self.has_own_policy = on_non_finite is not None
        self.spike_guard = self
        self.non_finite_guard = self if self.has_own_policy else None
        self.num_spikes = 0
        self._get_state = get_state
        self._norms = RecentValues(policy, fence=policy.norm_fence)
        self._losses = RecentValues(policy)
        self._added_window = -1  # number of the last window whose values were added
        self._num_spikes_in_row = 0
        self._num_updates_since_spike = 0
        self._rewind = self._make_rewind() if policy.action == "go_back" else None
        subscribe(self._restore_on_resume)

    def _make_rewind(self) -> RewindCopies:
        """Create the `RewindCopies` that undoes updates of the run. It also restores this guard's recent losses and norms."""
        run, strategy = self._run, self._strategy
        strategy.capabilities.require("rollback", strategy.name, "use on_spike='skip'")
        rewind = RewindCopies(self.spike_policy.updates, run, (strategy, self), lambda: self._get_state().custom)
        run.events.before_fetch_hooks.append(rewind.before_fetch)
        run.hooks.before_learning.append(rewind.before_learning)
        return rewind

    def reset_state(self) -> None:
        """Reset the guard's state because the run continues from another point, such as a loaded checkpoint.

        Recent losses and norms are kept until the values of a checkpoint replace them.
        """
        super().reset_state()
        self._added_window = -1
        self._num_spikes_in_row = self._num_updates_since_spike = 0
        if self._rewind is not None:
            self._rewind.drop_copies()

    def _restore_on_resume(self, event: RunEvent) -> None:
        """Restore the saved losses and norms of recent updates when a run is resumed.

        Every rank gets the losses of rank 0, because only these are in the checkpoint.
        """
        if event.name == "resumed" and event.source is self._clock:
            self.restore((event.details.get("notes") or {}).get(NOTE, {}))

    # ---------------------------------------------------------------- during the window

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """Check a loss, and return it. If the loss is above the limit, the result's backward produces NaN gradients."""
        if self._search is not None and self._search.is_repeating:  # the batch is only run again to find a NaN
            return super().watch(loss)
        detached, limit = loss.detach(), self._losses.limit
        watched = super().watch(loss)
        if detached.device.type != "cpu":
            # Compare on the device, so that the host does not wait. `_read_norm` reads the loss later.
            return watched if limit == math.inf else watched * torch.where(detached <= limit, 1.0, math.nan)
        window = self._windows.current
        record, value = self._get_record(window), detached.item()
        if value <= limit or not math.isfinite(value):
            record.new_losses.append(value)
            return watched
        record.losses.append(RecordedLoss(window.num_done, detached))
        return loss * math.nan

    def _is_good_loss(self, loss: float) -> bool:
        """Whether a loss is finite and not a spike."""
        return math.isfinite(loss) and loss <= self._losses.limit

    def before_clip(
        self, window: AccumulationWindow, parameters: Sequence[torch.Tensor], norm_type: float
    ) -> torch.Tensor | None:
        """Record the norm of gradients before they are clipped, and return it as a tensor, or None if unknown.

        If gradients are sharded, also record this rank's squared norm.

        Args:
            window: Accumulation window of the gradients.
            parameters: Parameters whose gradients are clipped.
            norm_type: Order of the norm, such as 2.
        """
        norm = super().before_clip(window, parameters, norm_type)
        if not self._has_full_gradients:
            self._get_record(window).shards.squares.append(self._compute_own_square(parameters))
        return norm

    # ---------------------------------------------------------------- the decision

    def _are_gradients_good(self, record: WindowRecord, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients of all ranks are finite, and their norm is not a spike. Every rank must call it."""
        return super()._are_gradients_good(record, parameters) and not record.grad_norm > self._norms.limit

    def _read_norm(self, record: WindowRecord, totals: dict[torch.device, list[torch.Tensor]]) -> float:
        """Record and return the norm of all gradients.

        Losses that are still on a device are transferred to the host together with the norms, and recorded too.

        Args:
            record: Record of the accumulation window.
            totals: Gradient norms on each device.
        """
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for _, loss in record.losses:
            if not loss.is_cpu:
                by_device.setdefault(loss.device, []).append(loss)
        squared_norm = 0.0
        for device in totals | by_device:
            norms, losses = totals.get(device, []), by_device.get(device, [])
            tensors = [*norms, *losses]
            if len(tensors) > 1:
                values = torch.stack([each.double() for each in tensors]).tolist()  # one transfer for all
            else:
                values = [tensors[0].item()]
            squared_norm += sum(norm * norm for norm in values[: len(norms)])
            record.new_losses += values[len(norms) :]
        record.grad_norm = math.sqrt(squared_norm)
        return record.grad_norm

    def _compute_own_square(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the squared L2 norm of this rank's shards of the parameters' gradients, as a float64 scalar tensor.

        The norm of each gradient is computed in its own dtype, and the sum in float64. It is 0 without gradients.
        """
        grads = [grad.detach() for grad in self._strategy.get_local_gradients(parameters) if grad.numel()]
        norms = foreach_norm(grads, 2.0) if grads else (torch.zeros(()),)
        return torch.stack([norm.double() for norm in norms]).square().sum()

    def _agree_on_gradients(self, is_finite: bool, record: WindowRecord, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the gradient shards of all ranks are finite. This is a collective, which also finds the gradient norm.

        The collective sums the squared gradient norms of all ranks. A gradient that several ranks have is counted once
        per rank.

        Args:
            is_finite: Whether this rank's shards are finite.
            record: Record of the accumulation window, which gets the norm and the losses that are still on a device.
            parameters: Parameters whose gradients are checked.
        """
        # Squares that `before_clip` recorded are outdated if another backward has run since then.
        is_recorded = record.shards.squares and record.has_valid_norms
        own_squares = record.shards.squares if is_recorded else [self._compute_own_square(parameters)]
        record.new_losses += [float(loss) for _, loss in record.losses if not loss.is_cpu]
        num_bad, squared_norm = self._group.reduce_numbers([float(not is_finite), float(sum(own_squares))])
        record.grad_norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan  # NaN is not >= 0
        return num_bad == 0

    def after_step(self, window: AccumulationWindow, did_step: bool) -> None:
        """Add the losses and the gradient norm of an update to the values from which the limits are computed.

        Values are added once per accumulation window. This also ends a row of spikes. With the action "go_back", it does
        so only after `updates` further updates.

        Args:
            window: Accumulation window of the update.
            did_step: Whether the update was made. If not, nothing is added.
        """
        super().after_step(window, did_step)
        if did_step and self._added_window != window.number:
            self._added_window = window.number
            record = self._get_record(window)
            self._norms.add(record.grad_norm)
            for loss in record.new_losses:
                self._losses.add(loss)
            record.new_losses.clear()
            self._num_updates_since_spike += 1
            if self._rewind is None or self._num_updates_since_spike >= self.spike_policy.updates:
                self._num_spikes_in_row = 0
            self._get_state().notes[NOTE] = self.snapshot()

    def snapshot(self) -> dict[str, list[float]]:
        """Return the recent losses and gradient norms, to be stored in a checkpoint or passed to `restore`."""
        return {"norms": self._norms.values, "losses": self._losses.values}

    def restore(self, snapshot: Mapping[str, Sequence[float]]) -> None:
        """Restore the recent losses and norms from a snapshot. A snapshot can be restored more than once."""
        policy = self.spike_policy
        self._norms = RecentValues(policy, snapshot.get("norms", ())[-policy.window :], policy.norm_fence)
        self._losses = RecentValues(policy, snapshot.get("losses", ())[-policy.window :])
        self._get_state().notes[NOTE] = self.snapshot()

    # ---------------------------------------------------------------- after a refusal

    def _refuse_update(
        self,
        window: AccumulationWindow,
        record: WindowRecord,
        bad_losses: dict[int, BadLosses],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Count and report a spike, and skip the update or go back to an earlier state. All ranks do the same.

        Args:
            window: Accumulation window of the refused update.
            record: Record of the window.
            bad_losses: Losses above the limit, by rank. Empty: the gradient norm was too large.
            parameters: Parameters of the update.

        Raises:
            SpikeError: If more than `max_in_row` updates in a row had spikes.
        """
        record.new_losses.clear()
        if bad_losses:
            is_finite = all(math.isfinite(bad.loss) for bad in bad_losses.values())
        else:
            is_finite = math.isfinite(record.grad_norm)
        if self.has_own_policy and not is_finite:
            super()._refuse_update(window, record, bad_losses, parameters)
            return
        if not record.is_counted:  # several optimizers can ask about one window
            record.is_counted = True
            self.num_skipped += 1
            self.num_spikes += 1
            self._num_spikes_in_row += 1
            self._num_updates_since_spike = 0
        update = self._clock.num_updates + 1
        max_in_row = self.spike_policy.max_in_row
        everywhere = " on all ranks" if self._group.world_size > 1 else ""
        # Describe it before an earlier state replaces the recent values.
        reason = self._describe_spike(bad_losses, record.grad_norm)
        restored_updates: int | None = None
        if self._num_spikes_in_row > max_in_row:
            action = "raise"
            consequence = (
                f"{self._num_spikes_in_row} spikes in a row are more than max_in_row={max_in_row}, and not just bad batches: "
                "lower the learning rate, or resume from an earlier checkpoint"
            )
        else:
            restored_updates = None if self._rewind is None else self._rewind.undo_updates()
            if restored_updates is None:
                action = "skip"
                consequence = f"the update is skipped{everywhere}"
            else:
                action = "go_back"
                consequence = f"back to the state after {restored_updates} updates{everywhere}; the batches since then are left out"
        self.report = f"update {update}: {reason}: {consequence} ({self.num_spikes} in all)"
        notify_listeners(
            "spike",
            source=self._clock,
            update=update,
            action=action,
            losses={str(rank): f"{bad.loss} in micro-batch {bad.micro_batch}" for rank, bad in bad_losses.items()},
            norm=None if bad_losses else f"{record.grad_norm:.4g}",
            num_updates=restored_updates,
        )
        if action == "raise":
            raise SpikeError(self.report)
        log.warning("%s", self.report)

    def _describe_spike(self, bad_losses: dict[int, BadLosses], grad_norm: float) -> str:
        """Return the bad losses, or else the gradient norm, together with the limit that they exceed."""
        if bad_losses:
            losses = [
                f"the loss of micro-batch {bad.micro_batch} was {bad.loss:.4g} on rank {rank}"
                for rank, bad in bad_losses.items()
            ]
            description, recent = "; ".join(losses), self._losses
        else:
            description, recent = f"the gradient norm was {grad_norm:.4g}", self._norms
        return (
            f"{description} (the median of the last {len(recent.values)} is {recent.median:.4g}, "
            f"the fence is at {recent.limit:.4g})"
        )
