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


@dataclass
class WindowRecord:
    """Losses and gradient norms that the guard has recorded for one set of models since it last judged an update.

    Attributes:
        window: Number of the latest accumulation window of these models.
        is_judged: Whether an update was judged. The losses of the next accumulation window then begin a new record.
        verdict: Latest verdict: the window's number, `num_backwards` at that time, and whether the update may be made.
        is_counted: Whether the refused update was counted.
        losses: Pairs of (micro-batch, loss), without autograd graphs. On an accelerator these are all losses, on a CPU
            only those that are not finite.
        num_backwards: Number of backwards so far. Each of them changes gradients.
        norms: Pairs of (parameters, their gradient norms). Norms are taken before clipping, because clipping spreads a
            NaN to all gradients.
        clipped: For each parameter that was clipped, by ID: a weak reference to its gradient, and the gradient's
            version counter after clipping.
        totals: Gradient norms over all ranks before clipping, recorded if gradients are sharded.
        squares: Squared norms of this rank's shards before clipping, recorded by the spike guard.
        covered: IDs of the parameters included in `totals`.
        stamps: Pairs of (parameters, addresses and versions of their gradients after clipping).
        noted_at: Value of `num_backwards` when the values below `num_backwards` were recorded.
    """

    window: int = -1
    is_judged: bool = False
    verdict: tuple[int, int, bool] | None = None
    is_counted: bool = False
    losses: deque[tuple[int, torch.Tensor]] = field(default_factory=lambda: deque(maxlen=4096))
    num_backwards: int = 0
    norms: list[tuple[list[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    clipped: dict[int, tuple[TensorWeakRef, int]] = field(default_factory=dict)
    totals: list[torch.Tensor] = field(default_factory=list)
    squares: list[torch.Tensor] = field(default_factory=list)
    covered: set[int] = field(default_factory=set)
    stamps: list[tuple[list[torch.Tensor], list[tuple[int, int]]]] = field(default_factory=list)
    noted_at: int = -1

    def begin_notes(self) -> None:
        """Prepare to record the gradient norms of the next clipping call.

        Earlier norms are dropped if a backward has changed the gradients since.
        """
        if self.noted_at != self.num_backwards:
            self.norms, self.clipped, self.noted_at = [], {}, self.num_backwards
            self.totals, self.squares, self.covered, self.stamps = [], [], set(), []

    def is_known(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient is unchanged since it was clipped, so that its recorded norm is valid."""
        noted, grad = self.clipped.get(id(parameter)), parameter.grad
        if self.noted_at != self.num_backwards:
            return False
        return noted is not None and grad is not None and noted[0]() is grad and grad._version == noted[1]


class FiniteGuard(StepGuard):
    """`StepGuard` that refuses updates whose loss or gradients are NaN or infinite, as `on_non_finite` requests.

    If an fp16 gradient scaler (torch's or DeepSpeed's) checks gradients itself, this guard only finds out whether a
    loss caused the overflow.

    `SpikeGuard` is a subclass that also refuses finite values. It overrides `_is_good_loss`, `_is_good`, `_read_norm`,
    `_agree_on_update` and `_refuse_update`.

    Args:
        chosen: `NonFinitePolicy`, or only its action, such as "skip".
        run: Run of the Accelerator. The action "stop" ends the iteration over its training loaders.

    Attributes:
        num_skipped: Number of skipped updates.
        num_in_row: Number of skipped updates since the last update that was made.
        has_stopped: Whether the action "stop" was taken.
        report: Latest message, or an empty string if there was none.
        origin: Origin of the non-finite value, on the rank where it occurred first. None if it is unknown.

    Raises:
        ConfigError: If the action is unknown.
    """

    can_refuse_updates = True

    def __init__(self, chosen: str | NonFinitePolicy, run: Run) -> None:
        super().__init__(run)
        self.policy = policy = chosen if isinstance(chosen, NonFinitePolicy) else NonFinitePolicy(chosen)
        self.non_finite_guard = self
        self.origin: NanOrigin | None = None
        # Runs a bad window again; None if no explanation is requested.
        self._search: OriginSearch | None = None
        if policy.explains or policy.action == "explain":
            self._search = extensions.load("feature", "explain")(run)
        self._owes_error = False
        self.num_skipped = self.num_in_row = 0
        self.has_stopped = False
        self.report = ""
        self._windows, self._prepared, self._clock = run.windows, run.prepared, run.clock
        self._strategy = run.strategy
        self._group: Collectives = run.strategy.everyone
        self._is_whole = run.strategy.capabilities.whole_gradients
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
        window, plain = self._windows.current, loss.detach()
        record = self._open_record(window)
        record.num_backwards += 1
        if plain.device.type == "cpu":
            if math.isfinite(plain.item()):
                return loss
            record.losses.append((window.num_done, plain))
            return loss * math.nan
        record.losses.append((window.num_done, plain))
        return loss * (plain - plain + 1)  # inf - inf and nan - nan are nan, all else 0: no value is read here

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
        record.begin_notes()
        if not self._is_whole:
            total = self._strategy.compute_total_norm(parameters, norm_type)
            record.totals.append(total)
            return total
        found = _compute_norms(parameters)
        record.norms += found
        is_sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)
        return None if norm_type != 2 or is_sparse or not found else _compute_total(found)

    def after_clip(self, window: AccumulationWindow, parameters: Sequence[torch.Tensor]) -> None:
        """Record the versions of the clipped gradients. Gradients that stay unchanged are not checked a second time.

        Args:
            window: Accumulation window that trains the parameters.
            parameters: Parameters whose gradients were clipped.
        """
        if self._has_scaler:
            return
        record = self._open_record(window)
        if not self._is_whole:
            record.covered.update(map(id, parameters))
            record.stamps.append((list(parameters), self._get_stamps(parameters)))
        else:
            found = [(id(parameter), parameter.grad) for parameter in parameters if parameter.grad is not None]
            record.clipped.update((key, (TensorWeakRef(grad), grad._version)) for key, grad in found)

    # ---------------------------------------------------------------- the decision

    def can_update(self, window: AccumulationWindow) -> bool:
        """Whether an update may be made on the gradients of `window`. This is called before each optimizer's step.

        The result is equal on all ranks. It is always True if a gradient scaler checks gradients itself.

        Args:
            window: Accumulation window in which the optimizer's models trained last.

        Raises:
            NonFiniteError: If the update may not be made, and the policy demands an error.
        """
        if self._search is not None and self._search.is_repeating:
            if self._search.is_of(window):  # other models make no update on the repeated batch, either
                self._report_origin(window)
            return False
        if self._owes_error and not (self._search is not None and self._search.is_armed):
            self._report_origin(window)
            return False
        if self._has_scaler:
            return True
        record = self._open_record(window)
        key = (window.number, record.num_backwards)
        if record.verdict is None or record.verdict[:2] != key:
            chosen = list(self._prepared.list_parameters_of(window))
            is_good = self._is_good(chosen)
            record.verdict = *key, is_good
            if not is_good:
                self._refuse_update(window, self._gather_bad_losses(), chosen)
            record.is_judged = True
        return record.verdict[2]

    def _is_good(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients of the accumulation window are finite on all ranks."""
        return self._are_finite(parameters) if self._is_whole else self._are_parts_finite(parameters)

    def _are_finite(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all gradients are finite. One value is read from each device."""
        record = self._record
        found = _compute_norms(parameter for parameter in parameters if not record.is_known(parameter))
        found += record.norms if record.noted_at == record.num_backwards else []
        # If the norm of the norms is finite, so are all norms. Computing it is one operation instead of four.
        totals: dict[torch.device, list[torch.Tensor]] = {}
        for _, norms in found:
            totals.setdefault(norms.device, []).append(torch.linalg.vector_norm(norms))
        if math.isfinite(self._read_norm(totals)):
            return True
        return all(_is_finite(parameter.grad) for parameter in parameters if parameter.grad is not None)

    def _read_norm(self, totals: dict[torch.device, list[torch.Tensor]]) -> float:
        """Return the 2-norm of all gradients as a number. One value is read from each device.

        Args:
            totals: Norms of gradients by device.
        """
        read = (one[0] if len(one) == 1 else torch.linalg.vector_norm(torch.stack(one)) for one in totals.values())
        return math.hypot(*(one.item() for one in read))

    def _are_parts_finite(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all sharded gradients are finite on all ranks.

        If this rank's gradients are unchanged since they were clipped, the total norm before clipping decides, and the
        gradients are not read again. Ranks need not agree on this: each one checks only its own shards, and a
        collective combines the results.
        """
        record = self._record
        is_known = (
            record.noted_at == record.num_backwards
            and record.covered.issuperset(map(id, parameters))
            and all(self._get_stamps(chosen) == before for chosen, before in record.stamps)
            and all(math.isfinite(total.item()) for total in record.totals)
        )
        # A non-finite norm may only have overflowed, so the shards are checked then. A vote of 0 means "finite". A rank
        # that only replays its window votes 0, too.
        return self._agree_on_update(not (is_known or self._are_finite_here(parameters)), parameters)

    def _agree_on_update(self, is_bad: bool, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all ranks report finite gradients. This is a collective.

        Args:
            is_bad: Whether this rank's gradients are not finite.
            parameters: Parameters whose gradients were checked.
        """
        return self._group.reduce_numbers([float(is_bad)], "max")[0] == 0

    def _are_finite_here(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether this rank's shards of the gradients are finite. One value is read from each device."""
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for grad in self._strategy.get_local_gradients(parameters):
            if grad.numel():
                kinds.setdefault((grad.device, grad.dtype), []).append(grad.detach())
        sums = [torch.stack(foreach_norm(grads, 1.0)).sum() for grads in kinds.values()]
        if all(math.isfinite(float(one)) for one in sums):
            return True
        return all(_is_finite(grad) for grads in kinds.values() for grad in grads)

    def _get_stamps(self, parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Return the pair (address, version counter) of each gradient. A change of either one shows a new gradient."""
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
            ranks = self._gather_bad_losses()
            if ranks:
                self._refuse_update(window, ranks, [])
        record.is_judged = True

    def _gather_bad_losses(self) -> dict[int, list[float]]:
        """Exchange the non-finite losses of all ranks.

        Returns:
            Dict from each rank that has such losses to a list of three numbers: the number of these losses, the
                micro-batch of the first one, and the value of the first one.
        """
        read = [(micro, float(loss)) for micro, loss in self._record.losses]
        bad = [(micro, loss) for micro, loss in read if not self._is_good_loss(loss)]
        rows = self._group.gather_numbers([float(len(bad)), *(bad[0] if bad else (0.0, 0.0))])
        return {rank: row for rank, row in enumerate(rows) if row[0]}

    def _is_good_loss(self, loss: float) -> bool:
        return math.isfinite(loss)

    def _refuse_update(
        self, window: AccumulationWindow, ranks: dict[int, list[float]], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Count and report a refused update, and apply the policy's action to it.

        Args:
            window: Accumulation window of the update.
            ranks: Non-finite losses by rank, as `_gather_bad_losses` returns them.
            parameters: Parameters of the window, whose gradients are searched if no loss was the cause.

        Raises:
            NonFiniteError: If the policy demands an error, and the window is not run again first.
        """
        update = self._clock.num_updates + 1
        # A bad loss makes all gradients NaN, so their names carry no information then.
        culprits = [] if ranks else self._find_culprits(parameters)
        if not self._record.is_counted:
            self._record.is_counted = True
            self.num_skipped += 1
            self.num_in_row += 1
        action = "raise" if self.num_in_row > self.policy.max_in_row else self.policy.action
        runs_again = self._search is not None and self._search.arm_replay(window)
        if action == "explain":
            action = "explain" if runs_again else "raise"
        self.report = self._describe_refusal(update, ranks, culprits, len(parameters), action)
        notify_listeners(
            "non_finite",
            source=self._clock,
            update=update,
            action=action,
            parameters=culprits[:_NUM_NAMES],
            losses={str(rank): f"{row[2]} in micro-batch {row[1]:.0f}" for rank, row in ranks.items()},
        )
        self._owes_error = action in ("raise", "explain") and runs_again
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
        found = None if self._search is None else self._search.end_replay()
        every = [each for each in self._group.gather_objects(found) if each is not None]
        # The reduction of gradients spreads a non-finite value from one rank to all others, where its origin is
        # "elsewhere".
        every = [each for each in every if each.phase != "elsewhere"] or every[:1]
        every.sort(key=lambda each: (each.phase == "backward", each.rank))
        self.origin = every[0] if every else None
        told = "; ".join(map(str, every))
        told = (
            told
            or "its losses and gradients were finite: its inputs have changed, or its results depend on more than the batch"
        )
        self.report = f"{self.report}. Run again with checks, {told}"
        notify_listeners("non_finite_origin", source=self._clock, origins=[asdict(each) for each in every])
        self._records[window.models] = WindowRecord(window.number, is_judged=True, is_counted=True)
        if self._owes_error:
            self._owes_error = False
            raise NonFiniteError(self.report)
        log.warning("%s", self.report)

    def _find_culprits(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of parameters whose gradients are not finite, in the models' order."""
        names = {id(tensor): name for name, tensor in self._prepared.iterate_named("named_parameters")}
        if not self._is_whole:
            grads = {id(p): self._strategy.get_local_gradients([p]) for p in parameters}
            own = [names[key] for key in names if any(not _is_finite(grad) for grad in grads.get(key, ()))]
            every = self._group.gather_objects(own[: 4 * _NUM_NAMES])
            return list(dict.fromkeys(name for each in every for name in each))
        first: dict[int, bool] = {}  # if gradients are clipped twice, use the norms from before the first clipping
        noted = self._record.norms if self._record.noted_at == self._record.num_backwards else []
        for chosen, norms in noted:
            for parameter, is_finite in zip(chosen, norms.isfinite().tolist()):
                first.setdefault(id(parameter), is_finite)
        bad = {key for key, is_finite in first.items() if not is_finite}
        if not bad:
            bad = {id(p) for p in parameters if p.grad is not None and not _is_finite(p.grad)}
        return [names[key] for key in names if key in bad]

    def _describe_refusal(
        self, update: int, ranks: dict[int, list[float]], culprits: list[str], total: int, action: str
    ) -> str:
        told = [
            f"the loss of micro-batch {row[1]:.0f} was {row[2]} on rank {rank}"
            + (f" (and {row[0] - 1:.0f} more there)" if row[0] > 1 else "")
            for rank, row in ranks.items()
        ]
        if culprits:
            more = ", ..." if len(culprits) > _NUM_NAMES else ""
            told.append(
                f"the losses were finite, but gradients of {len(culprits)} of {total} parameters are not "
                f"({', '.join(culprits[:_NUM_NAMES])}{more})"
            )
        everywhere = " on all ranks" if self._group.world_size > 1 else ""
        done = {
            "skip": f"the update is skipped{everywhere} ({self.num_in_row} in a row, {self.num_skipped} in all)",
            "stop": f"the update is skipped, and training stops{everywhere}",
            "explain": "no update was made",
            "raise": "no update was made"
            if self.policy.action in ("raise", "explain")
            else f"{self.num_in_row} in a row are more than max_in_row={self.policy.max_in_row}",
        }[action]
        spoilt = [name for name, buffer in self._prepared.iterate_named("named_buffers") if not _is_finite(buffer)]
        after = (
            f". Buffers are not finite either ({', '.join(spoilt[:_NUM_NAMES])}), which skipping does not repair: load a checkpoint"
            if spoilt
            else ""
        )
        return f"update {update}: {'; '.join(told)}: {done}{after}"


def has_scaler(run: Run) -> bool:
    """Whether losses are scaled, by torch's GradScaler or by an engine such as DeepSpeed."""
    scaler = run.precision.scaler
    return scaler is not None and (scaler.is_enabled() or run.strategy.capabilities.scales_losses)


# ---------------------------------------------------------------- finiteness


def _get_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _compute_norms(parameters: Iterable[torch.Tensor]) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Return the 2-norms of the parameters' gradients, as one pair of (parameters, norms) per device and dtype.

    Norms of half-precision gradients are computed in float32.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.numel():
            kinds.setdefault((parameter.grad.device, parameter.grad.dtype), []).append(parameter)
    found = []
    for (_, dtype), chosen in kinds.items():
        working = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        grads = [_get_values(parameter.grad.detach()) for parameter in chosen]  # type: ignore[union-attr]
        found.append((chosen, torch.stack(foreach_norm(grads, 2.0, dtype=working))))
    return found


def _compute_total(found: list[tuple[list[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    """Return the 2-norm of all gradients, rounded as in torch's `clip_grad_norm_`.

    Args:
        found: Groups of parameters with their norms, as `_compute_norms` returns them.
    """
    device = found[0][1].device
    norms = [norms.to(chosen[0].grad.dtype).to(device) for chosen, norms in found if chosen[0].grad is not None]
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms), 2.0)
    return total


def _is_finite(tensor: torch.Tensor) -> bool:
    values = _get_values(tensor.detach())
    return not (values.is_floating_point() or values.is_complex()) or bool(torch.isfinite(values).all())
