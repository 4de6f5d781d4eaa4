"""Searches the `CallTrace` records of two runs for the first torch call whose results differ. Imports no torch.

The loss of a batch in one process is compared with the losses of the batch's parts. A part is the rows of one rank, or
one micro-batch. If a torch call's result has one row per sample, it must consist of the rows of all parts. A result
without such rows must be equal on all parts, or it must be the mean or the sum of the parts' results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from headway.verify.random_calls import RANDOM_CALLS

Call = dict[str, Any]
"""Record of one torch call, made by `CallTrace`."""
Losses = Sequence[dict[str, Any]]
"""`CallTrace` entries for one update: one dict per loss."""

_LOOSE = 2e-3
"""Largest relative difference between two sums that count as equal."""
_CONSTRUCTED = frozenset(
    ("arange", "zeros", "ones", "full", "eye", "tensor", "linspace", "empty", "zeros_like", "ones_like", "full_like")
    + ("new_zeros", "new_ones", "new_full", "new_tensor", "as_tensor", "triu", "tril", "new_empty", "empty_like")
)
"""Names of torch functions whose results do not depend on data. The sizes of these results can differ between ranks."""
_SELECTIONS = frozenset(("topk", "sort", "argsort", "kthvalue", "median", "quantile", "argmax", "argmin", "max", "min"))
_PRODUCTS = frozenset(("matmul", "mm", "bmm", "einsum", "cdist", "__matmul__", "__rmatmul__", "addmm", "linear"))
_NORMS = frozenset(("batch_norm", "_native_batch_norm_legit", "native_batch_norm"))
_DIVISIONS = frozenset(("div", "__truediv__", "true_divide", "__rtruediv__", "div_"))
_SCALINGS = _DIVISIONS | {
    "mul",
    "multiply",
    "mul_",
    "__mul__",
    "__rmul__",
    "add",
    "sub",
    "__add__",
    "__sub__",
    "__radd__",
    "__rsub__",
}
_SCALINGS |= {"rsub", "pow", "__pow__", "lerp", "clamp", "add_", "sub_", "lerp_", "where", "full", "masked_fill"}
_LOSSES = ("loss", "entropy", "kl_div")


@dataclass(frozen=True)
class Blame:
    """First torch call whose result differs between two runs, and what it reveals about the cause.

    Attributes:
        kind: Key of the text in `causes.py` that explains the cause, such as "sum".
        line: Line of the script, such as "train.py:12 in main"; "" if it is unknown.
        call: Name of the function, such as "cross_entropy".
        name: Name of the variable, the tensor or the module that differs; "" if it is unknown.
        values: Pair of the two values that differ, as text; empty if there are none.
    """

    kind: str
    line: str
    call: str
    name: str = ""
    values: tuple[str, ...] = ()


# -------------------------------------------------------------------- parts of a batch


def blame_parts(whole: Losses, parts: Sequence[Losses], *, loose: float = _LOOSE) -> Blame | None:
    """Return the first torch call whose result on a whole batch does not match its results on the batch's parts.

    Return None if the results of all torch calls in the update match, or if the calls of a part were not recorded.

    Args:
        whole: Losses of the update in the single-process run, which computes the whole batch.
        parts: Losses of the update for each part of the batch: each rank, or each micro-batch.
        loose: Largest relative difference that is attributed to rounding.
    """
    if not whole or not parts or not all(parts):
        return None
    comparisons: list[_PartComparison] = []
    for index, ours in enumerate(whole):
        theirs = [each[index] for each in parts if index < len(each)]
        if len(theirs) < len(parts):
            return Blame("path", ours["line"], "backward")
        comparisons.append(_PartComparison(ours, theirs, loose))
        found = comparisons[-1].run()
        if found is not None:
            return found
    for each in comparisons:
        found = each.find_uneven_mean()
        if found is not None:
            return found
    return None


class _PartComparison:
    """Comparison of the torch calls behind a batch's loss with the torch calls behind the losses of the batch's parts.

    A part is the rows of one rank, or one micro-batch.

    Args:
        whole: `CallTrace` entry for the loss of the whole batch.
        parts: `CallTrace` entry for the loss of each part.
        loose: Largest relative difference that is attributed to rounding.
    """

    def __init__(self, whole: dict[str, Any], parts: Sequence[dict[str, Any]], loose: float) -> None:
        self._whole = whole
        self._parts = parts
        self._loose = loose
        self._calls: list[Call] = whole["calls"]
        self._states: dict[int, str] = {}
        weights = [each["weight"] for each in parts]
        self._weights = [float(each or 0) for each in weights] if all(each is not None for each in weights) else None

    def run(self) -> Blame | None:
        """Return a `Blame` for the first call behind the loss whose result on the whole batch does not match the parts.

        If the results of all calls match, compare the values of the losses. Return None if these match, too.
        """
        needed = find_needed(self._calls, self._whole["loss"])
        for index, theirs in _align_calls(self._calls, [each["calls"] for each in self._parts]):
            call = self._calls[index]
            if theirs is None:
                self._states[index] = "unknown"
                if index in needed and call["func"] != "input":
                    return Blame("path", call["line"], call["func"])
                continue
            state = self._states[index] = self._judge_call(index, call, theirs)
            if index in needed and state not in ("same", "mean", "sum", "weighted", "rows", "constructed", "unknown"):
                return self._describe_blame(state, index, call, theirs)
        return self._judge_loss()

    def find_uneven_mean(self) -> Blame | None:
        """Return a `Blame` for a mean over a number of elements that differs between the parts, or None.

        Return None also if the script passed loss weights or `reduction="sum"`.

        Call it after `run`, which relates the calls of the whole batch to those of the parts.

        With random weights, as in the first update, all elements have about the same loss. Means over different numbers
        of elements then agree as closely as rounding allows, although their gradients differ. So `run` cannot find such
        a mean. This method compares the numbers of elements instead of the means.
        """
        if self._weights is not None or self._whole["reduction"] == "sum":
            return None
        needed = find_needed(self._calls, self._whole["loss"])
        for index, theirs in _align_calls(self._calls, [each["calls"] for each in self._parts]):
            call = self._calls[index]
            if theirs is None or index not in needed or self._states.get(index) not in ("mean", "same"):
                continue
            if len({each.get("counted") for each in theirs}) > 1 and not call["shape"]:
                return self._judge_reduction(call, call["line"])
            if call["func"] in _DIVISIONS and self._has_uneven_divisor(call, theirs):
                return Blame("count", call["line"], call["func"])
        return None

    def _has_uneven_divisor(self, call: Call, theirs: Sequence[Call]) -> bool:
        """Whether a division divides by a count over the rows, such as a number of tokens, that differs between the parts.

        Args:
            call: Division on the whole batch.
            theirs: Corresponding division on each part of the batch.
        """
        if any(len(each["in"]) != 2 or each["in"][1] < 0 for each in (call, *theirs)):
            return False
        divisor = call["in"][1]
        if self._states.get(divisor) != "sum" or self._calls[divisor]["shape"]:
            return False
        counts = [loss["calls"][each["in"][1]]["rows"] for loss, each in zip(self._parts, theirs, strict=True)]
        return not all(self._are_close(counts[0], each) for each in counts)

    def _judge_call(self, index: int, call: Call, theirs: Sequence[Call]) -> str:
        """Return how a call's result on the whole batch relates to its results on the parts of the batch.

        The relations "same", "mean", "sum", "weighted", "rows" and "constructed" are expected. The relation is
        "unknown" if the results cannot be compared. All other relations are faults.

        Args:
            index: Index of the call on the whole batch.
            call: Call on the whole batch.
            theirs: Corresponding call on each part of the batch.
        """
        inputs = [self._states.get(each, "unknown") for each in call["in"] if each < index]
        is_draw = call["func"] in RANDOM_CALLS
        if call["func"] in _CONSTRUCTED or (inputs and not is_draw and all(each == "constructed" for each in inputs)):
            return "constructed"
        if call.get("own") and "rows" not in call:
            return "same"
        if "rows" not in call or any("rows" not in each for each in theirs):
            return "unknown"
        state = self._compare_call(call, theirs)
        if state in ("differs", "other") and "unknown" in inputs:
            return "unknown"
        return state

    def _compare_call(self, call: Call, theirs: Sequence[Call]) -> str:
        ours, shapes = call["shape"], [each["shape"] for each in theirs]
        if all(shape == ours for shape in shapes):
            return self._compare_equal_shapes(call, theirs)
        if not ours or not all(shape and len(shape) == len(ours) for shape in shapes):
            return "unknown"
        num = sum(shape[0] for shape in shapes)
        if num == ours[0] and all(shape[1:] == ours[1:] for shape in shapes):
            return "rows" if self._has_rows(call, theirs) else "differs"
        if num == ours[0] and len(ours) == 2 and all(s[1] * ours[0] == ours[1] * s[0] for s in shapes):
            return "mixes"  # a square result: each row is combined with the other rows of its part
        if sum(_count_elements(shape) for shape in shapes) == _count_elements(ours):
            return "rows" if self._is_close(_sum_rows(call), _add_totals(theirs)) else "differs"
        return "unknown"

    def _compare_equal_shapes(self, call: Call, theirs: Sequence[Call]) -> str:
        rows = [each["rows"] for each in theirs]
        ours = call["rows"]
        if all(self._are_close(ours, each) for each in rows):
            return "same"
        mean = _combine_parts(rows, [1 / len(rows)] * len(rows))
        if self._are_close(ours, mean):
            return "mean"
        if self._are_close(ours, _combine_parts(rows, [1.0] * len(rows))):
            return "sum"
        shares = self._share_weights()
        if shares and self._are_close(ours, _combine_parts(rows, shares)):
            return "weighted"
        return "other"

    def _share_weights(self) -> list[float]:
        """Return the parts' loss weights as fractions of their sum; an empty list if the script passed no weights."""
        weights: list[float] = self._weights or []
        total: float = sum(weights)
        return [each / total for each in weights] if total else []

    def _has_rows(self, call: Call, theirs: Sequence[Call]) -> bool:
        """Whether the rows of the parts, concatenated, are equal to the rows of the whole batch up to rounding.

        If the rows were not recorded one by one, only their totals are compared.
        """
        joined = [row for each in theirs for row in each["rows"]]
        if len(joined) == len(call["rows"]) == call["shape"][0]:
            return self._are_close(call["rows"], joined)
        return self._is_close(_sum_rows(call), _add_totals(theirs))

    def _are_close(self, ours: Any, theirs: Any) -> bool:
        return all(self._is_close(one, other) for one, other in zip(ours, theirs, strict=True))

    def _is_close(self, ours: Sequence[float], theirs: Sequence[float]) -> bool:
        """Whether the recorded sums of two rows are equal up to rounding.

        The tolerance is relative to the sum of absolute values.

        Args:
            ours: Sums of one row: of its values, of their absolute values, and of the values weighted by position.
            theirs: Sums of the other row.
        """
        size = max(abs(ours[1]), abs(theirs[1]), 1e-12)
        return all(abs(one - other) <= self._loose * size for one, other in zip(ours, theirs, strict=True))

    # ---------------------------------------------------------------- causes

    def _find_other_path(self, call: Call, theirs: Sequence[Call]) -> Blame | None:
        """Return a `Blame` if an input of a call comes from another function or line on a part than on the whole batch.

        Return None otherwise.

        Args:
            call: Call on the whole batch.
            theirs: Corresponding call on each part of the batch.
        """
        for loss, there in zip(self._parts, theirs, strict=True):
            for ours, other in zip(call["in"], there["in"], strict=False):
                if ours < 0 or other < 0:
                    continue
                one, two = self._calls[ours], loss["calls"][other]
                if _make_call_key(one) != _make_call_key(two) and "input" not in (one["func"], two["func"]):
                    return Blame("path", two["line"], two["func"])
        return None

    def _describe_blame(self, state: str, index: int, call: Call, theirs: Sequence[Call]) -> Blame:
        func, line = call["func"], call["line"]
        other_path = self._find_other_path(call, theirs)
        if other_path is not None:
            return other_path
        is_loss = any(each in func for each in _LOSSES)
        number = _find_number(call, theirs)
        if func == "input":
            kind = "buffer" if call.get("own") else "tensor"
            return Blame(kind, line, func, call.get("own") or call.get("name", ""))
        if is_loss and (index == self._whole["loss"] or number is None):
            return self._judge_reduction(call, line)
        if number is not None and func in _SCALINGS:
            return Blame("number", line, func, *number)
        return self._describe_operation(state, index, call)

    def _describe_operation(self, state: str, index: int, call: Call) -> Blame:
        """Return the `Blame` for a faulty call that neither computes a loss nor multiplies by a number."""
        func, line = call["func"], call["line"]
        is_draw = func in RANDOM_CALLS or "dropout" in func
        kinds = {"norm": func in _NORMS, "draw": is_draw, "selects": func in _SELECTIONS}
        kinds["mixes"] = state == "mixes" or func in _PRODUCTS
        kinds["count"] = state == "other" and func in _DIVISIONS
        kind = next((each for each, applies in kinds.items() if applies), "")
        if kind:
            return Blame(kind, line, func, call.get("part", "") if kind == "norm" else "")
        for each in call["in"]:  # look for an input that is a statistic over all rows of a part
            source = self._calls[each] if 0 <= each < index else None
            if source is not None and self._states.get(each) in ("mean", "sum", "other"):
                return Blame("statistic", source["line"], source["func"])
        return Blame("statistic" if state == "other" else "mixes", line, func)

    def _judge_reduction(self, call: Call, line: str) -> Blame:
        """Return the `Blame` for a loss function whose value is not a mean over rows."""
        func = call["func"]
        if call.get("words", {}).get("reduction") == "sum":
            return Blame("sum", line, func)
        if call.get("weighted"):
            return Blame("classes", line, func)
        if call.get("ignores"):
            return Blame("tokens", line, func)
        return Blame("count", line, func)

    def _judge_loss(self) -> Blame | None:
        """Return a `Blame` if the loss is not the mean of the losses of the parts, else None.

        The mean is weighted if the script passed loss weights. Return None also if the script passed
        `reduction="sum"`, or if there is only one part.
        """
        ours, theirs = self._whole["value"], [each["value"] for each in self._parts]
        if self._whole["reduction"] == "sum" or len(theirs) < 2:
            return None
        loss = self._calls[self._whole["loss"]] if self._whole["loss"] >= 0 else {}
        line = loss.get("line") or self._whole["line"]
        scale = max(abs(ours), 1e-12)
        if self._weights is None and abs(sum(theirs) - ours) < self._loose * scale:
            reducer = self._find_reducer()
            return Blame("sum", reducer.get("line", line), reducer.get("func", "backward"))
        mean = sum(theirs) / len(theirs)
        shares = self._share_weights()
        if shares:
            mean = sum(share * each for share, each in zip(shares, theirs, strict=True))
        if abs(mean - ours) > 2 * self._loose * scale:
            reducer = self._find_reducer()
            if reducer:
                return self._judge_reduction(reducer, reducer["line"])
            return Blame("count", line, loss.get("func", "backward"))
        return None

    def _find_reducer(self) -> Call:
        """Return the last torch call behind the loss that reduces a tensor to a scalar.

        Return an empty dict if there is no such call.
        """
        needed = find_needed(self._calls, self._whole["loss"])
        for index in reversed(range(len(self._calls))):
            call = self._calls[index]
            has_rows = any(0 <= each < index and self._calls[each].get("shape") for each in call["in"])
            if index in needed and call["func"] != "input" and not call.get("shape") and has_rows:
                return call
        return {}


