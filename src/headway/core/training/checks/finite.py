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
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import torch
from torch.utils.weak import TensorWeakRef

from headway.core import extensions
from headway.core.config.guards import NonFinitePolicy
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.events import notify_listeners
from headway.core.training._torch import foreach_norm
from headway.core.training.checks.window_records import (
    BadLosses,
    NormGroup,
    RecordedLoss,
    StampedShards,
    UpdateVerdict,
    WindowRecord,
)
from headway.core.training.guard import StepGuard
from headway.core.training.interfaces import NanOrigin, OriginSearch
from headway.core.training.run import Run
from headway.core.training.windows import AccumulationWindow
from headway.errors import NonFiniteError
from headway.log import get_logger

log = get_logger(__name__)

_NUM_NAMES = 5
"""Largest number of parameters or buffers that a message names."""


class FiniteGuard(StepGuard):
    """`StepGuard` that refuses updates whose loss or gradients are NaN or infinite, as `on_non_finite` requests.

    If an fp16 gradient scaler (torch's or DeepSpeed's) checks gradients itself, this guard only finds out whether a
    loss caused the overflow.

    During an accumulation window, the guard stores its findings in the `WindowRecord` of the window's models. The
    methods that decide about an update receive this record as an argument.

    `SpikeGuard` is a subclass that can also refuse updates whose values are finite. It overrides `_is_good_loss`,
    `_are_gradients_good`, `_read_norm`, `_agree_on_gradients` and `_refuse_update`.

    Args:
        policy: `NonFinitePolicy`, or only its action, such as "skip".
        run: Run of the Accelerator. The action "stop" ends the iteration over its training loaders.

    Attributes:
        num_skipped: Number of skipped updates.
        num_in_row: Number of consecutive skipped updates, counted since the last update that was made or since a state
            was loaded.
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
        self._records: dict[tuple[torch.nn.Module, ...], WindowRecord] = {}  # by the models that train together
        run.windows.restart_listeners.append(self.reset_state)

    def reset_state(self) -> None:
        """Drop the records of all accumulation windows, because the windows themselves were dropped.

        This happens when a state is loaded, for example. The number of skips in a row is reset, and the total number of
        skipped updates is kept.
        """
        self._records = {}
        self.num_in_row, self.has_stopped = 0, False

    def _get_record(self, window: AccumulationWindow) -> WindowRecord:
        """Return the record of an accumulation window.

        Each set of models that train together has one record. It is replaced at the first call for a new window if an
        update was judged in the previous window of these models.
        """
        record = self._records.get(window.models)
        if record is None or (record.is_judged and record.window != window.number):
            record = self._records[window.models] = WindowRecord()
        record.window = window.number
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
        record = self._get_record(window)
        record.num_backwards += 1
        if detached.device.type == "cpu":
            if math.isfinite(detached.item()):
                return loss
            record.losses.append(RecordedLoss(window.num_done, detached))
            return loss * math.nan  # backward multiplies all gradients by this factor, too
        record.losses.append(RecordedLoss(window.num_done, detached))
        # The factor is 1 for a finite loss, because x - x is 0. It is nan for inf and nan. No value is read from the device.
        factor = detached - detached + 1
        return loss * factor

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
        record = self._get_record(window)
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
        record = self._get_record(window)
        if not self._has_full_gradients:
            record.shards.parameter_ids.update(map(id, parameters))
            record.shards.stamped.append(StampedShards(list(parameters), self._get_stamps(parameters)))
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
        search = self._search
        if search is not None and search.is_repeating:
            if search.is_tracing(window):  # other models make no update on the repeated batch, either
                self._report_origin(window)
            return False
        has_replay_ended = search is None or not search.is_armed
        if self._raises_after_replay and has_replay_ended:
            self._report_origin(window)
            return False
        return self._has_scaler or self._judge_update(window)

    def _judge_update(self, window: AccumulationWindow) -> bool:
        """Whether the losses and gradients of an accumulation window permit its update. Refuse the update if not.

        The verdict is kept for the window's other optimizers, until another backward changes the gradients.

        Args:
            window: Accumulation window in which the optimizer's models trained last.

        Raises:
            NonFiniteError: If the update may not be made, and the policy demands an error.
        """
        record = self._get_record(window)
        verdict = record.verdict
        if verdict is None or (verdict.window, verdict.num_backwards) != (window.number, record.num_backwards):
            parameters = list(self._prepared.list_parameters_of(window))
            is_permitted = self._are_gradients_good(record, parameters)
            verdict = record.verdict = UpdateVerdict(window.number, record.num_backwards, is_permitted)
            if not is_permitted:
                self._refuse_update(window, record, self._gather_bad_losses(record), parameters)
            record.is_judged = True
        return verdict.is_permitted

    def _are_gradients_good(self, record: WindowRecord, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether an update may use the gradients, because they are finite on all ranks.

        Args:
            record: Record of the accumulation window.
            parameters: Parameters of the window.
        """
        if self._has_full_gradients:
            return self._are_full_gradients_finite(record, parameters)
        return self._are_shards_finite(record, parameters)

    def _are_full_gradients_finite(self, record: WindowRecord, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all gradients are finite, if this rank has all of them. One value is read from each device."""
        clipped = record.gradients
        if record.has_valid_norms:
            # A gradient that was not clipped, or has changed since, has no recorded norm that is valid.
            changed = (parameter for parameter in parameters if not clipped.is_unchanged(parameter))
            groups = [*_compute_norms(changed), *clipped.groups]
        else:
            groups = _compute_norms(parameters)
        # If the norm of the norms is finite, so are all norms. Computing it is one operation instead of four.
        totals: dict[torch.device, list[torch.Tensor]] = {}
        for _, norms in groups:
            totals.setdefault(norms.device, []).append(torch.linalg.vector_norm(norms))
        if math.isfinite(self._read_norm(record, totals)):
            return True
        return all(_is_finite(parameter.grad) for parameter in parameters if parameter.grad is not None)

    def _read_norm(self, record: WindowRecord, totals: dict[torch.device, list[torch.Tensor]]) -> float:
        """Return the 2-norm of all gradients as a number. One value is read from each device.

        Args:
            record: Record of the accumulation window. Unused here.
            totals: By device, the norms of groups of gradients, as 0-d tensors.
        """
        # Queue the computations on all devices before the host waits for the first of them.
        by_device = [
            norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) for norms in totals.values()
        ]
        return math.hypot(*(norm.item() for norm in by_device))

    def _are_shards_finite(self, record: WindowRecord, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all sharded gradients are finite on all ranks.

        If this rank's gradients are unchanged since they were clipped, the total norm before clipping decides, and the
        gradients are not read again. Ranks need not agree on this: each one checks only its own shards, and a
        collective combines the results.
        """
        clipped = record.shards
        were_finite_at_clipping = (
            record.has_valid_norms
            and clipped.parameter_ids.issuperset(map(id, parameters))
            and all(self._get_stamps(each.parameters) == each.stamps for each in clipped.stamped)
            and all(math.isfinite(total.item()) for total in clipped.totals)
        )
        # A non-finite norm may only have overflowed, so the shards are checked then.
        is_finite = were_finite_at_clipping or self._are_own_shards_finite(parameters)
        return self._agree_on_gradients(is_finite, record, parameters)

    def _agree_on_gradients(self, is_finite: bool, record: WindowRecord, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the gradient shards of all ranks are finite. This is a collective.

        Args:
            is_finite: Whether this rank's shards are finite.
            record: Record of the accumulation window. Unused here.
            parameters: Parameters whose gradients were checked. Unused here.
        """
        return self._group.reduce_numbers([float(not is_finite)], "max")[0] == 0

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
        record = self._get_record(window)
        if did_step:
            self.num_in_row = 0
        elif self._has_scaler and not record.is_counted:
            self._skips.record_skip(window)
            bad_losses = self._gather_bad_losses(record)
            if bad_losses:
                self._refuse_update(window, record, bad_losses, [])
        record.is_judged = True

    def _gather_bad_losses(self, record: WindowRecord) -> dict[int, BadLosses]:
        """Exchange the bad losses of all ranks, in a collective. Return them by rank; ranks without any are left out."""
        losses = [(micro_batch, float(loss)) for micro_batch, loss in record.losses]
        bad = [(micro_batch, loss) for micro_batch, loss in losses if not self._is_good_loss(loss)]
        first_micro_batch, first_loss = bad[0] if bad else (0, 0.0)
        rows = self._group.gather_numbers([float(len(bad)), float(first_micro_batch), first_loss])
        return {
            rank: BadLosses(int(num_losses), int(micro_batch), loss)
            for rank, (num_losses, micro_batch, loss) in enumerate(rows)
            if num_losses
        }

    def _is_good_loss(self, loss: float) -> bool:
        """Whether an update may use this loss."""
        return math.isfinite(loss)

    def _refuse_update(
        self,
        window: AccumulationWindow,
        record: WindowRecord,
        bad_losses: dict[int, BadLosses],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Count and report a refused update, and apply the policy's action to it.

        Args:
            window: Accumulation window of the update.
            record: Record of the window.
            bad_losses: Non-finite losses by rank.
            parameters: Parameters of the window, whose gradients are searched if no loss was the cause.

        Raises:
            NonFiniteError: If the policy demands an error, and the window is not run again first. The policy demands it
                with the action "raise", with "explain" if the window cannot be run again, and after more than
                `max_in_row` refused updates in a row.
        """
        update = self._clock.num_updates + 1
        # A bad loss makes all gradients NaN, so their names carry no information then.
        bad_names = [] if bad_losses else self._find_bad_gradients(record, parameters)
        if not record.is_counted:  # a window with several optimizers is counted once
            record.is_counted = True
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
            for loader in self._windows.reads.trained_on:
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

    def _find_bad_gradients(self, record: WindowRecord, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of parameters whose gradients are not finite, in the models' order.

        If gradients are sharded, this is a collective, and each rank contributes at most 20 names.

        Args:
            record: Record of the accumulation window.
            parameters: Parameters of the window.
        """
        names_by_id = {id(tensor): name for name, tensor in self._prepared.iterate_named("named_parameters")}
        if self._has_full_gradients:
            bad_ids = self._find_bad_clipped_gradients(record)
            if not bad_ids:
                bad_ids = {id(p) for p in parameters if p.grad is not None and not _is_finite(p.grad)}
            return [name for key, name in names_by_id.items() if key in bad_ids]
        bad_ids = {id(p) for p in parameters if not all(map(_is_finite, self._strategy.get_local_gradients([p])))}
        own_names = [name for key, name in names_by_id.items() if key in bad_ids]
        names_by_rank = self._group.gather_objects(own_names[: 4 * _NUM_NAMES])
        return list(dict.fromkeys(name for rank_names in names_by_rank for name in rank_names))

    def _find_bad_clipped_gradients(self, record: WindowRecord) -> set[int]:
        """Return the IDs of clipped parameters whose gradients were not finite before clipping.

        Clipping spreads a NaN to all gradients that are clipped together, so their current values do not show its
        origin. If a parameter was clipped twice, the norm from before the first clipping decides.
        """
        if not record.has_valid_norms:
            return set()
        was_finite: dict[int, bool] = {}
        for group in record.gradients.groups:
            for parameter, is_finite in zip(group.parameters, group.norms.isfinite().tolist()):
                was_finite.setdefault(id(parameter), is_finite)
        return {key for key, is_finite in was_finite.items() if not is_finite}

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
        buffers = [name for name, buffer in self._prepared.iterate_named("named_buffers") if not _is_finite(buffer)]
        warning = (
            f". Buffers are not finite either ({', '.join(buffers[:_NUM_NAMES])}), which skipping does not repair: load a checkpoint"
            if buffers
            else ""
        )
        return f"update {update}: {'; '.join(causes)}: {self._describe_consequence(action)}{warning}"

    def _describe_consequence(self, action: str) -> str:
        """Return the part of the message about a refused update that says what happens now.

        Args:
            action: Action that is taken: "skip", "stop", "explain" or "raise".
        """
        everywhere = " on all ranks" if self._group.world_size > 1 else ""
        if action == "skip":
            return f"the update is skipped{everywhere} ({self.num_in_row} in a row, {self.num_skipped} in all)"
        if action == "stop":
            return f"the update is skipped, and training stops{everywhere}"
        if action == "raise" and self.policy.action not in ("raise", "explain"):
            return f"{self.num_in_row} in a row are more than max_in_row={self.policy.max_in_row}"
        return "no update was made"


def has_scaler(run: Run) -> bool:
    """Whether losses are scaled, by torch's GradScaler or by an engine such as DeepSpeed."""
    scaler = run.precision.scaler
    return scaler is not None and (scaler.is_enabled() or run.strategy.capabilities.scales_losses)


# ---------------------------------------------------------------- finiteness


def _get_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored values of a sparse tensor, and a dense tensor unchanged."""
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
    """Whether all elements of a tensor are finite. This waits for the device. True for integers."""
    values = _get_values(tensor.detach())
    if values.dtype == torch.float4_e2m1fn_x2:
        return True  # this dtype has neither NaN nor infinity
    if values.is_floating_point() and values.element_size() == 1:
        values = values.float()  # torch has no isfinite() for some 8-bit dtypes
    return not (values.is_floating_point() or values.is_complex()) or bool(torch.isfinite(values).all())
