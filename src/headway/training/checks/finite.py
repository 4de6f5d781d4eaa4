"""The non-finite guard: a loss or gradient that is nan or infinite is noticed before the update, by all ranks alike.

Final gradients are the same on every rank, so each rank comes to the same verdict on its own and nothing is exchanged. Where a
rank holds a part of them (`capabilities.whole_gradients` is False), the strategy's norm of all is one exchange, and the verdict.
A loss need not show in its gradient (the cross entropy of a logit of -inf is inf, its gradient is not), and may be bad on
one rank alone; so the gradient of a bad loss is made nan, and travels with the others. Only a window that is bad costs
an exchange, for the message.

What is read is the 2-norm of every gradient, one pass in one kernel, which clipping then goes by; a finite norm proves finite
entries, and one that is not (it may only have overflowed) is looked into entry by entry. On an accelerator the verdict is one
wait of the host for the device at each update; without the guard there is none.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch.utils.weak import TensorWeakRef

from headway.errors import ConfigError, NonFiniteError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives
from headway.runtime.events import notify
from headway.training.checks.origin import NanOrigin, WindowReplay
from headway.training.hooks import RunParts
from headway.training.step import StepGuard

log = get_logger(__name__)

ACTIONS = ("skip", "stop", "raise", "explain")
_NUM_NAMES = 5


@dataclass(frozen=True)
class NonFinitePolicy:
    """What happens to an update whose loss or gradients are not finite.

    Attributes:
        action: "skip": it is skipped on all ranks, and training continues. "stop": it is skipped, and training loaders end after
            the current batch on all ranks. "raise": NonFiniteError on all ranks, before the update. "explain": the same, after
            running the window again with every operation checked; the error says where it began.
        max_in_row: this many updates in a row may be skipped; one more raises.
        explains: run the first bad window again, whatever the action.
    """

    action: str = "skip"
    max_in_row: int = 10
    explains: bool = False

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(
                f"on_non_finite={self.action!r} is unknown; allowed: 'skip', 'stop', 'raise', 'explain' or None"
            )
        if isinstance(self.max_in_row, bool) or not isinstance(self.max_in_row, int) or self.max_in_row < 1:
            raise ConfigError(f"max_in_row={self.max_in_row!r} must be a whole number, 1 or more")


@dataclass
class _Seen:
    """The losses since the last verdict.

    Attributes:
        is_judged: a verdict was reached; losses of another window start over.
        losses: (micro-batch, loss) without graphs: of all on an accelerator, of the bad ones on a CPU.
        num_backwards: gradients have changed so often.
        norms: (parameters, norms of their gradients) from before a clipping, which spreads a nan to all of them.
        clipped: by id of the parameter, its gradient, which is not kept alive, and the gradient's version after the clipping.
        totals: norms over all ranks from before clippings, where a rank holds a part of the gradients.
        covered: ids of the parameters whose gradients these are of.
        stamps: (parameters, what their gradients looked like after the clipping).
        noted_at: `num_backwards` when these were noted.
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
        """A clipping begins: what was noted of gradients that have changed since is of no use."""
        if self.noted_at != self.num_backwards:
            self.norms, self.clipped, self.noted_at = [], {}, self.num_backwards
            self.totals, self.covered, self.stamps = [], set(), []

    def is_known(self, parameter: torch.Tensor) -> bool:
        """Is its gradient as a clipping has left it, so that the norm from before it says all?"""
        noted, grad = self.clipped.get(id(parameter)), parameter.grad
        if self.noted_at != self.num_backwards:
            return False
        return noted is not None and grad is not None and noted[0]() is grad and grad._version == noted[1]


