"""The spike guard: all ranks notice, before the update, a loss or gradient norm far above those of recent updates.

The band is one-sided. Of the values of the last `window` updates that were made, take the quartiles Q1 and Q3 of the logarithms (of
the values themselves where any is not positive); a value is a spike above the fence

    Q3 + fence * max(Q3 - Q1, 0.1)         with a fence of 5 for losses and of 8 for norms

which is Tukey's fence (J. W. Tukey, Exploratory Data Analysis, 1977, 2C), on a log scale since norms vary by factors, moving with
the run, and with a least width. Quartiles stay where they are while less than a quarter of the values are outliers. Nothing is a
spike before `warm_up` values are there. A spike is no part of the band.

The gradient norm is that of final gradients before clipping, which all ranks know alike: it costs no exchange. Losses are each
rank's own, one for each backward; one above the fence makes its gradient nan, as `finite.py` does with one that is not finite, and
reaches the other ranks with the reduction. On an accelerator losses are compared there, and read with the norms.

Leaving a bad batch out after going back is the remedy of A. Chowdhery et al., PaLM (2022), 5.1, who went back to a checkpoint of
about 100 updates before; here the state comes from a copy in memory (`replay/snapshot.py`).
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headway.errors import ConfigError, SpikeError, UnsupportedError
from headway.log import get_logger
from headway.runtime.events import RunEvent, notify, subscribe
from headway.training.checks.finite import FiniteGuard, NonFinitePolicy, has_scaler
from headway.training.hooks import RunParts
from headway.training.replay.snapshot import Rewind, StateHolder

log = get_logger(__name__)

ACTIONS = ("skip", "go_back")
NOTE = "spikes"
"""The name of the band among a checkpoint's notes."""
_LEAST_WIDTH = 0.1


