"""Proof that all trainable parameters learn: they get gradients and change, while frozen parameters do not change.

Most checks take two arguments: `facts` is what rank 0 recorded about the whole single-process run, and `updates` are
the records of its updates.
"""

import math

from headway.common.text import join_names
from headway.verify.proofs.rank_causes import find_diverged_replica
from headway.verify.record_types import OptimizerFacts, RunFacts, UpdateRecord
from headway.verify.records import RunRecord
from headway.verify.verdict import Proof, RunSet, Verdict

_PROOF = Proof("learning", title="what learns, learns", page="verify.md#what-learns-learns")


def check_learning(runs: RunSet) -> Verdict:
    """Return the verdict on whether trainable parameters change, frozen ones do not, and replicas stay equal."""
    baseline = runs.baseline
    facts, updates = baseline.rank0_facts, list(baseline.rank0_updates.values())
    trainable = facts.trainable_parameters
    if not trainable:
        return _PROOF.report_failure("no parameter is trainable", advice="set requires_grad of the parameters to train")
    failure = (
        _check_finite(facts, updates)
        or _check_optimizers(facts, updates)
        or _check_missing_gradients(baseline)
        or _check_zero_gradients(facts, updates)
        or _check_experts(facts, updates)
        or _check_frozen_norms(facts, updates)
        or _check_trainable(facts, updates)
        or _check_frozen(facts, updates)
        or _check_stale_gradients(facts, updates)
        or _check_discards(updates)
        or _check_modes(facts, updates)
        or _check_buffers(runs, updates)
        or _check_replicas(runs)
    )
    if failure is not None:
        return failure
    if not _has_learning_rate(updates):
        return _PROOF.report_unchecked(f"the learning rate is 0 in the first {len(updates)} updates (a warm-up)")
    frozen = facts.frozen_parameters
    remark = f", {len(frozen)} frozen ones stayed" if frozen else ""
    return _PROOF.report_pass(f"{len(trainable)} parameter tensors got gradients and changed{remark}")


def _has_learning_rate(updates: list[UpdateRecord]) -> bool:
    """Whether any learning rate is not 0 in any update."""
    return any(rate for update in updates for rate in update.learning_rates)


