"""Proof that a model does not leak: outputs do not depend on other rows, other documents, padding or later tokens."""

from headway.verify.blame import find_needed_calls
from headway.verify.record_types import CallEntry, LeakEntry
from headway.verify.records import RunRecord
from headway.verify.verdict import Proof, RunSet, Verdict, describe_failure

_PROOF = Proof("leaks", title="nothing leaks", page="verify.md#nothing-leaks")
_WORDS = {
    "rows": "other rows",
    "documents": "other documents of a row",
    "padding": "padding",
    "future": "later tokens",
}
"""Text for the result of a passed test, by `LeakEntry.kind`. Kinds without a text are not mentioned."""
_ADVICE = {
    "rows": "an operation mixes the rows of a batch: look for a softmax, norm or view over dimension 0",
    "documents": "attention must stop at the boundaries of documents: pass position_ids and no attention_mask to a "
    "model that supports it, or a block mask",
    "padding": "pass the attention mask to the model, and leave padding out of sums and means",
    "future": "attention needs a causal mask (is_causal=True)",
    "steps": "take the statistic over earlier steps only, such as those of the known history",
    "copy": "compare logits[:, :-1] with tokens[:, 1:], or pass labels= to a model that shifts them",
}
"""Advice by `LeakEntry.kind`."""
_SHAPE_FUNCTIONS = ("view", "reshape", "flatten", "unflatten", "permute", "contiguous")
"""Names of torch functions that change the shape of a tensor without computing anything."""
_STATISTICS = (
    "mean",
    "std",
    "var",
    "amax",
    "amin",
    "max",
    "min",
    "norm",
    "sum",
    "median",
    "quantile",
    "std_mean",
    "var_mean",
)
"""Names of torch functions that compute a statistic over a dimension."""
_PAGES = {"documents": "language_models.md"}
"""Page of the documentation by `LeakEntry.kind`. Other kinds are explained in verify.md."""


def check_leaks(runs: RunSet) -> Verdict:
    """Return the verdict on leaks, based on the run in which parts of the first training batch were changed."""
    probed = runs.probed
    if probed is None or probed.rank0_facts.leak_entries is None:
        reason = "the model was not called on a batch"
        if probed is not None and probed.code not in (0, None):
            reason = describe_failure(probed)
        return _PROOF.report_unchecked(reason)
    entries = [*probed.rank0_facts.leak_entries, *_find_later_steps(runs.baseline)]
    if not entries:
        reason = probed.rank0_facts.probe_error or "the model's outputs have no rows, or are random"
        return _PROOF.report_unchecked(reason)
    leaks = [each for each in entries if each["is_leak"]]
    if leaks:
        leak = leaks[0]
        return _PROOF.report_failure(
            leak["description"],
            details=tuple(each["description"] for each in leaks[1:]),
            advice=_find_advice(leak),
            page=_PAGES.get(leak["kind"], _PROOF.page),
        )
    checked = [_WORDS[each["kind"]] for each in entries if each["kind"] in _WORDS]
    return _PROOF.report_pass(f"outputs do not depend on {', '.join(checked)}")


def _find_advice(leak: LeakEntry) -> str:
    """Return the advice for a leak: by the function that it names if this only changes shapes, else by its kind."""
    function = leak["call"].partition("(")[0]
    if function in _SHAPE_FUNCTIONS:
        return (
            f"{function}() puts values of one row or position into another: transpose dimensions before you merge them"
        )
    return _ADVICE[leak["kind"]]


def _find_later_steps(baseline: RunRecord) -> list[LeakEntry]:
    """Return a list with one leak if a statistic over all steps of a series enters the model's input, else [].

    Such a statistic includes the later steps that the model predicts. A series is examined only if its loss compares
    the model's output with the input of the next step.
    """
    for loss in baseline.trace(0, min(baseline.rank0_updates)):
        calls = loss.calls
        for call in calls:
            if call.predicted_input is None:
                continue
            num_steps = calls[call.predicted_input].shape[-1]
            for index in sorted(find_needed_calls(calls, call.predicted_input)):
                statistic = calls[index]
                if not statistic.inputs or not _is_statistic(calls[statistic.inputs[0]], statistic, num_steps):
                    continue
                name = f"{statistic.func}() at {statistic.line}"
                description = (
                    f"{name} is taken over all steps of a series, and the model, which predicts the next step, sees it at the "
                    "earlier ones"
                )
                return [{"kind": "steps", "is_leak": True, "description": description, "call": name}]
    return []


def _is_statistic(source: CallEntry, call: CallEntry, num_steps: int) -> bool:
    """Whether a call computes a statistic over the last dimension of its first input.

    The dimension must have at least as many steps as the model's input.

    Args:
        source: Call that made the first input.
        call: Call to examine.
        num_steps: Number of steps of the model's input.
    """
    before, after = source.shape, call.shape
    if len(before) < 2 or before[-1] < num_steps or call.func not in _STATISTICS:
        return False
    return after in (before[:-1], [*before[:-1], 1])  # without and with keepdim
