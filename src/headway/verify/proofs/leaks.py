"""Proof that a model does not leak: outputs do not depend on other rows, other documents, padding or later tokens."""

from typing import Any

from headway.verify.blame import find_needed
from headway.verify.records import RunRecord
from headway.verify.verdict import RunSet, Verdict, describe_failure

KEY, TITLE = "leaks", "nothing leaks"
_WORDS = {
    "rows": "other rows",
    "documents": "other documents of a row",
    "padding": "padding",
    "future": "later tokens",
}
_ADVICE = {
    "rows": "an operation mixes the rows of a batch: look for a softmax, norm or view over dimension 0",
    "documents": "attention must stop at the boundaries of documents: pass position_ids and no attention_mask to a "
    "model that supports it, or a block mask",
    "padding": "pass the attention mask to the model, and leave padding out of sums and means",
    "future": "attention needs a causal mask (is_causal=True)",
    "steps": "take the statistic over earlier steps only, such as those of the known history",
    "copy": "compare logits[:, :-1] with tokens[:, 1:], or pass labels= to a model that shifts them",
}
_SHAPING = ("view", "reshape", "flatten", "unflatten", "permute", "contiguous")
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
_PAGES = {"documents": "language_models.md"}


def check_leaks(runs: RunSet) -> Verdict:
    """Return the verdict on leaks, based on the run in which parts of the first training batch were changed."""
    probed = runs.probed
    if probed is None or "leaks" not in probed.fact:
        why = (
            describe_failure(probed)
            if probed is not None and probed.code not in (0, None)
            else "the model was not called on a batch"
        )
        return Verdict(KEY, TITLE, "NOT CHECKED", why)
    findings = [*probed.fact["leaks"], *_find_later_steps(runs.first)]
    if not findings:
        why = probed.fact.get("probe_error") or "the model's outputs have no rows, or are random"
        return Verdict(KEY, TITLE, "NOT CHECKED", why)
    leaks = [each for each in findings if each["leaks"]]
    if leaks:
        first = leaks[0]
        return Verdict(
            KEY, TITLE, "FAIL", first["where"], tuple(each["where"] for each in leaks[1:]), _find_advice(first),
            _PAGES.get(first["kind"], "verify.md#nothing-leaks"),
        )  # fmt: skip
    checked = [_WORDS[each["kind"]] for each in findings if each["kind"] in _WORDS]
    return Verdict(KEY, TITLE, "PASS", f"outputs do not depend on {', '.join(checked)}")


def _find_advice(finding: dict[str, Any]) -> str:
    """Return the advice for a leak: by the function that it names if this only changes shapes, else by its kind."""
    function = finding.get("call", "").partition("(")[0]
    if function in _SHAPING:
        return (
            f"{function}() puts values of one row or position into another: transpose dimensions before you merge them"
        )
    return _ADVICE[finding["kind"]]


def _find_later_steps(first: RunRecord) -> list[dict[str, Any]]:
    """Return a list with one finding if a statistic over all steps of a series enters the model's input, else [].

    Such a statistic includes the later steps that the model predicts. A series is examined only if its loss compares
    the model's output with the input of the next step.
    """
    found = []
    for loss in first.trace(0, min(first.first)):
        calls = loss["calls"]
        for call in calls:
            if "predicts" not in call:
                continue
            length = calls[call["predicts"]]["shape"][-1]
            for index in sorted(find_needed(calls, call["predicts"])):
                source = next((calls[each] for each in calls[index]["in"]), None)
                if source is None or not _reduces_last(source, calls[index], length):
                    continue
                where = (
                    f"{calls[index]['func']}() at {calls[index]['line']} is taken over all steps of a series, and the model, which "
                    "predicts the next step, sees it at the earlier ones"
                )
                found.append({"kind": "steps", "leaks": True, "where": where})
    return found[:1]


def _reduces_last(source: dict[str, Any], result: dict[str, Any], length: int) -> bool:
    """Whether a call computes a statistic over the last dimension of its first input.

    The dimension must have at least as many steps as the model's input.

    Args:
        source: Call that made the first input.
        result: Call to examine.
        length: Number of steps of the model's input.
    """
    before, after = source.get("shape") or [], result.get("shape") or []
    if len(before) < 2 or before[-1] < length or result["func"] not in _STATISTICS:
        return False
    return after in (before[:-1], [*before[:-1], 1])
