"""Proof that all trainable parameters learn: they get gradients and change, while frozen parameters do not change.

Most checks take two arguments: `facts` is what rank 0 recorded about the whole single-process run, and `updates` are
the records of its updates.
"""

import math
from dataclasses import replace
from typing import Any

from headway.verify.proofs.processes import find_diverged
from headway.verify.records import RunRecord, UpdateRecord
from headway.verify.verdict import RunSet, Verdict, join

KEY, TITLE = "learning", "what learns, learns"
PAGE = "verify.md#what-learns-learns"


def check_learning(runs: RunSet) -> Verdict:
    """Return the verdict on whether trainable parameters change, frozen ones do not, and replicas stay equal."""
    first = runs.first
    facts, updates = first.fact, list(first.first.values())
    trainable = facts.get("trainable", [])
    if not trainable:
        return _make_failure("no parameter is trainable", "set requires_grad of the parameters to train")
    checks = (
        _check_finite,
        _check_optimizers,
        _check_gradients,
        _check_experts,
        _check_frozen_norms,
        _check_movement,
        _check_stale_gradients,
        _check_discards,
        _check_modes,
    )
    for check in checks:
        found = check(facts, updates)
        if found is not None:
            return _add_place(found, first) if check is _check_gradients else found
    found = _check_buffers(runs, updates) or _check_replicas(runs)
    if found is not None:
        return found
    if not any(rate for update in updates for rate in update.rates):
        return Verdict(
            KEY, TITLE, "NOT CHECKED", f"the learning rate is 0 in the first {len(updates)} updates (a warm-up)"
        )
    frozen = f", {len(facts['frozen'])} frozen ones stayed" if facts.get("frozen") else ""
    return Verdict(KEY, TITLE, "PASS", f"{len(trainable)} parameter tensors got gradients and changed{frozen}")