def _find_number(call: Call, theirs: Sequence[Call]) -> tuple[str, tuple[str, ...]] | None:
    """Return the name and both values of a number argument that differs between a whole batch and a part, or None.

    Args:
        call: Call on the whole batch.
        theirs: Corresponding call on each part of the batch.
    """
    ours = call.get("numbers", [])
    for each in theirs:
        for index, (one, other) in enumerate(zip(ours, each.get("numbers", []), strict=False)):
            if one != other:
                names = call.get("names") or each.get("names") or [""] * len(ours)
                return (names[index] if index < len(names) else ""), (f"{one:.6g}", f"{other:.6g}")
    return None


def find_needed(calls: Sequence[Call], loss: int) -> set[int]:
    """Return the indices of the calls on which a loss depends.

    Args:
        calls: Recorded calls.
        loss: Index of the call that returned the loss. If it is unknown, pass -1: all indices are then returned.
    """
    if loss < 0:
        return set(range(len(calls)))
    needed, waiting = set(), [loss]
    while waiting:
        index = waiting.pop()
        if index not in needed and 0 <= index < len(calls):
            needed.add(index)
            waiting += calls[index]["in"]
    return needed


def _align_calls(calls: Sequence[Call], others: Sequence[Sequence[Call]]) -> list[tuple[int, list[Call] | None]]:
    """Return, for each call of one record, a pair of its index and its corresponding calls in other records.

    Corresponding calls have the same script line and function. The second item of a pair is None if any other record
    has no corresponding call.

    Args:
        calls: Calls of the record.
        others: Calls of each other record, which belongs to another run or to a part of the batch.
    """
    keys = [_make_call_key(each) for each in calls]
    places: list[dict[int, int]] = []
    for other in others:
        there = [_make_call_key(each) for each in other]
        if there == keys:
            places.append({index: index for index in range(len(keys))})
            continue
        blocks = SequenceMatcher(None, keys, there, autojunk=False).get_matching_blocks()
        places.append({block.a + k: block.b + k for block in blocks for k in range(block.size)})
    found: list[tuple[int, list[Call] | None]] = []
    for index in range(len(keys)):
        matched = all(index in each for each in places)
        found.append(
            (index, [other[each[index]] for other, each in zip(others, places, strict=True)] if matched else None)
        )
    return found


