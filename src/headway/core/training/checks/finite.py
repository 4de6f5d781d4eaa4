"""Non-finite guard: all ranks detect a loss or gradient that is NaN or infinite before the update.

Final gradients are equal on every rank, so all ranks reach the same decision without communication. If gradients are
sharded (`capabilities.whole_gradients` is False), each rank checks its own shards, and one collective combines the
results. A non-finite loss can have finite gradients: the cross entropy of a logit of -inf is inf, but its gradient is
finite. A non-finite loss can also occur on only one rank. The guard therefore makes the gradients of such a loss NaN,
so that the reduction spreads them to all ranks. Only a refused update needs a further collective, for the message.

The guard computes the 2-norms of all gradients in one kernel, and clipping reuses them. If a gradient's norm is finite,
so are all elements of the gradient. If the norm is not finite, its computation might only have overflowed, so the
elements are then checked one by one. On an accelerator, the host waits for the device once per update. Without the
guard it never waits.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from headway.core import extensions
from headway.core.config.guards import NonFinitePolicy
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.events import notify_listeners
from headway.core.training._torch import foreach_norm
from headway.core.training.interfaces import NanOrigin, OriginSearch
from headway.core.training.run import Run
from headway.core.training.step import StepGuard
from headway.core.training.windows import AccumulationWindow
from headway.errors import NonFiniteError
from headway.log import get_logger

log = get_logger(__name__)

_NUM_NAMES = 5
"""Largest number of parameters or buffers that a message names."""


class BadLosses(NamedTuple):
    """Refused losses of one rank in one accumulation window.

    Attributes:
        num_losses: Number of these losses.
        micro_batch: Micro-batch of the first one, from 1.
        loss: Value of the first one.
    """

    num_losses: int
    micro_batch: int
    loss: float


class UpdateVerdict(NamedTuple):
    """Decision on an update. It is valid until the next accumulation window or backward.

    Attributes:
        window: Number of the accumulation window.
        num_backwards: `WindowRecord.num_backwards` at the decision.
        is_permitted: Whether the update may be made.
    """

    window: int
    num_backwards: int
    is_permitted: bool


class NormGroup(NamedTuple):
    """Parameters whose gradients have one device and dtype.

    Attributes:
        parameters: The parameters.
        norms: 2-norm of each parameter's gradient, a tensor of shape [number of parameters] on the gradients' device.
    """

    parameters: list[torch.Tensor]
    norms: torch.Tensor


@dataclass
class ClippedGradients:
    """Norms of gradients that were clipped, if every rank has all gradients.

    Attributes:
        groups: Norms before clipping, because clipping spreads a NaN to all gradients.
        versions: For each clipped parameter, by ID: a weak reference to its gradient, and the gradient's version counter
            after clipping.
    """

    groups: list[NormGroup] = field(default_factory=list)
    versions: dict[int, tuple[TensorWeakRef, int]] = field(default_factory=dict)

    def is_unchanged(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient was clipped and has not changed since, so that its recorded norm is valid."""
        if id(parameter) not in self.versions:
            return False
        reference, version = self.versions[id(parameter)]
        grad = parameter.grad
        return grad is not None and reference() is grad and grad._version == version


@dataclass
class ClippedShards:
    """Norms of gradients that were clipped, if gradients are sharded. There is one entry per clipping call.

    Attributes:
        totals: Norms over all ranks before clipping, as 0-d tensors.
        squares: Squared norms of this rank's shards before clipping, as 0-d tensors. Only the spike guard records them.
        parameter_ids: IDs of the clipped parameters.
        stamps: Pairs of (parameters, addresses and versions of their gradient shards after clipping).
    """

    totals: list[torch.Tensor] = field(default_factory=list)
    squares: list[torch.Tensor] = field(default_factory=list)
    parameter_ids: set[int] = field(default_factory=set)
    stamps: list[tuple[list[torch.Tensor], list[tuple[int, int]]]] = field(default_factory=list)


