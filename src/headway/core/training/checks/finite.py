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
from headway.errors import NonFiniteError
from headway.log import get_logger

log = get_logger(__name__)

_NUM_NAMES = 5


@dataclass
class _Seen:
    """Losses and gradient norms that the guard has recorded since its last check for non-finite values.

    Attributes:
        is_judged: Whether the check was made. The losses of the next accumulation window then begin a new record.
        losses: Pairs of (micro-batch, loss), without autograd graphs. On an accelerator these are all losses, on a CPU
            only those that are not finite.
        num_backwards: Number of backwards so far. Each of them changes gradients.
        norms: Pairs of (parameters, their gradient norms). Norms are taken before clipping, because clipping spreads a
            NaN to all gradients.
        clipped: For each parameter that was clipped, by ID: a weak reference to its gradient, and the gradient's
            version counter after clipping.
        totals: Gradient norms over all ranks before clipping, recorded if gradients are sharded.
        covered: IDs of the parameters included in `totals`.
        stamps: Pairs of (parameters, addresses and versions of their gradients after clipping).
        noted_at: Value of `num_backwards` when `norms`, `clipped`, `totals`, `covered` and `stamps` were recorded.
    """

    is_judged: bool = False
    losses: deque[tuple[int, torch.Tensor]] = field(default_factory=lambda: deque(maxlen=4096))
    num_backwards: int = 0
    norms: list[tuple[list[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    clipped: dict[int, tuple[TensorWeakRef, int]] = field(default_factory=dict)
    totals: list[torch.Tensor] = field(default_factory=list)
    covered: set[int] = field(default_factory=set)
    stamps: list[tuple[list[torch.Tensor], list[tuple[int, int]]]] = field(default_factory=list)
    noted_at: int = -1

    def begin_notes(self) -> None:
        """Prepare to record the gradient norms of the next clipping call.

        Earlier norms are dropped if a backward has changed the gradients since.
        """
        if self.noted_at != self.num_backwards:
            self.norms, self.clipped, self.noted_at = [], {}, self.num_backwards
            self.totals, self.covered, self.stamps = [], set(), []

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

    is_judge = True

    def __init__(self, chosen: str | NonFinitePolicy, run: Run) -> None:
        super().__init__(run)
        self.policy = policy = chosen if isinstance(chosen, NonFinitePolicy) else NonFinitePolicy(chosen)
        self.of_non_finite = self
        self.origin: NanOrigin | None = None
        # Runs a bad window again; None if no explanation is requested.
        self._replay: OriginSearch | None = None
        if policy.explains or policy.action == "explain":
            self._replay = extensions.load("feature", "explain")(run)
        self._owes_error = False
        self.num_skipped = self.num_in_row = 0
        self.has_stopped = False
        self.report = ""
        self._windows, self._prepared, self._clock = run.windows, run.prepared, run.clock
        self._strategy = run.strategy
        self._group: Collectives = run.strategy.everyone
        self._is_whole = run.strategy.capabilities.whole_gradients
        self._has_scaler = has_scaler(run)
        self._seen = _Seen()
        self._window = -1
        self._verdict: tuple[tuple[int, int], bool] | None = None
        self._counted = -1
        run.windows.restarted.append(self.reset_state)

    def reset_state(self) -> None:
        """Reset the state of the current accumulation window, because the run continues from a loaded state.

        Accumulation windows are numbered anew then. The total number of skipped updates is kept.
        """
        self._seen, self._window, self._verdict, self._counted = _Seen(), -1, None, -1
        self.num_in_row, self.has_stopped = 0, False

    # ---------------------------------------------------------------- during the window

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, changed so that its gradients are NaN if it is not finite.

        A CPU loss is recorded only if it is not finite. A loss on an accelerator is always recorded, because checking
        it now would wait for the device. While a window is replayed to find the origin of a non-finite value, the
        replay's tracer checks the loss instead, and the loss is returned unchanged.
        """
        if self._replay is not None and self._replay.tracer is not None:
            self._replay.tracer.check_loss(loss)
            return loss
        window, micro_batch = self._windows.current.number, self._windows.current.num_done
        if self._window != window and self._seen.is_judged:
            self._seen = _Seen()
        self._window = window
        seen, plain = self._seen, loss.detach()
        seen.num_backwards += 1
        if plain.device.type == "cpu":
            if math.isfinite(plain.item()):
                return loss
            seen.losses.append((micro_batch, plain))
            return loss * math.nan
        seen.losses.append((micro_batch, plain))
        return loss * (plain - plain + 1)  # inf - inf and nan - nan are nan, all else 0: no value is read here

    def after_backward(self, loss: torch.Tensor) -> None:
        """Do nothing, because the loss was checked before its backward."""

    def before_clip(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        """Record the norms of gradients about to be clipped, without reading from the device.

        Args:
            parameters: Parameters whose gradients are about to be clipped.
            norm_type: Order of the norm by which they are clipped.

        Returns:
            Total norm of the gradients as a tensor, or None if a gradient scaler checks the gradients itself. For
                gradients that are not sharded, also None if `norm_type` is not 2, a gradient is sparse, or no parameter
                has a gradient.
        """
        seen = self._seen
        if self._has_scaler:
            return None
        seen.begin_notes()
        if not self._is_whole:
            total = self._strategy.compute_total_norm(parameters, norm_type)
            seen.totals.append(total)
            return total
        found = _compute_norms(parameters)
        seen.norms += found
        is_sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)
        return None if norm_type != 2 or is_sparse or not found else _compute_total(found)

    def after_clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record the versions of the clipped gradients. Gradients that stay unchanged are not checked a second time."""
        if self._has_scaler:
            return
        if not self._is_whole:
            self._seen.covered.update(map(id, parameters))
            self._seen.stamps.append((list(parameters), self._get_stamps(parameters)))
        else:
            found = [(id(parameter), parameter.grad) for parameter in parameters if parameter.grad is not None]
            self._seen.clipped.update((key, (TensorWeakRef(grad), grad._version)) for key, grad in found)

    # ---------------------------------------------------------------- the decision

    def can_update(self) -> bool:
        """Whether the update may be made. This is called before each optimizer's step.

        The result is equal on all ranks. It is always True if a gradient scaler checks gradients itself.

        Raises:
            NonFiniteError: If the update may not be made, and the policy demands an error.
        """
        if self._owes_error or (self._replay is not None and self._replay.tracer is not None):
            return self._explain_origin()
        if self._has_scaler:
            return True
        window = self._windows.current
        key = (window.number, self._seen.num_backwards)
        if self._verdict is None or self._verdict[0] != key:
            chosen = list(self._prepared.list_parameters_of(window))
            self._verdict = key, self._is_good(chosen)
            if not self._verdict[1]:
                self._refuse_update(self._gather_bad_losses(), chosen)
            elif self._replay is not None:
                self._replay.forget_window()
            self._seen.is_judged = True
        return self._verdict[1]

    def _is_good(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients of the accumulation window are finite on all ranks."""
        return self._are_finite(parameters) if self._is_whole else self._are_parts_finite(parameters)

    def _are_finite(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all gradients are finite. One value is read from each device."""
        seen = self._seen
        found = _compute_norms(parameter for parameter in parameters if not seen.is_known(parameter))
        found += seen.norms if seen.noted_at == seen.num_backwards else []
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
        seen = self._seen
        is_known = (
            seen.noted_at == seen.num_backwards
            and seen.covered.issuperset(map(id, parameters))
            and all(self._get_stamps(chosen) == before for chosen, before in seen.stamps)
            and all(math.isfinite(total.item()) for total in seen.totals)
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

    def after_step(self, did_step: bool) -> None:
        """Record whether an optimizer has made its step.

        If a gradient scaler skipped it, find out in a collective whether a non-finite loss was the cause.

        Raises:
            NonFiniteError: If a loss was the cause, and the policy demands an error.
        """
        if did_step:
            self.num_in_row = 0
        elif self._has_scaler and self._counted != self._windows.current.number:
            self._skips.record_skip()
            ranks = self._gather_bad_losses()
            if ranks:
                self._refuse_update(ranks, [])
        self._seen.is_judged = True

    def _gather_bad_losses(self) -> dict[int, list[float]]:
        """Exchange the non-finite losses of all ranks.

        Returns:
            Dict from each rank that has such losses to a list of three numbers: the number of these losses, the
                micro-batch of the first one, and the value of the first one.
        """
        read = [(micro, float(loss)) for micro, loss in self._seen.losses]
        bad = [(micro, loss) for micro, loss in read if not self._is_good_loss(loss)]
        rows = self._group.gather_numbers([float(len(bad)), *(bad[0] if bad else (0.0, 0.0))])
        return {rank: row for rank, row in enumerate(rows) if row[0]}

    def _is_good_loss(self, loss: float) -> bool:
        return math.isfinite(loss)

    def _refuse_update(self, ranks: dict[int, list[float]], parameters: Sequence[torch.Tensor]) -> None:
        """Count and report a refused update, and apply the policy's action to it.

        Args:
            ranks: Non-finite losses by rank, as `_gather_bad_losses` returns them.
            parameters: Parameters of the window, whose gradients are searched if no loss was the cause.

        Raises:
            NonFiniteError: If the policy demands an error, and the window is not run again first.
        """
        window, update = self._windows.current.number, self._clock.num_updates + 1
        # A bad loss makes all gradients NaN, so their names carry no information then.
        culprits = [] if ranks else self._find_culprits(parameters)
        if self._counted != window:
            self._counted = window
            self.num_skipped += 1
            self.num_in_row += 1
        action = "raise" if self.num_in_row > self.policy.max_in_row else self.policy.action
        runs_again = self._replay is not None and self._replay.arm_replay()
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

    def _explain_origin(self) -> bool:
        """Report the origin of the non-finite value, after the accumulation window was run a second time to trace it.

        Return False, because the window makes no update.

        Raises:
            NonFiniteError: If the policy demands an error.
        """
        found = None if self._replay is None else self._replay.end_replay()
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
        self._seen = _Seen(is_judged=True)
        self._counted = self._windows.current.number
        if self._owes_error:
            self._owes_error = False
            raise NonFiniteError(self.report)
        log.warning("%s", self.report)
        return False

    def _find_culprits(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of parameters whose gradients are not finite, in the models' order."""
        names = {id(tensor): name for name, tensor in self._prepared.iterate_named("named_parameters")}
        if not self._is_whole:
            grads = {id(p): self._strategy.get_local_gradients([p]) for p in parameters}
            own = [names[key] for key in names if any(not _is_finite(grad) for grad in grads.get(key, ()))]
            every = self._group.gather_objects(own[: 4 * _NUM_NAMES])
            return list(dict.fromkeys(name for each in every for name in each))
        first: dict[int, bool] = {}  # if gradients are clipped twice, use the norms from before the first clipping
        noted = self._seen.norms if self._seen.noted_at == self._seen.num_backwards else []
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