def _check_finite(facts: RunFacts, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if an optimizer gets gradients that are NaN or infinite, else None.

    In fp16, infinite gradients are normal, because the loss scale is found by trying. Such updates are skipped.
    """
    if facts.mixed_precision == "fp16":
        return None
    for update in updates:
        names = [name for name, norm in update.gradient_norms.items() if not math.isfinite(norm)]
        if names:
            return _PROOF.report_failure(
                f"update {update.number}: the gradient of {join_names(names, 3)} is NaN or infinite, so its weights are lost",
                advice='Accelerator(on_non_finite="raise") names the operation that made the first NaN',
            )
    return None


def _check_optimizers(facts: RunFacts, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if a trainable parameter is in no optimizer, or if some frozen parameters are in one.

    Return None otherwise. If the optimizers contain all frozen parameters, none is reported, because scripts often pass
    all parameters of a model.
    """
    trainable, frozen = facts.trainable_parameters, facts.frozen_parameters
    optimizers = facts.optimizers
    optimized = set(trainable if facts.optimized_parameters is None else facts.optimized_parameters)
    learned = {name for update in updates for name in update.gradient_norms}
    # A parameter that was frozen at the start can have become trainable. It then gets gradients.
    left_out = [name for name in trainable if name not in optimized]
    left_out += [name for name in frozen if name in learned and name not in optimized]
    if left_out:
        return _PROOF.report_failure(
            f"{join_names(left_out, 3)} is trainable, but belongs to no prepared optimizer{_describe_lines(optimizers)}",
            advice="create the optimizer with all trainable parameters after the model is complete, and prepare it; or freeze them",
        )
    never_trained = [name for name in frozen if name not in learned]
    useless = [name for name in never_trained if name in optimized]
    # Scripts often pass all parameters. Only a selection of frozen ones shows that they were meant to be trained.
    if 0 < len(useless) < len(never_trained) and optimizers:
        return _PROOF.report_failure(
            f"{join_names(useless, 3)} was given to the optimizer, but is frozen (requires_grad=False){_describe_lines(optimizers)}",
            advice="set requires_grad=True for it, or leave it out of the optimizer: look at the names that the script freezes",
        )
    return None


def _check_missing_gradients(baseline: RunRecord) -> Verdict | None:
    """Return the failed verdict if a trainable parameter gets no gradient, else None.

    The verdict names the torch call that cuts the first such parameter off from the loss, if it is known.
    """
    updates = list(baseline.rank0_updates.values())
    learned = {name for update in updates for name in update.gradient_norms}
    missing = [name for name in baseline.rank0_facts.trainable_parameters if name not in learned]
    if not missing:
        return None
    call = _find_cut(baseline, missing[0])
    return _PROOF.report_failure(
        f"{join_names(missing, 3)} got no gradient in {len(updates)} updates",
        details=(f"{call} detaches its result from the graph",) if call else (),
        advice="the loss does not depend on it: use it in the forward, or freeze it (requires_grad=False); look for detach(), "
        ".data, no_grad(), argmax, and checkpointing with use_reentrant=True",
    )


def _find_cut(baseline: RunRecord, name: str) -> str:
    """Return the first torch call that uses a parameter but returns a result without a gradient; "" if there is none.

    The call is returned as text, such as "detach() at train.py:12".

    Args:
        baseline: Single-process run.
        name: Name of the parameter.
    """
    for loss in baseline.trace(0, min(baseline.rank0_updates)):
        calls = loss.calls
        # Names in traces can have prefixes of wrappers, such as "module.".
        dependent = {index for index, call in enumerate(calls) if f".{call.model_tensor}".endswith(f".{name}")}
        for index, call in enumerate(calls):
            if not dependent.isdisjoint(call.inputs):
                if call.is_cut:
                    return f"{call.func}() at {call.line}"
                dependent.add(index)
    return ""


def _check_zero_gradients(facts: RunFacts, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if all gradients of a trainable parameter are zero, else None.

    A bias may get only zeros if another parameter of its module does not.
    """
    trainable = facts.trainable_parameters
    zero = [name for name in trainable if all(update.gradient_norms.get(name, 0.0) == 0.0 for update in updates)]
    # A bias of the last layer cancels out in a loss of differences, such as a critic's, and then has no gradient.
    zero = [name for name in zero if not name.endswith("bias") or not _has_learning_sibling(name, trainable, zero)]
    if not zero:
        return None
    advice = (
        "the loss does not depend on its value: look for a unit that is detached, a mask of zeros, or two factors that both "
        "start at zero"
    )
    if any("expert" in name for name in zero):
        advice = "no token was sent to this expert: balance the router"
    return _PROOF.report_failure(
        f"the gradient of {join_names(zero, 3)} is zero in {len(updates)} updates", advice=advice
    )


def _has_learning_sibling(name: str, trainable: list[str], zero: list[str]) -> bool:
    """Whether the module that owns a parameter has another parameter with a nonzero gradient.

    Args:
        name: Name of the parameter, whose own gradient is zero.
        trainable: Names of all trainable parameters.
        zero: Names of the parameters whose gradients are zero.
    """
    module = name.rpartition(".")[0]
    return any(each.rpartition(".")[0] == module and each not in zero for each in trainable)


def _check_experts(facts: RunFacts, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if an expert gets no gradient in any update, else None.

    Only parameters that stack the weights of all experts are examined.
    """
    for name in facts.trainable_parameters:
        idle_sets = [set(update.idle_experts.get(name, ())) for update in updates if name in update.gradient_norms]
        unused = sorted(set.intersection(*idle_sets)) if idle_sets else []
        if unused:
            return _PROOF.report_failure(
                f"expert {join_names([str(each) for each in unused], 3)} of {name} was never used in {len(updates)} updates",
                advice="no token was sent to it: look at the number of outputs of the router, and balance the load",
            )
    return None


def _check_frozen_norms(facts: RunFacts, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if the running statistics of a frozen batch norm change, else None."""
    initial_hashes, frozen = facts.initial_hashes, facts.frozen_parameters
    changed = []
    for norm in facts.batch_norms:
        start = initial_hashes.get(f"buffer:{norm}.running_mean")
        hashes = [update.buffer_hashes.get(f"{norm}.running_mean") for update in updates]
        if f"{norm}.weight" in frozen and any(each != start for each in hashes):
            changed.append(norm)
    if not changed:
        return None
    return _PROOF.report_failure(
        f"{join_names(changed, 3)} is frozen, but its running statistics change",
        advice="call eval() on the frozen module after model.train(), so that its batch norms keep their statistics",
    )


def _check_trainable(facts: RunFacts, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if a trainable parameter with a gradient does not change, else None.

    Return None also if all learning rates are 0, as in a warm-up.
    """
    if not _has_learning_rate(updates):
        return None
    initial_hashes = facts.initial_hashes
    largest_norm = max((norm for update in updates for norm in update.gradient_norms.values()), default=0.0)
    unchanged = []
    for name in facts.trainable_parameters:
        hashes = [update.parameter_hashes.get(name) for update in updates]
        norms = [update.gradient_norms.get(name, 0.0) for update in updates]
        # The gradient of a bias before a normalization consists of rounding errors. It can be too small to change the
        # bias.
        has_gradient = any(norm > 1e-5 * largest_norm for norm in norms)
        if has_gradient and all(each == initial_hashes.get(name) for each in hashes):
            unchanged.append(name)
    if not unchanged:
        return None
    return _PROOF.report_failure(
        f"{join_names(unchanged, 3)} got gradients, but did not change in {len(updates)} updates",
        advice="the optimizer does not step it: create it after the model is complete and prepare both together; in bfloat16 "
        "the step may be too small",
    )


def _check_frozen(facts: RunFacts, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if a parameter that was frozen before the first update changes, else None."""
    initial_hashes = facts.initial_hashes
    changed = [
        name
        for name in facts.frozen_parameters
        if any(update.parameter_hashes.get(name) != initial_hashes.get(name) for update in updates)
    ]
    if not changed:
        return None
    return _PROOF.report_failure(
        f"{join_names(changed, 3)} is frozen, but changed{_describe_write_line(changed[0], updates)}",
        advice="look for code that writes to it, such as a moving average",
    )


def _check_stale_gradients(facts: RunFacts, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if an optimizer changes a parameter after the script has frozen it, else None."""
    previous_hashes = facts.initial_hashes
    for update in updates:
        hashes = update.parameter_hashes
        changed = [name for name in update.frozen_with_gradient if hashes.get(name) != previous_hashes.get(name)]
        if changed:
            return _PROOF.report_failure(
                f"{join_names(changed, 3)} is frozen in update {update.number}, but the optimizer still changes it: its gradient "
                "is a tensor, so momentum and weight decay go on",
                advice="remove the gradient when you freeze: use zero_grad(set_to_none=True), or set parameter.grad = None",
            )
        previous_hashes = hashes
    return None


def _check_discards(updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if `zero_grad` discards gradients before a step in at least two updates, else None."""
    discarding = [update for update in updates if update.discard_lines]
    if len(discarding) < 2:  # one batch may be left out on purpose
        return None
    num_batches = sum(len(update.discard_lines) for update in discarding)
    return _PROOF.report_failure(
        f"zero_grad() at {discarding[0].discard_lines[0]} clears gradients before an optimizer step has used them: those of "
        f"{num_batches} batches in {len(updates)} updates are lost",
        advice="call zero_grad() after optimizer.step(), not before each backward",
    )


def _check_modes(facts: RunFacts, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if a model with dropout or batch norms stays in evaluation mode, else None.

    Models that were never in training mode are accepted, because some scripts train in evaluation mode on purpose. So
    is a model whose last update alone is in evaluation mode.
    """
    if not (facts.num_dropout_rates or facts.batch_norms):
        return None
    for model in sorted({model for update in updates for model in update.training_modes}):
        calling = [update for update in updates if model in update.training_modes]
        start = next((i for i, update in enumerate(calling) if "train" not in update.training_modes[model]), 0)
        stays_in_eval = all(update.training_modes[model] == ["eval"] for update in calling[start:])
        if start > 0 and len(calling) - start > 1 and stays_in_eval:
            lines = list(facts.eval_lines)
            at = f" at {lines[-1]}" if lines else ""
            return _PROOF.report_failure(
                f"from update {calling[start].number} on, the model is trained in evaluation mode: eval(){at} is not followed by "
                "train()",
                advice="call model.train() after the evaluation: dropout is off, and batch norms keep their statistics",
            )
    return None


def _check_buffers(runs: RunSet, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if calling the model in evaluation mode changes a persistent buffer, else None."""
    names = runs.probed.rank0_facts.buffers_changed_by_eval if runs.probed is not None else []
    if not names:
        return None
    return _PROOF.report_failure(
        f"the buffer {names[0]} changes{_describe_write_line(names[0], updates)} whenever the model is called, also in "
        "evaluation mode",
        advice="write `value = value + x` instead of `value += x`, which changes the buffer; or change it only if self.training",
    )


def _check_replicas(runs: RunSet) -> Verdict | None:
    """Return the failed verdict if the replicas of a parameter differ between ranks, else None."""
    replica = find_diverged_replica(runs.several) if runs.several is not None else None
    if replica is None:
        return None
    return _PROOF.report_failure(
        f"update {replica.update}: {replica.parameter} differs between rank 0 and rank {replica.rank}",
        advice="prepare the model that holds it, and compute its loss on every rank",
    )


def _describe_write_line(name: str, updates: list[UpdateRecord]) -> str:
    """Return where the script changes a tensor in place, as a phrase such as " at train.py:12"; "" if unknown."""
    lines = [line for update in updates for line in update.write_lines.get(name, ())]
    return f" at {lines[0]}" if lines else ""


def _describe_lines(optimizers: list[OptimizerFacts]) -> str:
    """Return where the prepared optimizers were created, as a phrase in parentheses; "" if unknown."""
    lines = [f"{each['type']} at {each['line']}" for each in optimizers if each["line"]]
    return f" ({join_names(lines, 3)})" if lines else ""