@dataclass
class WindowRecord:
    """Losses and gradient norms that the guard has recorded for one set of models since it last judged an update.

    Attributes:
        window: Number of the latest accumulation window of these models. -1 before the first one.
        losses: Pairs of (micro-batch, loss), without autograd graphs. On an accelerator these are all losses, on a CPU
            only those that are not finite.
        num_backwards: Number of backwards so far. Each of them changes gradients.
        gradients: Norms recorded by clipping, if every rank has all gradients. Valid only if `has_valid_norms`.
        shards: Norms recorded by clipping, if gradients are sharded. Valid only if `has_valid_norms`.
        clipped_at: Value of `num_backwards` at the last clipping. -1 before the first one.
        verdict: Latest decision, or None.
        is_judged: Whether an update was judged. The losses of the next accumulation window then begin a new record.
        is_counted: Whether the refused update was counted.
    """

    window: int = -1
    losses: deque[tuple[int, torch.Tensor]] = field(default_factory=lambda: deque(maxlen=4096))
    num_backwards: int = 0
    gradients: ClippedGradients = field(default_factory=ClippedGradients)
    shards: ClippedShards = field(default_factory=ClippedShards)
    clipped_at: int = -1
    verdict: UpdateVerdict | None = None
    is_judged: bool = False
    is_counted: bool = False

    @property
    def has_valid_norms(self) -> bool:
        """Whether gradients were clipped, and no backward has changed them since."""
        return self.clipped_at == self.num_backwards

    def begin_clipping(self) -> None:
        """Prepare to record the gradient norms of a clipping call. Drop earlier norms that are no longer valid."""
        if not self.has_valid_norms:
            self.gradients, self.shards = ClippedGradients(), ClippedShards()
            self.clipped_at = self.num_backwards