def _check_finite(facts: dict[str, Any], updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if an optimizer gets gradients that are NaN or infinite, else None.

    In fp16, infinite gradients are normal, because the loss scale is found by trying. Such updates are skipped.
    """
    if facts.get("mixed_precision") == "fp16":
        return None
    for update in updates:
        names = [name for name, norm in update.norms.items() if not math.isfinite(norm)]
        if names:
            return _make_failure(
                f"update {update.number}: the gradient of {join(names)} is NaN or infinite, so its weights are lost",
                'Accelerator(on_non_finite="raise") names the operation that made the first NaN',
            )
    return None


def _check_optimizers(facts: dict[str, Any], updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if a trainable parameter is in no optimizer, or if some frozen parameters are in one.

    Return None otherwise. If the optimizers contain all frozen parameters, none is reported, because scripts often pass
    all parameters of a model.
    """
    trainable = facts["trainable"]
    held = set(facts.get("in_optimizer", trainable))
    learned = {name for update in updates for name in update.norms}
    left_out = [name for name in (*trainable, *facts.get("frozen", [])) if name not in held]
    left_out = [name for name in left_out if name in trainable or name in learned]
    optimizers = facts.get("optimizers", [])
    if left_out:
        return _make_failure(
            f"{join(left_out)} is trainable, but belongs to no prepared optimizer{_describe_lines(optimizers)}",
            "create the optimizer with all trainable parameters after the model is complete, and prepare it; or freeze them",
        )
    frozen = [name for name in facts.get("frozen", []) if name not in learned]
    given = [name for name in frozen if name in held]
    # Scripts often pass all parameters. Only a selection of frozen ones shows that they were meant to be trained.
    if given and len(given) < len(frozen) and optimizers:
        return _make_failure(
            f"{join(given)} was given to the optimizer, but is frozen (requires_grad=False){_describe_lines(optimizers)}",
            "set requires_grad=True for it, or leave it out of the optimizer: look at the names that the script freezes",
        )
    return None


def _check_gradients(facts: dict[str, Any], updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if a trainable parameter gets no gradient or only zeros, else None.

    A bias may get only zeros if another parameter of its module does not.
    """
    trainable = facts["trainable"]
    without = [name for name in trainable if not any(name in update.norms for update in updates)]
    if without:
        return _make_failure(
            f"{join(without)} got no gradient in {len(updates)} updates",
            "the loss does not depend on it: use it in the forward, or freeze it (requires_grad=False); look for detach(), "
            ".data, no_grad(), argmax, and checkpointing with use_reentrant=True",
        )
    zero = [name for name in trainable if all(update.norms.get(name, 0.0) == 0.0 for update in updates)]
    # A bias of the last layer cancels out in a loss of differences, such as a critic's, and then has no gradient.
    zero = [name for name in zero if not name.endswith("bias") or not _has_sibling(name, trainable, zero)]
    if zero:
        is_expert = any("expert" in name for name in zero)
        return _make_failure(
            f"the gradient of {join(zero)} is zero in {len(updates)} updates",
            "no token was sent to this expert: balance the router" if is_expert else
            "the loss does not depend on its value: look for a unit that is cut off, a mask of zeros, or two factors that both "
            "start at zero",
        )  # fmt: skip
    return None


def _check_experts(facts: dict[str, Any], updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if an expert gets no gradient in any update, else None.

    Only parameters that stack the weights of all experts are examined.
    """
    for name in facts["trainable"]:
        idle = [set(update.unused.get(name, ())) for update in updates if name in update.norms]
        never = sorted(set.intersection(*idle)) if idle else []
        if never:
            return _make_failure(
                f"expert {join([str(each) for each in never])} of {name} was never used in {len(updates)} updates",
                "no token was sent to it: look at the number of outputs of the router, and balance the load",
            )
    return None


def _check_frozen_norms(facts: dict[str, Any], updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if the running statistics of a frozen batch norm change, else None."""
    start = facts.get("initial", {})
    drifting = [
        norm for norm in facts.get("norms", [])
        if f"{norm}.weight" in facts.get("frozen", []) and any(
            update.buffers.get(f"{norm}.running_mean") != start.get(f"buffer:{norm}.running_mean") for update in updates
        )
    ]  # fmt: skip
    if not drifting:
        return None
    return _make_failure(
        f"{join(drifting)} is frozen, but its running statistics change",
        "call eval() on the frozen module after model.train(), so that its batch norms keep their statistics",
    )


def _check_movement(facts: dict[str, Any], updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if a trainable parameter with a gradient does not change, or a frozen one does.

    Return None otherwise.
    """
    start = facts.get("initial", {})
    still = [name for name in facts["trainable"] if all(each.hashes.get(name) == start.get(name) for each in updates)]
    largest = max((max(update.norms.values(), default=0.0) for update in updates), default=0.0)
    # The gradient of a bias before a normalization consists of rounding errors. It can be too small to change the bias.
    still = [name for name in still if any(update.norms.get(name, 0.0) > 1e-5 * largest for update in updates)]
    if still and any(rate for update in updates for rate in update.rates):
        return _make_failure(
            f"{join(still)} got gradients, but did not change in {len(updates)} updates",
            "the optimizer does not step it: create it after the model is complete and prepare both together; in bfloat16 "
            "the step may be too small",
        )
    moved = [
        name
        for name in facts.get("frozen", [])
        if any(update.hashes.get(name) != start.get(name) for update in updates)
    ]
    if moved:
        return _make_failure(
            f"{join(moved)} is frozen, but changed{_describe_writer(moved[0], updates)}",
            "look for code that writes to it, such as a moving average",
        )
    return None


def _check_stale_gradients(facts: dict[str, Any], updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if an optimizer changes a parameter after the script has frozen it, else None."""
    before = facts.get("initial", {})
    for update in updates:
        moved = [name for name in update.stale if update.hashes.get(name) != before.get(name)]
        if moved:
            return _make_failure(
                f"{join(moved)} is frozen in update {update.number}, but the optimizer still changes it: its gradient is a "
                "tensor, so momentum and weight decay go on",
                "remove the gradient when you freeze: use zero_grad(set_to_none=True), or set parameter.grad = None",
            )
        before = update.hashes
    return None


def _check_discards(facts: dict[str, Any], updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if `zero_grad` often discards the gradients of a batch before a step, else None."""
    found = [update for update in updates if update.discarded]
    if len(found) < 2:  # one batch may be left out on purpose
        return None
    num = sum(len(update.discarded) for update in found)
    return _make_failure(
        f"zero_grad() at {found[0].discarded[0]} clears gradients before an optimizer step has used them: those of {num} "
        f"batches in {len(updates)} updates are lost",
        "call zero_grad() after optimizer.step(), not before each backward",
    )


def _check_modes(facts: dict[str, Any], updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if a model with dropout or batch norms stays in evaluation mode, else None.

    Models that were never in training mode are accepted, because some scripts train in evaluation mode on purpose.
    """
    if not (facts.get("num_dropouts") or facts.get("norms")):
        return None
    for model in sorted({model for update in updates for model in update.modes}):
        modes = [(update.number, update.modes[model]) for update in updates if model in update.modes]
        first = next((index for index, (_, found) in enumerate(modes) if "train" not in found), 0)
        if first and len(modes) - first > 1 and all(found == ["eval"] for _, found in modes[first:]):
            lines = list(facts.get("evaluations", {}))
            at = f" at {lines[-1]}" if lines else ""
            return _make_failure(
                f"from update {modes[first][0]} on, the model is trained in evaluation mode: eval(){at} is not followed by train()",
                "call model.train() after the evaluation: dropout is off, and batch norms keep their statistics",
            )
    return None


def _add_place(found: Verdict, first: RunRecord) -> Verdict:
    """Return the verdict about a parameter without a gradient, with the call that cuts it off from the loss.

    If this call is unknown, the verdict is returned unchanged.
    """
    name = found.reason.split(" got no gradient")[0].split(",")[0]
    place = _find_cut(first, name)
    return replace(found, details=(f"its result is cut off by {place}",)) if place else found


def _find_cut(first: RunRecord, name: str) -> str:
    """Return the first torch call that uses a parameter but returns a result without a gradient, or "".

    Args:
        first: Single-process run.
        name: Name of the parameter.
    """
    for loss in first.trace(0, min(first.first)):
        calls = loss["calls"]
        reached = {index for index, call in enumerate(calls) if f".{call.get('own', '')}".endswith(f".{name}")}
        for index, call in enumerate(calls):
            if not reached.isdisjoint(call["in"]):
                if call.get("is_cut"):
                    return f"{call['func']}() at {call['line']}"
                reached.add(index)
    return ""


def _check_buffers(runs: RunSet, updates: list[UpdateRecord]) -> Verdict | None:
    """Return the failed verdict if calling the model in evaluation mode changes a persistent buffer, else None."""
    changing = runs.probed.fact.get("changes_in_evaluation", []) if runs.probed is not None else []
    if not changing:
        return None
    return _make_failure(
        f"the buffer {changing[0]} changes{_describe_writer(changing[0], updates)} whenever the model is called, also in "
        "evaluation mode",
        "write `value = value + x` instead of `value += x`, which changes the buffer; or change it only if self.training",
    )


def _check_replicas(runs: RunSet) -> Verdict | None:
    """Return the failed verdict if the replicas of a parameter differ between ranks, else None."""
    diverged = find_diverged(runs.several) if runs.several is not None and runs.several.updates else None
    if diverged is None:
        return None
    update, name, rank = diverged
    return _make_failure(
        f"update {update}: {name} differs between rank 0 and rank {rank}",
        "prepare the model that holds it, and compute its loss on every rank",
    )


def _describe_writer(name: str, updates: list[UpdateRecord]) -> str:
    """Return where the script changes a tensor in place, as a phrase such as " at train.py:12"; "" if unknown."""
    lines = [line for update in updates for line in update.written.get(name, ())]
    return f" at {lines[0]}" if lines else ""


def _describe_lines(optimizers: list[dict[str, Any]]) -> str:
    """Return where the prepared optimizers were created, as a phrase in parentheses; "" if unknown."""
    lines = [f"{each['type']} at {each['line']}" for each in optimizers if each["line"]]
    return f" ({join(lines)})" if lines else ""


def _has_sibling(name: str, trainable: list[str], zero: list[str]) -> bool:
    """Whether the module that owns a parameter has another parameter with a nonzero gradient.

    Args:
        name: Name of the parameter, whose own gradient is zero.
        trainable: Names of all trainable parameters.
        zero: Names of the parameters whose gradients are zero.
    """
    module = name.rpartition(".")[0]
    return any(each.rpartition(".")[0] == module and each not in zero for each in trainable)


def _make_failure(reason: str, advice: str) -> Verdict:
    return Verdict(KEY, TITLE, "FAIL", reason, (), advice, PAGE)
