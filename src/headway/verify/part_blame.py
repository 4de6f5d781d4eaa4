"""Find the torch call that makes the loss of a batch depend on how the batch is divided. Imports no torch.

The loss of a batch in one process is compared with the losses of the batch's parts. A part is the rows of one rank, or
one micro-batch. If a torch call's result has one row per sample, it must consist of the rows of all parts. A result
without such rows must be equal on all parts, or it must be the mean or the sum of the parts' results.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

from headway.verify.blame import Blame, align_calls, find_different_number, find_needed_calls, make_call_key
from headway.verify.random_calls import RANDOM_CALLS
from headway.verify.record_types import CallEntry, LossEntry

_TOLERANCE = 2e-3
"""Largest difference between two sums that count as equal, relative to the sum of absolute values."""
_CONSTRUCTED = frozenset(
    ("arange", "zeros", "ones", "full", "eye", "tensor", "linspace", "empty", "zeros_like", "ones_like", "full_like")
    + ("new_zeros", "new_ones", "new_full", "new_tensor", "as_tensor", "triu", "tril", "new_empty", "empty_like")
)
"""Names of torch functions whose results do not depend on data. The sizes of these results can differ between ranks."""
_SELECTIONS = frozenset(("topk", "sort", "argsort", "kthvalue", "median", "quantile", "argmax", "argmin", "max", "min"))
"""Names of torch functions that select among rows."""
_PRODUCTS = frozenset(("matmul", "mm", "bmm", "einsum", "cdist", "__matmul__", "__rmatmul__", "addmm", "linear"))
"""Names of torch functions that can combine each row with all others."""
_NORMS = frozenset(("batch_norm", "_native_batch_norm_legit", "native_batch_norm"))
_DIVISIONS = frozenset(("div", "__truediv__", "true_divide", "__rtruediv__", "div_"))
_SCALINGS = _DIVISIONS | frozenset(
    ("mul", "multiply", "mul_", "__mul__", "__rmul__", "add", "sub", "__add__", "__sub__", "__radd__", "__rsub__")
    + ("rsub", "pow", "__pow__", "lerp", "clamp", "add_", "sub_", "lerp_", "where", "full", "masked_fill")
)
"""Names of torch functions in which a number that differs between ranks is a cause of its own."""
_LOSSES = ("loss", "entropy", "kl_div")
"""Parts of the names of loss functions."""

Relation = Literal[
    "constructed", "same", "rows", "mean", "sum", "weighted", "unknown", "mixed", "other value", "other rows"
]
"""Relation between a call's result on a whole batch and its results on the batch's parts.

- "constructed": The result does not depend on data.
- "same": The result is equal on all parts.
- "rows": The whole result consists of the rows of the parts.
- "mean", "sum": The whole result is the mean or the sum of the parts' results.
- "weighted": It is their mean, weighted by the loss weights that the script passed.
- "unknown": The results cannot be compared.
- "mixed": The result is a matrix with a size that grows with the number of rows in both dimensions, such as
    similarities. Each row of a part was combined with the part's other rows.