def _make_call_key(call: Call) -> tuple[str, str, str]:
    about = f"{call.get('own', '')} {call['shape'][1:]}" if call["func"] == "input" else ""
    return call["line"], call["func"], about


def _combine_parts(rows: Sequence[Any], factors: Sequence[float]) -> list[list[float]]:
    """Return the weighted sum of all parts' recorded sums, separately for each row.

    Args:
        rows: For each part, the three recorded sums of each row (see `CallTrace`).
        factors: Weight of each part.
    """
    return [
        [sum(f * part[index][k] for f, part in zip(factors, rows, strict=True)) for k in range(3)]
        for index in range(len(rows[0]))
    ]


def _sum_rows(call: Call) -> list[float]:
    return [sum(row[k] for row in call["rows"]) for k in range(2)]


def _add_totals(calls: Sequence[Call]) -> list[float]:
    totals = [_sum_rows(each) for each in calls]
    return [sum(each[k] for each in totals) for k in range(2)]


def _count_elements(shape: Sequence[int]) -> int:
    product = 1
    for each in shape:
        product *= each
    return product


# -------------------------------------------------------------------- equal runs


def blame_repeat(ours: Losses, theirs: Losses) -> Blame | None:
    """Return the first torch call whose result differs between two runs that should be equal bit by bit, or None.

    Args:
        ours: Losses of an update in one run.
        theirs: Losses of this update in the other run.
    """
    for one, other in zip(ours, theirs, strict=False):
        needed = find_needed(one["calls"], one["loss"])
        for index, found in _align_calls(one["calls"], [other["calls"]]):
            call = one["calls"][index]
            if index not in needed:
                continue
            if found is None:
                if call["func"] == "input":
                    continue
                return Blame("path", call["line"], call["func"])
            there = found[0]
            number = _find_number(call, [there])
            if number is not None and not _is_size(call, there):
                return Blame("number", call["line"], call["func"], *number)
            if call.get("shape") == there.get("shape") and call.get("rows") == there.get("rows"):
                continue
            other_path = _find_step(one["calls"], call, other["calls"], there)
            if other_path is not None:
                return other_path
            sizes = (str(call.get("shape")), str(there.get("shape")))
            shapes = sizes if sizes[0] != sizes[1] else ()
            if call["func"] == "input":
                kind = "own" if call.get("own") else "tensor"
                return Blame(kind, call["line"], "input", call.get("own") or call.get("name", ""), shapes)
            if call["func"] in RANDOM_CALLS:
                return Blame("draw", call["line"], call["func"])
            return Blame("call", call["line"], call["func"], "", shapes)
    return None


def _find_step(ours: Sequence[Call], call: Call, theirs: Sequence[Call], there: Call) -> Blame | None:
    """Return a `Blame` if one of two runs computes an input of a call, and the other run uses an existing tensor.

    Return None otherwise.

    Args:
        ours: Recorded calls of one run.
        call: Call of this run.
        theirs: Recorded calls of the other run.
        there: Corresponding call of the other run.
    """
    for mine, yours in zip(call["in"], there["in"], strict=False):
        if mine < 0 or yours < 0:
            continue
        one, two = ours[mine], theirs[yours]
        if (one["func"] == "input") != (two["func"] == "input"):
            made = two if one["func"] == "input" else one
            return Blame("path", made["line"], made["func"])
    return None


def _is_size(call: Call, there: Call) -> bool:
    """Whether the results of two calls differ in shape. If so, a number argument that differs is probably a size."""
    return bool(call.get("shape") != there.get("shape"))