@dataclass(frozen=True)
class SpikePolicy:
    """What happens to an update whose loss or gradient norm is far above those before it.

    Attributes:
        action: "skip": the update is skipped on all ranks, and training continues. "go_back": `updates` or more updates before it
            (fewer than twice as many) are undone, too, but not beyond the start of this pass over the data; their batches are left
            out.
        fence: a loss is a spike if it is more than this many interquartile ranges above the upper quartile.
        norm_fence: the same for a gradient norm, which has a longer tail.
        window: the number of values that the quartiles are of, 32 or more.
        warm_up: nothing is a spike before there are this many values.
        updates: how far to go back; the state is copied to host memory every `updates` updates, and two copies are kept.
        max_in_row: this many spikes in a row are skipped, or gone back from, with fewer than `updates` updates between them; one more
            raises SpikeError.
    """

    action: str = "skip"
    fence: float = 5.0
    window: int = 128
    warm_up: int = 32
    updates: int = 20
    max_in_row: int = 10
    norm_fence: float = 8.0

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"on_spike={self.action!r} is unknown; allowed: 'skip', 'go_back', a SpikePolicy or None")
        for name, least in (("window", 32), ("warm_up", 8), ("updates", 1), ("max_in_row", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number, {least} or more")
        if self.warm_up > self.window:
            raise ConfigError(f"warm_up={self.warm_up} must not be more than window={self.window}")
        if not (self.fence > 0 and self.norm_fence > 0):
            raise ConfigError(f"fence={self.fence!r} and norm_fence={self.norm_fence!r} must be more than 0")


class Band:
    """The values of the last updates, and how far above them one may lie.

    Args:
        policy: how many values, and the fence.
        values: to begin with, oldest first.
        fence: in place of the policy's.

    Attributes:
        limit: the largest value that is no spike.
    """

    def __init__(self, policy: SpikePolicy, values: Sequence[float] = (), fence: float | None = None) -> None:
        self._policy, self._fence = policy, policy.fence if fence is None else fence
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self.limit = math.inf
        for value in values:
            self._insert(value)
        self._draw()

    @property
    def values(self) -> list[float]:
        """Oldest first."""
        return list(self._values)

    @property
    def median(self) -> float:
        """Of the values; nan where there are none."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else math.nan

    def add(self, value: float) -> None:
        """An update was made from it."""
        if math.isfinite(value):
            self._insert(value)
            self._draw()

    def _insert(self, value: float) -> None:
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._sorted) > self._policy.window:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    def _draw(self) -> None:
        ordered, count = self._sorted, len(self._sorted)
        if count < self._policy.warm_up:
            self.limit = math.inf
            return
        low, high = ordered[count // 4], ordered[3 * count // 4]
        if ordered[0] > 0:
            width = max(math.log(high / low), _LEAST_WIDTH)
            self.limit = high * math.exp(min(self._fence * width, 600.0))
        else:
            self.limit = high + self._fence * max(high - low, _LEAST_WIDTH * abs(high))


class RegisteredState(Protocol):
    """What of a run's state its user or a guard adds: objects registered for checkpoints, and notes for their manifests."""

    notes: dict[str, Any]

    @property
    def custom(self) -> Sequence[StateHolder]:
        """The objects."""


class SpikeGuard(FiniteGuard):
    """Watches losses and gradients, and refuses updates from outliers, non-finite values included unless `on_non_finite` is set.

    Args:
        chosen: what to do, or the action alone.
        on_non_finite: what `FiniteGuard` is given; None: a non-finite value is a spike.
        parts: of the run.
        state: the run's, which is asked late.

    Attributes:
        num_spikes: updates that were refused as spikes.

    Raises:
        ConfigError: an unknown action.
        UnsupportedError: gradients are scaled, or the strategy cannot go back.
    """

    def __init__(
        self,
        chosen: str | SpikePolicy,
        on_non_finite: str | NonFinitePolicy | None,
        parts: RunParts,
        state: Callable[[], RegisteredState],
    ) -> None:
        policy = chosen if isinstance(chosen, SpikePolicy) else SpikePolicy(chosen)
        if has_scaler(parts):
            raise UnsupportedError(
                "on_spike reads gradients before the update, where they still have fp16's loss scale and may overflow; use "
                "mixed_precision='bf16', or leave on_spike out"
            )
        super().__init__(on_non_finite or "skip", parts)
        self.spike_policy, self.has_own_policy = policy, on_non_finite is not None
        self.of_spikes, self.of_non_finite = self, self if self.has_own_policy else None
        self.num_spikes = 0
        self._state = state
        self._norms, self._losses = Band(policy, (), policy.norm_fence), Band(policy)
        self._norm = math.nan
        self._new_losses: list[float] = []
        self._squares: tuple[int, list[torch.Tensor]] = -1, []
        self._spikes_in_row = self._num_since = 0
        self._added = -1
        self._rewind = self._make_rewind() if policy.action == "go_back" else None
        subscribe(self._hear)

    def _make_rewind(self) -> Rewind:
        """What goes back, this guard's band included."""
        parts, strategy = self._parts, self._strategy
        strategy.capabilities.require("rollback", strategy.name, "use on_spike='skip'")
        rewind = Rewind(self.spike_policy.updates, parts, (strategy, self), lambda: self._state().custom)
        parts.events.asked.append(rewind.before_fetch)
        parts.moments.before_learning.append(rewind.before_learning)
        return rewind

    def forget(self) -> None:
        """The run goes on from another place. The band stays: a checkpoint brings its own."""
        super().forget()
        self._new_losses, self._added, self._spikes_in_row, self._num_since = [], -1, 0, 0
        if self._rewind is not None:
            self._rewind.forget()

    def _hear(self, event: RunEvent) -> None:
        """A resumed run goes by the band that was saved; that of losses is rank 0's."""
        if event.name == "resumed" and event.source is self._clock:
            self.restore((event.details.get("notes") or {}).get(NOTE, {}))

    # ---------------------------------------------------------------- during the window

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss; one above the fence comes back so that its gradients are nan."""
        plain, limit = loss.detach(), self._losses.limit
        if self._replay is not None and self._replay.tracer is not None:
            return super().watch(loss)
        if plain.device.type != "cpu":
            watched = super().watch(loss)
            return watched if limit == math.inf else watched * torch.where(plain <= limit, 1.0, math.nan)
        value = plain.item()
        if value <= limit or not math.isfinite(value):
            self._new_losses.append(value)
            return super().watch(loss)
        super().watch(loss)
        self._seen.losses.append((self._windows.current.num_done, plain))
        return loss * math.nan

    def _is_good_loss(self, loss: float) -> bool:
        return math.isfinite(loss) and loss <= self._losses.limit

    def before_clip(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        """Where each rank holds a part of the gradients, note how large this one's are, too."""
        total = super().before_clip(parameters, norm_type)
        if not self._is_whole:
            key, noted = self._seen.num_backwards, self._squares
            self._squares = key, [*(noted[1] if noted[0] == key else []), self._own_square(parameters)]
        return total

    # ---------------------------------------------------------------- the verdict

    def _is_good(self, parameters: Sequence[torch.Tensor]) -> bool:
        return super()._is_good(parameters) and not self._norm > self._norms.limit

    def _read(self, totals: dict[torch.device, list[torch.Tensor]]) -> float:
        """The norm, and with it the losses that lie on the device."""
        there: dict[torch.device, list[torch.Tensor]] = {}
        for _, loss in self._seen.losses:
            if not loss.is_cpu:
                there.setdefault(loss.device, []).append(loss)
        squares = 0.0
        for device in totals | there:
            norms, losses = totals.get(device, []), there.get(device, [])
            every = [*norms, *losses]
            read = torch.stack([each.double() for each in every]).tolist() if len(every) > 1 else [every[0].item()]
            squares += sum(norm * norm for norm in read[: len(norms)])
            self._new_losses += read[len(norms) :]
        self._norm = math.sqrt(squares)
        return self._norm

    def _own_square(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        grads = [grad.detach() for grad in self._strategy.local_gradients(parameters) if grad.numel()]
        norms = torch._foreach_norm(grads, 2.0) if grads else (torch.zeros(()),)
        return torch.stack([norm.double() for norm in norms]).square().sum()

    def _vote(self, is_bad: bool, parameters: Sequence[torch.Tensor]) -> bool:
        """In the same exchange the sum of all ranks' squares: a norm in which what several ranks hold counts several times."""
        key, noted = self._squares
        own = noted if key == self._seen.num_backwards else [self._own_square(parameters)]
        self._new_losses += [float(loss) for _, loss in self._seen.losses if not loss.is_cpu]
        num_bad, square = self._group.reduce_numbers([float(is_bad), float(sum(own))])
        self._norm = math.sqrt(square) if square >= 0 else math.nan
        return num_bad == 0

    def after_step(self, did_step: bool) -> None:
        """An update that was made is part of the band from now on."""
        super().after_step(did_step)
        window = self._windows.current.number
        if did_step and self._added != window:
            self._added = window
            self._norms.add(self._norm)
            for loss in self._new_losses:
                self._losses.add(loss)
            self._new_losses = []
            self._num_since += 1
            if self._rewind is None or self._num_since >= self.spike_policy.updates:
                self._spikes_in_row = 0
            self._state().notes[NOTE] = self.snapshot()

    def snapshot(self) -> dict[str, list[float]]:
        """The band: what `restore` needs, and a checkpoint keeps."""
        return {"norms": self._norms.values, "losses": self._losses.values}

    def restore(self, snapshot: Mapping[str, Sequence[float]]) -> None:
        """Go by that band; the snapshot stays good."""
        policy = self.spike_policy
        self._norms = Band(policy, snapshot.get("norms", ())[-policy.window :], policy.norm_fence)
        self._losses = Band(policy, snapshot.get("losses", ())[-policy.window :])
        self._state().notes[NOTE] = self.snapshot()

    # ---------------------------------------------------------------- what follows

    def _refuse(self, ranks: dict[int, list[float]], parameters: Sequence[torch.Tensor]) -> None:
        self._new_losses = []
        is_finite = all(math.isfinite(row[2]) for row in ranks.values()) if ranks else math.isfinite(self._norm)
        if self.has_own_policy and not is_finite:
            super()._refuse(ranks, parameters)
            return
        update = self._clock.num_updates + 1
        if self._counted != self._windows.current.number:
            self._counted = self._windows.current.number
            self.num_skipped += 1
            self.num_spikes += 1
            self._spikes_in_row, self._num_since = self._spikes_in_row + 1, 0
        is_hopeless = self._spikes_in_row > self.spike_policy.max_in_row
        told = self._what(ranks)
        left = self._rewind.go_back() if self._rewind is not None and not is_hopeless else None
        action = "raise" if is_hopeless else "skip" if left is None else "go_back"
        everywhere = " on all ranks" if self._group.world_size > 1 else ""
        done = {
            "skip": f"the update is skipped{everywhere}",
            "go_back": f"back to the state after {left} updates{everywhere}; the batches since then are left out",
            "raise": f"{self._spikes_in_row} spikes in a row are more than max_in_row={self.spike_policy.max_in_row}, and not just "
            "bad batches: lower the learning rate, or resume from an earlier checkpoint",
        }[action]
        self.report = f"update {update}: {told}: {done} ({self.num_spikes} in all)"
        losses = {str(rank): f"{row[2]} in micro-batch {row[1]:.0f}" for rank, row in ranks.items()}
        norm = None if ranks else f"{self._norm:.4g}"
        notify("spike", source=self._clock, update=update, action=action, losses=losses, norm=norm, num_updates=left)
        if is_hopeless:
            raise SpikeError(self.report)
        log.warning("%s", self.report)

    def _what(self, ranks: dict[int, list[float]]) -> str:
        told = [f"the loss of micro-batch {row[1]:.0f} was {row[2]:.4g} on rank {rank}" for rank, row in ranks.items()]
        band = self._losses if told else self._norms
        seen = f"the median of the last {len(band.values)} is {band.median:.4g}, the fence is at {band.limit:.4g}"
        return f"{'; '.join(told) or f'the gradient norm was {self._norm:.4g}'} ({seen})"