- "other value": The shapes are equal, but the whole result is none of the above.
- "other rows": The whole result does not consist of the rows of the parts.
"""
_EXPECTED = frozenset(("constructed", "same", "rows", "mean", "sum", "weighted", "unknown"))
"""Relations that are no fault."""


def blame_parts(
    whole: Sequence[LossEntry], parts: Sequence[Sequence[LossEntry]], *, tolerance: float = _TOLERANCE
) -> Blame | None:
    """Return the first torch call whose result on a whole batch does not match its results on the batch's parts.

    Return None if the results of all torch calls in the update match, or if the calls of a part were not recorded.

    Args:
        whole: Losses of the update in the single-process run, which computes the whole batch.
        parts: Losses of the update for each part of the batch: each rank, or each micro-batch.
        tolerance: Largest relative difference that is attributed to rounding. Default: 0.002.
    """
    if not whole or not parts or not all(parts):
        return None
    comparisons: list[_PartComparison] = []
    for index, whole_loss in enumerate(whole):
        part_losses = [losses[index] for losses in parts if index < len(losses)]
        if len(part_losses) < len(parts):
            return Blame("path", whole_loss.line, "backward")
        comparison = _PartComparison(whole_loss, part_losses, tolerance)
        blame = comparison.compare_calls()
        if blame is not None:
            return blame
        comparisons.append(comparison)
    # Uneven means are weaker evidence, so they are searched for only after the calls of all losses match.
    for comparison in comparisons:
        blame = comparison.find_uneven_mean()
        if blame is not None:
            return blame
    return None


class _PartComparison:
    """Comparison of the torch calls behind a batch's loss with the torch calls behind the losses of the batch's parts.

    A part is the rows of one rank, or one micro-batch.

    Args:
        whole: Loss of the whole batch.
        parts: Loss of each part.
        tolerance: Largest relative difference that is attributed to rounding.
    """

    def __init__(self, whole: LossEntry, parts: Sequence[LossEntry], tolerance: float) -> None:
        self._whole = whole
        self._parts = parts
        self._tolerance = tolerance
        self._calls = whole.calls
        self._pairs = align_calls(self._calls, [each.calls for each in parts])
        self._needed = find_needed_calls(self._calls, whole.loss_call)
        self._relations: dict[int, Relation] = {}
        """Relation of each examined call, by its index on the whole batch."""
        weights = [each.weight for each in parts if each.weight is not None]
        self._weights = weights if len(weights) == len(parts) else None

    def compare_calls(self) -> Blame | None:
        """Return a `Blame` for the first call behind the loss whose result on the whole batch does not match the parts.

        If the results of all calls match, compare the values of the losses. Return None if these match, too.
        """
        for index, matches in self._pairs:
            call = self._calls[index]
            if matches is None:
                self._relations[index] = "unknown"
                if index in self._needed and not call.is_input:
                    return Blame("path", call.line, call.func)
                continue
            relation = self._relations[index] = self._find_relation(index, call, matches)
            if index in self._needed and relation not in _EXPECTED:
                return self._explain_call(relation, index, call, matches)
        return self._compare_losses()

    def find_uneven_mean(self) -> Blame | None:
        """Return a `Blame` for a mean over a number of elements that differs between the parts, or None.

        Return None also if the script passed loss weights or `reduction="sum"`.

        Call it after `compare_calls`, which relates the calls of the whole batch to those of the parts.

        With random weights, as in the first update, all elements have about the same loss. Means over different numbers
        of elements then agree as closely as rounding allows, although their gradients differ. So `compare_calls` cannot
        find such a mean. This method compares the numbers of elements instead of the means.
        """
        if self._weights is not None or self._whole.reduction == "sum":
            return None
        for index, matches in self._pairs:
            call = self._calls[index]
            if matches is None or index not in self._needed or self._relations.get(index) not in ("mean", "same"):
                continue
            if len({each.num_labels for each in matches}) > 1 and not call.shape:
                return _explain_reduction(call, call.line)
            if call.func in _DIVISIONS and self._has_uneven_divisor(call, matches):
                return Blame("count", call.line, call.func)
        return None

    def _has_uneven_divisor(self, call: CallEntry, matches: Sequence[CallEntry]) -> bool:
        """Whether a division divides by a count over the rows, such as a number of tokens, that differs between the parts.

        Args:
            call: Division on the whole batch.
            matches: Corresponding division on each part of the batch.
        """
        if any(len(each.inputs) != 2 for each in (call, *matches)):
            return False
        _, divisor_index = call.inputs
        if self._relations.get(divisor_index) != "sum" or self._calls[divisor_index].shape:
            return False
        counts = []
        for loss, match in zip(self._parts, matches, strict=True):
            _, part_divisor_index = match.inputs
            counts.append(loss.calls[part_divisor_index].row_sums)
        return not all(self._are_rows_close(counts[0], each) for each in counts)

    # ---------------------------------------------------------------- relations

    def _find_relation(self, index: int, call: CallEntry, matches: Sequence[CallEntry]) -> Relation:
        """Return how a call's result on the whole batch relates to its results on the parts of the batch.

        Args:
            index: Index of the call on the whole batch.
            call: Call on the whole batch.
            matches: Corresponding call on each part of the batch.
        """
        inputs = [self._relations[each] for each in call.inputs]
        is_constructed = bool(inputs) and all(each == "constructed" for each in inputs)
        if call.func in _CONSTRUCTED or (is_constructed and call.func not in RANDOM_CALLS):
            return "constructed"
        if call.model_tensor and not call.row_sums:
            return "same"  # a parameter, whose values `compare.py` compares
        if not all(each.row_sums for each in (call, *matches)) or not _have_comparable_sums([call, *matches]):
            return "unknown"
        relation = self._compare_results(call, matches)
        if relation in ("other value", "other rows") and "unknown" in inputs:
            return "unknown"  # the difference can come from an input that could not be compared
        return relation

    def _compare_results(self, call: CallEntry, matches: Sequence[CallEntry]) -> Relation:
        """Return how a call's recorded result on the whole batch relates to its recorded results on the parts."""
        whole_shape, shapes = call.shape, [each.shape for each in matches]
        if all(shape == whole_shape for shape in shapes):
            return self._compare_equal_shapes(call, matches)
        if not whole_shape or not all(shape and len(shape) == len(whole_shape) for shape in shapes):
            return "unknown"
        if sum(shape[0] for shape in shapes) == whole_shape[0]:
            if all(shape[1:] == whole_shape[1:] for shape in shapes):
                return "rows" if self._has_rows_of_parts(call, matches) else "other rows"
            # Matrices whose two sizes shrink alike: (8, 8) on the whole batch, and (4, 4) on each of two parts.
            if len(whole_shape) == 2 and all(
                num_columns * whole_shape[0] == whole_shape[1] * num_rows for num_rows, num_columns in shapes
            ):
                return "mixed"
        # The rows can be in another dimension than the first one. Then only the sums over all elements are compared.
        if sum(map(prod, shapes)) == prod(whole_shape):
            return "rows" if self._are_sums_close(_sum_rows([call]), _sum_rows(matches)) else "other rows"
        return "unknown"

    def _compare_equal_shapes(self, call: CallEntry, matches: Sequence[CallEntry]) -> Relation:
        """Return the relation of results that have equal shapes on the whole batch and on all parts."""
        whole, parts = call.row_sums, [each.row_sums for each in matches]
        if any(len(each) != len(whole) for each in parts):
            # The rows of large tensors are summed in as many groups as the batch has rows. Only their totals are comparable.
            whole, parts = [_sum_rows([call])], [[_sum_rows([each])] for each in matches]
        if all(self._are_rows_close(whole, each) for each in parts):
            return "same"
        if self._are_rows_close(whole, _combine_parts(parts, [1 / len(parts)] * len(parts))):
            return "mean"
        if self._are_rows_close(whole, _combine_parts(parts, [1.0] * len(parts))):
            return "sum"
        shares = self._compute_weight_shares()
        if shares and self._are_rows_close(whole, _combine_parts(parts, shares)):
            return "weighted"
        return "other value"

    def _compute_weight_shares(self) -> list[float]:
        """Return the parts' loss weights as fractions of their sum; an empty list if the script passed no weights."""
        weights = self._weights or []
        total = sum(weights)
        return [each / total for each in weights] if total else []

    def _has_rows_of_parts(self, call: CallEntry, matches: Sequence[CallEntry]) -> bool:
        """Whether the rows of the parts, concatenated, are equal to the rows of the whole batch up to rounding.

        If the rows were not recorded one by one, only their totals are compared.
        """
        rows = [row for each in matches for row in each.row_sums]
        if len(rows) == len(call.row_sums) == call.shape[0]:
            return self._are_rows_close(call.row_sums, rows)
        return self._are_sums_close(_sum_rows([call]), _sum_rows(matches))

    def _are_rows_close(self, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> bool:
        """Whether the recorded sums of all rows are equal up to rounding."""
        return all(self._are_sums_close(our_row, their_row) for our_row, their_row in zip(ours, theirs, strict=True))

    def _are_sums_close(self, ours: Sequence[float], theirs: Sequence[float]) -> bool:
        """Whether the recorded sums of two rows are equal up to rounding.

        The tolerance is relative to the sum of absolute values.

        Args:
            ours: Sums of one row: of its values, of their absolute values, and optionally of the values weighted by
                position.
            theirs: Sums of the other row.
        """
        size = max(abs(ours[1]), abs(theirs[1]), 1e-12)
        return all(abs(one - other) <= self._tolerance * size for one, other in zip(ours, theirs, strict=True))

    # ---------------------------------------------------------------- causes

    def _explain_call(self, relation: Relation, index: int, call: CallEntry, matches: Sequence[CallEntry]) -> Blame:
        """Return the `Blame` for a call whose results do not match.

        Args:
            relation: Relation between the results.
            index: Index of the call on the whole batch.
            call: Call on the whole batch.
            matches: Corresponding call on each part of the batch.
        """
        func, line = call.func, call.line
        path = self._find_other_path(call, matches)
        if path is not None:
            return path
        if func == "input":
            kind = "buffer" if call.model_tensor else "tensor"
            return Blame(kind, line, func, call.model_tensor or call.variable)
        different = find_different_number(call, matches)
        is_loss = any(each in func for each in _LOSSES)
        if is_loss and (index == self._whole.loss_call or different is None):
            return _explain_reduction(call, line)
        if different is not None and func in _SCALINGS:
            return Blame("number", line, func, *different)
        return self._explain_operation(relation, index, call)

    def _find_other_path(self, call: CallEntry, matches: Sequence[CallEntry]) -> Blame | None:
        """Return a `Blame` if an input of a call comes from another function or line on a part than on the whole batch.

        Return None otherwise.

        Args:
            call: Call on the whole batch.
            matches: Corresponding call on each part of the batch.
        """
        for loss, match in zip(self._parts, matches, strict=True):
            for whole_index, part_index in zip(call.inputs, match.inputs, strict=False):
                source, part_source = self._calls[whole_index], loss.calls[part_index]
                is_input = source.is_input or part_source.is_input
                if make_call_key(source) != make_call_key(part_source) and not is_input:
                    return Blame("path", part_source.line, part_source.func)
        return None

    def _explain_operation(self, relation: Relation, index: int, call: CallEntry) -> Blame:
        """Return the `Blame` for a faulty call that neither computes a loss nor multiplies by a number.

        Args:
            relation: Relation between the results.
            index: Index of the call on the whole batch.
            call: Call on the whole batch.
        """
        func, line = call.func, call.line
        if func in _NORMS:
            return Blame("norm", line, func, call.module_name)
        if func in RANDOM_CALLS or "dropout" in func:
            return Blame("draw", line, func)
        if func in _SELECTIONS:
            return Blame("selects", line, func)
        if relation == "mixed" or func in _PRODUCTS:
            return Blame("mixes", line, func)
        if relation == "other value" and func in _DIVISIONS:
            return Blame("count", line, func)
        for each in call.inputs:  # look for an input that is a statistic over all rows of a part
            if self._relations[each] in ("mean", "sum", "other value"):
                return Blame("statistic", self._calls[each].line, self._calls[each].func)
        return Blame("statistic" if relation == "other value" else "mixes", line, func)

    def _compare_losses(self) -> Blame | None:
        """Return a `Blame` if the loss is not the mean of the losses of the parts, else None.

        The mean is weighted if the script passed loss weights. Return None also if the script passed
        `reduction="sum"`, or if there is only one part.
        """
        whole, parts = self._whole.value, [each.value for each in self._parts]
        if self._whole.reduction == "sum" or len(parts) < 2:
            return None
        loss_call = self._calls[self._whole.loss_call] if self._whole.loss_call >= 0 else None
        line, func = (self._whole.line, "backward") if loss_call is None else (loss_call.line, loss_call.func)
        limit = self._tolerance * max(abs(whole), 1e-12)
        if self._weights is None and abs(sum(parts) - whole) < limit:
            reduction = self._find_reduction()
            return Blame("sum", line, "backward") if reduction is None else Blame("sum", reduction.line, reduction.func)
        shares = self._compute_weight_shares() or [1 / len(parts)] * len(parts)
        mean = sum(share * each for share, each in zip(shares, parts, strict=True))
        if abs(mean - whole) > 2 * limit:
            reduction = self._find_reduction()
            if reduction is not None:
                return _explain_reduction(reduction, reduction.line)
            return Blame("count", line, func)
        return None

    def _find_reduction(self) -> CallEntry | None:
        """Return the last torch call behind the loss that reduces a tensor to a scalar, or None."""
        for index in reversed(range(len(self._calls))):
            call = self._calls[index]
            if index not in self._needed or call.is_input or call.shape:
                continue
            if any(self._calls[each].shape for each in call.inputs):
                return call
        return None


def _explain_reduction(call: CallEntry, line: str) -> Blame:
    """Return the `Blame` for a call that computes a loss which is not a mean over rows.

    Args:
        call: Call that computes the loss or reduces it to a scalar.
        line: Line of the script to report.
    """
    if call.strings.get("reduction") == "sum":
        return Blame("sum", line, call.func)
    if call.has_class_weights:
        return Blame("classes", line, call.func)
    if call.ignores_labels:
        return Blame("tokens", line, call.func)
    return Blame("count", line, call.func)


def _combine_parts(parts: Sequence[Sequence[Sequence[float]]], factors: Sequence[float]) -> list[list[float]]:
    """Return the weighted sum of all parts' recorded sums, separately for each row.

    Args:
        parts: For each part, the recorded sums of each row (`CallEntry.row_sums`).
        factors: Weight of each part.
    """
    combined: list[list[float]] = []
    for row_of_parts in zip(*parts, strict=False):  # the sums of one row, for each part
        weighted = [[factor * each for each in sums] for factor, sums in zip(factors, row_of_parts, strict=True)]
        combined.append([sum(terms) for terms in zip(*weighted, strict=True)])
    return combined


def _have_comparable_sums(calls: Sequence[CallEntry]) -> bool:
    """Whether the recorded sums of several results contain the same values of each row.

    Rows of different lengths are sampled at different positions.
    """
    if not any(each.is_sampled for each in calls):
        return True
    return len({prod(each.shape) // len(each.row_sums) for each in calls}) == 1


def _sum_rows(calls: Sequence[CallEntry]) -> list[float]:
    """Return the sum of all values, and the sum of their absolute values, over all rows of all calls' results."""
    return [sum(row[k] for call in calls for row in call.row_sums) for k in range(2)]