class FiniteGuard(StepGuard):
    """`StepGuard` that refuses updates whose loss or gradients are NaN or infinite, as `on_non_finite` requests.

    If an fp16 gradient scaler (torch's or DeepSpeed's) checks gradients itself, this guard only finds out whether a
    loss caused the overflow.

    `SpikeGuard` is a subclass that also refuses finite values. It overrides `_is_good_loss`, `_is_good`, `_read_norm`,
    `_agree_on_update` and `_refuse_update`.

    Args:
        policy: `NonFinitePolicy`, or only its action, such as "skip".
        run: Run of the Accelerator. The action "stop" ends the iteration over its training loaders.

    Attributes:
        num_skipped: Number of skipped updates.
        num_in_row: Number of skipped updates since the last update that was made, or since a state was loaded.
        has_stopped: Whether the action "stop" was taken.
        report: Latest message, or an empty string if there was none.
        origin: Origin of the non-finite value, on the rank where it occurred first. None if it is unknown.

    Raises:
        ConfigError: If the action is unknown.
    """

    can_refuse_updates = True

    def __init__(self, policy: str | NonFinitePolicy, run: Run) -> None:
        super().__init__(run)
        self.policy = policy if isinstance(policy, NonFinitePolicy) else NonFinitePolicy(policy)
        self.non_finite_guard = self
        self.origin: NanOrigin | None = None
        # Runs a bad window again; None if no explanation is requested.
        self._search: OriginSearch | None = None
        if self.policy.explains or self.policy.action == "explain":
            self._search = extensions.load("feature", "explain")(run)
        self._raises_after_replay = False  # whether an error is due once a window was run again to explain it
        self.num_skipped = self.num_in_row = 0
        self.has_stopped = False
        self.report = ""
        self._windows, self._prepared, self._clock = run.windows, run.prepared, run.clock
        self._strategy = run.strategy
        self._group: Collectives = run.strategy.everyone
        self._has_full_gradients = run.strategy.capabilities.whole_gradients  # False: gradients are sharded
        self._has_scaler = has_scaler(run)
        self._records: dict[tuple[torch.nn.Module, ...], WindowRecord] = {}
        self._record = WindowRecord()  # of the window that is being examined
        run.windows.restart_listeners.append(self.reset_state)

    def reset_state(self) -> None:
        """Drop the records of all accumulation windows, because the windows themselves were dropped.

        This happens when a state is loaded, for example. The number of skips in a row is reset, and the total number of
        skipped updates is kept.
        """
        self._records, self._record = {}, WindowRecord()
        self.num_in_row, self.has_stopped = 0, False

    def _open_record(self, window: AccumulationWindow) -> WindowRecord:
        """Make `_record` the record of an accumulation window, and return it.

        If an earlier window of its models was judged, the window begins a new record.
        """
        record = self._records.get(window.models)
        if record is None or (record.is_judged and record.window != window.number):
            record = self._records[window.models] = WindowRecord()
        record.window = window.number
        self._record = record
        return record

    # ---------------------------------------------------------------- during the window

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, changed so that its gradients are NaN if it is not finite.

        A CPU loss is recorded only if it is not finite. A loss on an accelerator is always recorded, because checking
        it now would wait for the device. While a window is replayed to find the origin of a non-finite value, the
        replay's tracer checks the loss instead, and the loss is returned unchanged.
        """
        if self._search is not None and self._search.is_repeating:
            if self._search.tracer is not None:
                self._search.tracer.check_loss(loss)
            return loss
        window, detached = self._windows.current, loss.detach()
        record = self._open_record(window)
        record.num_backwards += 1
        if detached.device.type == "cpu":
            if math.isfinite(detached.item()):
                return loss
            record.losses.append((window.num_done, detached))
            return loss * math.nan
        record.losses.append((window.num_done, detached))
        # inf - inf and nan - nan are nan, and x - x is 0 for all finite x. So no value is read from the device here.
        return loss * (detached - detached + 1)

    def after_backward(self, loss: torch.Tensor) -> None:
        """Do nothing, because the loss was checked before its backward."""

    def before_clip(
        self, window: AccumulationWindow, parameters: Sequence[torch.Tensor], norm_type: float
    ) -> torch.Tensor | None:
        """Record the norms of gradients about to be clipped, without reading from the device.

        Args:
            window: Accumulation window that trains the parameters.
            parameters: Parameters whose gradients are about to be clipped.
            norm_type: Order of the norm by which they are clipped.

        Returns:
            Total norm of the gradients as a tensor, or None if a gradient scaler checks the gradients itself. For
                gradients that are not sharded, also None if `norm_type` is not 2, a gradient is sparse, or no parameter
                has a gradient.
        """
        if self._has_scaler:
            return None
        record = self._open_record(window)
        record.begin_clipping()
        if not self._has_full_gradients:
            total = self._strategy.compute_total_norm(parameters, norm_type)
            record.shards.totals.append(total)
            return total
        groups = _compute_norms(parameters)
        record.gradients.groups += groups
        is_sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)
        return None if norm_type != 2 or is_sparse or not groups else _compute_total(groups)

    def after_clip(self, window: AccumulationWindow, parameters: Sequence[torch.Tensor]) -> None:
        """Record the versions of the clipped gradients. Gradients that stay unchanged are not checked a second time.

        Args:
            window: Accumulation window that trains the parameters.
            parameters: Parameters whose gradients were clipped.
        """
        if self._has_scaler:
            return
        record = self._open_record(window)
        if not self._has_full_gradients:
            record.shards.parameter_ids.update(map(id, parameters))
            record.shards.stamps.append((list(parameters), self._get_stamps(parameters)))
            return
        for parameter in parameters:
            if parameter.grad is not None:
                record.gradients.versions[id(parameter)] = TensorWeakRef(parameter.grad), parameter.grad._version

    # ---------------------------------------------------------------- the decision

    def can_update(self, window: AccumulationWindow) -> bool:
        """Whether an update may be made on the gradients of `window`. This is called before each optimizer's step.

        The result is equal on all ranks. It is always True if a gradient scaler checks gradients itself. It is always
        False while a window is run again to find the origin of a non-finite value.

        Args:
            window: Accumulation window in which the optimizer's models trained last.

        Raises:
            NonFiniteError: If the update may not be made, and the policy demands an error.
        """
        if self._search is not None and self._search.is_repeating:
            if self._search.is_tracing(window):  # other models make no update on the repeated batch, either
                self._report_origin(window)
            return False
        if self._raises_after_replay and not (self._search is not None and self._search.is_armed):
            self._report_origin(window)
            return False
        if self._has_scaler:
            return True
        record = self._open_record(window)
        verdict = record.verdict
        if verdict is None or (verdict.window, verdict.num_backwards) != (window.number, record.num_backwards):
            parameters = list(self._prepared.list_parameters_of(window))
            verdict = UpdateVerdict(window.number, record.num_backwards, self._is_good(parameters))
            record.verdict = verdict
            if not verdict.is_permitted:
                self._refuse_update(window, self._gather_bad_losses(), parameters)
            record.is_judged = True
        return verdict.is_permitted

    def _is_good(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients of the accumulation window are finite on all ranks."""
        return self._are_finite(parameters) if self._has_full_gradients else self._are_shards_finite(parameters)

    def _are_finite(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all gradients are finite. One value is read from each device."""
        clipped = self._record.gradients
        if self._record.has_valid_norms:
            changed = (parameter for parameter in parameters if not clipped.is_unchanged(parameter))
            groups = [*_compute_norms(changed), *clipped.groups]
        else:
            groups = _compute_norms(parameters)
        # If the norm of the norms is finite, so are all norms. Computing it is one operation instead of four.
        totals: dict[torch.device, list[torch.Tensor]] = {}
        for _, norms in groups:
            totals.setdefault(norms.device, []).append(torch.linalg.vector_norm(norms))
        if math.isfinite(self._read_norm(totals)):
            return True
        return all(_is_finite(parameter.grad) for parameter in parameters if parameter.grad is not None)

    def _read_norm(self, totals: dict[torch.device, list[torch.Tensor]]) -> float:
        """Return the 2-norm of all gradients as a number. One value is read from each device.

        Args:
            totals: By device, the norms of groups of gradients, as 0-d tensors.
        """
        # Queue the computations on all devices before the host waits for the first of them.
        by_device = [
            norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) for norms in totals.values()
        ]
        return math.hypot(*(norm.item() for norm in by_device))

    def _are_shards_finite(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all sharded gradients are finite on all ranks.

        If this rank's gradients are unchanged since they were clipped, the total norm before clipping decides, and the
        gradients are not read again. Ranks need not agree on this: each one checks only its own shards, and a
        collective combines the results.
        """
        clipped = self._record.shards
        is_known_finite = (
            self._record.has_valid_norms
            and clipped.parameter_ids.issuperset(map(id, parameters))
            and all(self._get_stamps(group) == stamps for group, stamps in clipped.stamps)
            and all(math.isfinite(total.item()) for total in clipped.totals)
        )
        # A non-finite norm may only have overflowed, so the shards are checked then.
        return self._agree_on_update(not (is_known_finite or self._are_own_shards_finite(parameters)), parameters)

    def _agree_on_update(self, is_bad: bool, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all ranks report finite gradients. This is a collective.

        Args:
            is_bad: Whether this rank's gradients are not finite.
            parameters: Parameters whose gradients were checked.
        """
        return self._group.reduce_numbers([float(is_bad)], "max")[0] == 0

    def _are_own_shards_finite(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether this rank's shards of the gradients are finite. One value is read per device and dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for grad in self._strategy.get_local_gradients(parameters):
            if grad.numel():
                groups.setdefault((grad.device, grad.dtype), []).append(grad.detach())
        sums = [torch.stack(foreach_norm(grads, 1.0)).sum() for grads in groups.values()]
        if all(math.isfinite(float(group_sum)) for group_sum in sums):
            return True
        return all(_is_finite(grad) for grads in groups.values() for grad in grads)  # a sum may only have overflowed

    def _get_stamps(self, parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Return the pair (address, version counter) of each gradient shard of this rank.

        If neither has changed, the gradient is the one from before. Sharded gradients are compared in this way, because
        their local tensors are new objects at each access.
        """
        return [(grad.data_ptr(), grad._version) for grad in self._strategy.get_local_gradients(parameters)]

    def after_step(self, window: AccumulationWindow, did_step: bool) -> None:
        """Record whether an optimizer has made its step.

        If a gradient scaler skipped it, find out in a collective whether a non-finite loss was the cause.

        Args:
            window: Accumulation window of the update.
            did_step: Whether the optimizer has stepped.

        Raises:
            NonFiniteError: If a loss was the cause, and the policy demands an error.
        """
        if self._search is not None and self._search.is_repeating:
            return
        record = self._open_record(window)
        if did_step:
            self.num_in_row = 0
        elif self._has_scaler and not record.is_counted:
            self._skips.record_skip(window)
            bad_losses = self._gather_bad_losses()
            if bad_losses:
                self._refuse_update(window, bad_losses, [])
        record.is_judged = True

    def _gather_bad_losses(self) -> dict[int, BadLosses]:
        """Exchange the bad losses of all ranks, in a collective. Return them by rank; ranks without any are left out."""
        losses = [(micro_batch, float(loss)) for micro_batch, loss in self._record.losses]
        bad = [(micro_batch, loss) for micro_batch, loss in losses if not self._is_good_loss(loss)]
        rows = self._group.gather_numbers([float(len(bad)), *(bad[0] if bad else (0.0, 0.0))])
        return {
            rank: BadLosses(int(num_losses), int(micro_batch), loss)
            for rank, (num_losses, micro_batch, loss) in enumerate(rows)
            if num_losses
        }

    def _is_good_loss(self, loss: float) -> bool:
        return math.isfinite(loss)

    def _refuse_update(
        self, window: AccumulationWindow, bad_losses: dict[int, BadLosses], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Count and report a refused update, and apply the policy's action to it.

        Args:
            window: Accumulation window of the update.
            bad_losses: Non-finite losses by rank.
            parameters: Parameters of the window, whose gradients are searched if no loss was the cause.

        Raises:
            NonFiniteError: If the policy demands an error, and the window is not run again first. The policy demands it
                with the action "raise", with "explain" if the window cannot be run again, and after more than
                `max_in_row` refused updates in a row.
        """
        update = self._clock.num_updates + 1
        # A bad loss makes all gradients NaN, so their names carry no information then.
        bad_names = [] if bad_losses else self._find_bad_gradients(parameters)
        if not self._record.is_counted:
            self._record.is_counted = True
            self.num_skipped += 1
            self.num_in_row += 1
        action = "raise" if self.num_in_row > self.policy.max_in_row else self.policy.action
        runs_again = self._search is not None and self._search.arm_replay(window)
        if action == "explain" and not runs_again:
            action = "raise"
        self.report = self._describe_refusal(update, bad_losses, bad_names, len(parameters), action)
        notify_listeners(
            "non_finite",
            source=self._clock,
            update=update,
            action=action,
            parameters=bad_names[:_NUM_NAMES],
            losses={str(rank): f"{bad.loss} in micro-batch {bad.micro_batch}" for rank, bad in bad_losses.items()},
        )
        self._raises_after_replay = action in ("raise", "explain") and runs_again
        if action == "raise" and not runs_again:
            raise NonFiniteError(self.report)
        log.warning("%s", self.report)
        if action == "stop" and not self.has_stopped:
            self.has_stopped = True
            for loader in self._windows.trained_on:
                loader.stop()

    def _report_origin(self, window: AccumulationWindow) -> None:
        """Report the origin of the non-finite value, after an accumulation window was run a second time to trace it.

        Raises:
            NonFiniteError: If the policy demands an error.
        """
        own_origin = None if self._search is None else self._search.end_replay()
        origins: list[NanOrigin] = [each for each in self._group.gather_objects(own_origin) if each is not None]
        # The reduction of gradients spreads a non-finite value from one rank to all others, where its origin is
        # "elsewhere".
        origins = [each for each in origins if each.phase != "elsewhere"] or origins[:1]
        # An origin in forward comes before those in backward, because a bad loss also makes gradients non-finite.
        origins.sort(key=lambda each: (each.phase == "backward", each.rank))
        self.origin = origins[0] if origins else None
        text = "; ".join(map(str, origins))
        if not text:
            text = "its losses and gradients were finite: its inputs have changed, or its results depend on more than the batch"
        self.report = f"{self.report}. Run again with checks, {text}"
        notify_listeners("non_finite_origin", source=self._clock, origins=[asdict(each) for each in origins])
        # The refused update was counted before the replay.
        self._records[window.models] = WindowRecord(window.number, is_judged=True, is_counted=True)
        if self._raises_after_replay:
            self._raises_after_replay = False
            raise NonFiniteError(self.report)
        log.warning("%s", self.report)

    def _find_bad_gradients(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of parameters whose gradients are not finite, in the models' order.

        If gradients are sharded, this is a collective, and each rank contributes at most 20 names.

        Args:
            parameters: Parameters of the accumulation window.
        """
        names = {id(tensor): name for name, tensor in self._prepared.iterate_named("named_parameters")}
        if not self._has_full_gradients:
            grads = {id(p): self._strategy.get_local_gradients([p]) for p in parameters}
            own = [names[key] for key in names if any(not _is_finite(grad) for grad in grads.get(key, ()))]
            names_by_rank = self._group.gather_objects(own[: 4 * _NUM_NAMES])
            return list(dict.fromkeys(name for each in names_by_rank for name in each))
        # If gradients were clipped twice, use the norms from before the first clipping, which spreads a NaN.
        was_finite: dict[int, bool] = {}
        for group in self._record.gradients.groups if self._record.has_valid_norms else ():
            for parameter, is_finite in zip(group.parameters, group.norms.isfinite().tolist()):
                was_finite.setdefault(id(parameter), is_finite)
        bad = {key for key, is_finite in was_finite.items() if not is_finite}
        if not bad:
            bad = {id(p) for p in parameters if p.grad is not None and not _is_finite(p.grad)}
        return [names[key] for key in names if key in bad]

    def _describe_refusal(
        self, update: int, bad_losses: dict[int, BadLosses], bad_names: list[str], num_parameters: int, action: str
    ) -> str:
        """Return the message about a refused update.

        Args:
            update: Number of the update, from 1.
            bad_losses: Non-finite losses by rank.
            bad_names: Names of the parameters whose gradients are not finite, if no loss was the cause.
            num_parameters: Number of parameters in the accumulation window.
            action: Action that is taken: "skip", "stop", "explain" or "raise".
        """
        causes = [
            f"the loss of micro-batch {bad.micro_batch} was {bad.loss} on rank {rank}"
            + (f" (and {bad.num_losses - 1} more there)" if bad.num_losses > 1 else "")
            for rank, bad in bad_losses.items()
        ]
        if bad_names:
            more = ", ..." if len(bad_names) > _NUM_NAMES else ""
            causes.append(
                f"the losses were finite, but gradients of {len(bad_names)} of {num_parameters} parameters are not "
                f"({', '.join(bad_names[:_NUM_NAMES])}{more})"
            )
        everywhere = " on all ranks" if self._group.world_size > 1 else ""
        consequence = {
            "skip": f"the update is skipped{everywhere} ({self.num_in_row} in a row, {self.num_skipped} in all)",
            "stop": f"the update is skipped, and training stops{everywhere}",
            "explain": "no update was made",
            "raise": "no update was made"
            if self.policy.action in ("raise", "explain")
            else f"{self.num_in_row} in a row are more than max_in_row={self.policy.max_in_row}",
        }[action]
        buffers = [name for name, buffer in self._prepared.iterate_named("named_buffers") if not _is_finite(buffer)]
        warning = (
            f". Buffers are not finite either ({', '.join(buffers[:_NUM_NAMES])}), which skipping does not repair: load a checkpoint"
            if buffers
            else ""
        )
        return f"update {update}: {'; '.join(causes)}: {consequence}{warning}"


def has_scaler(run: Run) -> bool:
    """Whether losses are scaled, by torch's GradScaler or by an engine such as DeepSpeed."""
    scaler = run.precision.scaler
    return scaler is not None and (scaler.is_enabled() or run.strategy.capabilities.scales_losses)


# ---------------------------------------------------------------- finiteness


def _get_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _compute_norms(parameters: Iterable[torch.Tensor]) -> list[NormGroup]:
    """Return the 2-norms of the parameters' gradients, as one group per device and dtype.

    Parameters without a gradient are left out. Norms of half-precision gradients are computed in float32.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.numel():
            groups.setdefault((parameter.grad.device, parameter.grad.dtype), []).append(parameter)
    result = []
    for (_, dtype), group in groups.items():
        norm_dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        grads = [_get_values(parameter.grad.detach()) for parameter in group]  # type: ignore[union-attr]
        result.append(NormGroup(group, torch.stack(foreach_norm(grads, 2.0, dtype=norm_dtype))))
    return result


def _compute_total(groups: list[NormGroup]) -> torch.Tensor:
    """Return the 2-norm of all gradients as a 0-d tensor, rounded as in torch's `clip_grad_norm_`.

    Args:
        groups: Norms of the gradients, as `_compute_norms` returns them. At least one.
    """
    device = groups[0].norms.device
    all_norms = []
    for parameters, norms in groups:
        if parameters[0].grad is not None:
            all_norms.append(norms.to(parameters[0].grad.dtype).to(device))
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(all_norms), 2.0)
    return total


def _is_finite(tensor: torch.Tensor) -> bool:
    values = _get_values(tensor.detach())
    return not (values.is_floating_point() or values.is_complex()) or bool(torch.isfinite(values).all())