class FiniteGuard(StepGuard):
    """Watches losses and gradients, and refuses updates.

    Where fp16's scaler (torch's or an engine's) looks at gradients itself, what is left to the guard is whether a loss was the
    reason.

    Args:
        chosen: what to do, or the action alone.
        parts: of the run; loaders that are trained on are ended by the action "stop".

    Attributes:
        num_skipped: updates that were left out.
        num_in_row: of these, since the last update that was made.
        has_stopped: the action "stop" was taken.
        report: the latest message; empty while all is well.
        origin: where the first such value began, on the rank that had it first; None: unknown.

    Raises:
        ConfigError: an unknown action.
    """

    def __init__(self, chosen: str | NonFinitePolicy, parts: RunParts) -> None:
        super().__init__(parts)
        self.policy = policy = chosen if isinstance(chosen, NonFinitePolicy) else NonFinitePolicy(chosen)
        self.of_non_finite = self
        self.origin: NanOrigin | None = None
        # What runs a bad window again; None: nobody wants to know where it began.
        self._replay = WindowReplay(parts) if policy.explains or policy.action == "explain" else None
        self._owes_error = False
        self.num_skipped = self.num_in_row = 0
        self.has_stopped = False
        self.report = ""
        self._windows, self._prepared, self._clock = parts.windows, parts.prepared, parts.clock
        self._strategy = parts.strategy
        self._group: Collectives = parts.strategy.everyone
        self._is_whole = parts.strategy.capabilities.whole_gradients
        self._has_scaler = has_scaler(parts)
        self._seen = _Seen()
        self._window = -1
        self._verdict: tuple[tuple[int, int], bool] | None = None
        self._counted = -1
        parts.windows.restarted.append(self.forget)

    def forget(self) -> None:
        """The run goes on from another place: windows are numbered afresh. What was counted in all stays."""
        self._seen, self._window, self._verdict, self._counted = _Seen(), -1, None, -1
        self.num_in_row, self.has_stopped = 0, False

    # ---------------------------------------------------------------- during the window

    def watch(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss; one that is not finite comes back so that its gradients are nan."""
        if self._replay is not None and self._replay.tracer is not None:
            self._replay.tracer.saw_loss(loss)
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
        """It was looked at before."""

    def before_clip(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
        """Note the norms of gradients that are about to be clipped; nothing is read from the device.

        Returns:
            Their norm over all ranks where each holds a part. Else their 2-norm; None for another norm, and for sparse gradients.
        """
        seen = self._seen
        if self._has_scaler:
            return None
        seen.begin_notes()
        if not self._is_whole:
            total = self._strategy.total_norm(parameters, norm_type)
            seen.totals.append(total)
            return total
        found = _norms(parameters)
        seen.norms += found
        is_sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)
        return None if norm_type != 2 or is_sparse or not found else _total(found)

    def after_clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Gradients that stay as they are now need not be read again."""
        if self._has_scaler:
            return
        if not self._is_whole:
            self._seen.covered.update(map(id, parameters))
            self._seen.stamps.append((list(parameters), self._stamps(parameters)))
        else:
            found = [(id(parameter), parameter.grad) for parameter in parameters if parameter.grad is not None]
            self._seen.clipped.update((key, (TensorWeakRef(grad), grad._version)) for key, grad in found)

    # ---------------------------------------------------------------- the verdict

    def permits(self) -> bool:
        """May the update be made? The same answer on every rank; asked by each optimizer before its step.

        Raises:
            NonFiniteError: it may not, and the policy says so.
        """
        if self._owes_error or (self._replay is not None and self._replay.tracer is not None):
            return self._explain()
        if self._has_scaler:
            return True
        window = self._windows.current
        key = (window.number, self._seen.num_backwards)
        if self._verdict is None or self._verdict[0] != key:
            chosen = list(self._prepared.parameters_of(window))
            self._verdict = key, self._is_good(chosen)
            if not self._verdict[1]:
                self._refuse(self._bad_losses(), chosen)
            elif self._replay is not None:
                self._replay.is_good()
            self._seen.is_judged = True
        return self._verdict[1]

    def _is_good(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Are the window's gradients as they must be?"""
        return self._are_finite(parameters) if self._is_whole else self._are_parts_finite(parameters)

    def _are_finite(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Are all gradients? One value is read from each device."""
        seen = self._seen
        found = _norms(parameter for parameter in parameters if not seen.is_known(parameter))
        found += seen.norms if seen.noted_at == seen.num_backwards else []
        # A norm of norms is finite only where all are (or it overflowed), and is one operation instead of four.
        totals: dict[torch.device, list[torch.Tensor]] = {}
        for _, norms in found:
            totals.setdefault(norms.device, []).append(torch.linalg.vector_norm(norms))
        if math.isfinite(self._read(totals)):
            return True
        return all(_is_finite(parameter.grad) for parameter in parameters if parameter.grad is not None)

    def _read(self, totals: dict[torch.device, list[torch.Tensor]]) -> float:
        """The 2-norm of all gradients; one value is read from each device."""
        read = (one[0] if len(one) == 1 else torch.linalg.vector_norm(torch.stack(one)) for one in totals.values())
        return math.hypot(*(one.item() for one in read))

    def _are_parts_finite(self, parameters: Sequence[torch.Tensor]) -> bool:
        """The same where each rank holds a part. A rank on which nothing has changed since clipping goes by that norm.

        Whether that is so may differ between ranks: each looks by itself, and one exchange makes the verdict.
        """
        seen = self._seen
        is_known = (
            seen.noted_at == seen.num_backwards
            and seen.covered.issuperset(map(id, parameters))
            and all(self._stamps(chosen) == before for chosen, before in seen.stamps)
            and all(math.isfinite(total.item()) for total in seen.totals)
        )
        # A norm that is not finite may only have overflowed. All is well is 0: what a rank says that stands in without results.
        return self._vote(not (is_known or self._are_finite_here(parameters)), parameters)

    def _vote(self, is_bad: bool, parameters: Sequence[torch.Tensor]) -> bool:
        """Is all well on every rank?"""
        return self._group.reduce_numbers([float(is_bad)], "max")[0] == 0

    def _are_finite_here(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Are this rank's parts? One value is read from each device."""
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for grad in self._strategy.local_gradients(parameters):
            if grad.numel():
                kinds.setdefault((grad.device, grad.dtype), []).append(grad.detach())
        sums = [torch.stack(torch._foreach_norm(grads, 1.0)).sum() for grads in kinds.values()]
        if all(math.isfinite(float(one)) for one in sums):
            return True
        return all(_is_finite(grad) for grads in kinds.values() for grad in grads)

    def _stamps(self, parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Where the gradients lie, and how often they were changed."""
        return [(grad.data_ptr(), grad._version) for grad in self._strategy.local_gradients(parameters)]

    def after_step(self, did_step: bool) -> None:
        """An optimizer has made its step, or not: because of the scaler's scale, or was it a loss that is not finite?

        Raises:
            NonFiniteError: as for `permits`.
        """
        if did_step:
            self.num_in_row = 0
        elif self._has_scaler and self._counted != self._windows.current.number:
            self._skips.note()
            ranks = self._bad_losses()
            if ranks:
                self._refuse(ranks, [])
        self._seen.is_judged = True

    def _bad_losses(self) -> dict[int, list[float]]:
        """{rank: [how many of its losses are not finite, the first one's micro-batch, its value]}; an exchange."""
        read = [(micro, float(loss)) for micro, loss in self._seen.losses]
        bad = [(micro, loss) for micro, loss in read if not self._is_good_loss(loss)]
        rows = self._group.gather_numbers([float(len(bad)), *(bad[0] if bad else (0.0, 0.0))])
        return {rank: row for rank, row in enumerate(rows) if row[0]}

    def _is_good_loss(self, loss: float) -> bool:
        return math.isfinite(loss)

    def _refuse(self, ranks: dict[int, list[float]], parameters: Sequence[torch.Tensor]) -> None:
        window, update = self._windows.current.number, self._clock.num_updates + 1
        # A bad loss makes all gradients nan: their names say nothing then.
        culprits = [] if ranks else self._culprits(parameters)
        if self._counted != window:
            self._counted = window
            self.num_skipped += 1
            self.num_in_row += 1
        action = "raise" if self.num_in_row > self.policy.max_in_row else self.policy.action
        runs_again = self._replay is not None and self._replay.arm()
        if action == "explain":
            action = "explain" if runs_again else "raise"
        self.report = self._words(update, ranks, culprits, len(parameters), action)
        notify(
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

    def _explain(self) -> bool:
        """The window has been run again: report where it began.

        Raises:
            NonFiniteError: the update was not to be left out in silence.
        """
        found = None if self._replay is None else self._replay.end()
        every = [each for each in self._group.gather_objects(found) if each is not None]
        # What one rank made reaches the others with the gradients.
        every = [each for each in every if each.phase != "elsewhere"] or every[:1]
        every.sort(key=lambda each: (each.phase == "backward", each.rank))
        self.origin = every[0] if every else None
        told = "; ".join(map(str, every))
        told = (
            told
            or "its losses and gradients were finite: its inputs have changed, or its results depend on more than the batch"
        )
        self.report = f"{self.report}. Run again with checks, {told}"
        notify("non_finite_origin", source=self._clock, origins=[asdict(each) for each in every])
        self._seen = _Seen(is_judged=True)
        self._counted = self._windows.current.number
        if self._owes_error:
            self._owes_error = False
            raise NonFiniteError(self.report)
        log.warning("%s", self.report)
        return False

    def _culprits(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Names of the parameters whose gradients are not finite, in the models' order."""
        names = {id(tensor): name for name, tensor in self._prepared.named("named_parameters")}
        if not self._is_whole:
            grads = {id(p): self._strategy.local_gradients([p]) for p in parameters}
            own = [names[key] for key in names if any(not _is_finite(grad) for grad in grads.get(key, ()))]
            every = self._group.gather_objects(own[: 4 * _NUM_NAMES])
            return list(dict.fromkeys(name for each in every for name in each))
        first: dict[int, bool] = {}  # of what is clipped twice, the first clipping saw the gradients as they came
        noted = self._seen.norms if self._seen.noted_at == self._seen.num_backwards else []
        for chosen, norms in noted:
            for parameter, is_finite in zip(chosen, norms.isfinite().tolist()):
                first.setdefault(id(parameter), is_finite)
        bad = {key for key, is_finite in first.items() if not is_finite}
        if not bad:
            bad = {id(p) for p in parameters if p.grad is not None and not _is_finite(p.grad)}
        return [names[key] for key in names if key in bad]

    def _words(self, update: int, ranks: dict[int, list[float]], culprits: list[str], total: int, action: str) -> str:
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
        spoilt = [name for name, buffer in self._prepared.named("named_buffers") if not _is_finite(buffer)]
        after = (
            f". Buffers are not finite either ({', '.join(spoilt[:_NUM_NAMES])}), which skipping does not repair: load a checkpoint"
            if spoilt
            else ""
        )
        return f"update {update}: {'; '.join(told)}: {done}{after}"


def has_scaler(parts: RunParts) -> bool:
    """Are losses scaled, by torch's scaler or by an engine?"""
    scaler = parts.precision.scaler
    return scaler is not None and (scaler.is_enabled() or parts.strategy.capabilities.scales_losses)


# ---------------------------------------------------------------- finiteness


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _norms(parameters: Iterable[torch.Tensor]) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """The 2-norm of each gradient, by device and dtype; half-precision ones are summed up in float32."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.numel():
            kinds.setdefault((parameter.grad.device, parameter.grad.dtype), []).append(parameter)
    found = []
    for (_, dtype), chosen in kinds.items():
        working = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        grads = [_values(parameter.grad.detach()) for parameter in chosen]  # type: ignore[union-attr]
        found.append((chosen, torch.stack(torch._foreach_norm(grads, 2.0, dtype=working))))
    return found


def _total(found: list[tuple[list[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    """The 2-norm of all of them, as torch's clipping computes it: from norms in the gradients' own dtypes."""
    device = found[0][1].device
    norms = [norms.to(chosen[0].grad.dtype).to(device) for chosen, norms in found if chosen[0].grad is not None]
    total: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms), 2.0)
    return total


def _is_finite(tensor: torch.Tensor) -> bool:
    values = _values(tensor.detach())
    return not (values.is_floating_point() or values.is_complex()) or bool(torch.isfinite(values).all())
