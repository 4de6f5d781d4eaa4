"""`Blame`: the first torch call whose result differs between two runs. Helpers that compare records of torch calls.

`CallTrace` has recorded the calls. This module imports no torch. `part_blame.py` compares runs on several processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from headway.verify.random_calls import RANDOM_CALLS
from headway.verify.record_types import CallEntry, LossEntry


@dataclass(frozen=True)
class Blame:
    """First torch call whose result differs between two runs, and what it reveals about the cause.

    Attributes:
        kind: Kind of the cause, such as "sum" (the loss is a sum over rows) or "path" (only one run makes the call).
            `causes.py` has a text for each kind.
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


def blame_repeat(ours: Sequence[LossEntry], theirs: Sequence[LossEntry]) -> Blame | None:
    """Return the first torch call whose result differs between two runs that should be equal bit by bit, or None.

    Args:
        ours: Losses of an update in one run.
        theirs: Losses of this update in the other run.
    """
    for our_loss, their_loss in zip(ours, theirs, strict=False):
        needed = find_needed_calls(our_loss.calls, our_loss.loss_call)
        for index, matches in align_calls(our_loss.calls, [their_loss.calls]):
            if index in needed:
                call = our_loss.calls[index]
                blame = _compare_calls(our_loss, call, their_loss, None if matches is None else matches[0])
                if blame is not None:
                    return blame
    return None


def _compare_calls(ours: LossEntry, call: CallEntry, theirs: LossEntry, match: CallEntry | None) -> Blame | None:
    """Return a `Blame` if a call's result differs between two runs that should be equal bit by bit, or None.

    Args:
        ours: Loss in one run.
        call: Call of this run.
        theirs: Loss in the other run.
        match: Corresponding call of the other run, or None if that run does not make the call.
    """
    if match is None:
        # A missing input is only a consequence of another call that the other run does not make.
        return None if call.is_input else Blame("path", call.line, call.func)
    has_equal_shape = call.shape == match.shape
    different = find_different_number(call, [match])
    # If the shapes of the results differ, a number that differs is probably a size.
    if different is not None and has_equal_shape:
        return Blame("number", call.line, call.func, *different)
    if has_equal_shape and call.row_sums == match.row_sums:
        return None
    path = _find_other_path(ours.calls, call, theirs.calls, match)
    if path is not None:
        return path
    shapes = () if has_equal_shape else (str(call.shape), str(match.shape))
    if call.is_input:
        kind = "model_tensor" if call.model_tensor else "tensor"
        return Blame(kind, call.line, "input", call.model_tensor or call.variable, shapes)
    if call.func in RANDOM_CALLS:
        return Blame("draw", call.line, call.func)
    return Blame("call", call.line, call.func, "", shapes)


def _find_other_path(
    ours: Sequence[CallEntry], call: CallEntry, theirs: Sequence[CallEntry], match: CallEntry
) -> Blame | None:
    """Return a `Blame` if one of two runs computes an input of a call, and the other run uses an existing tensor.

    Return None otherwise.

    Args:
        ours: Recorded calls of one run.
        call: Call of this run.
        theirs: Recorded calls of the other run.
        match: Corresponding call of the other run.
    """
    for our_index, their_index in zip(call.inputs, match.inputs, strict=False):
        our_source, their_source = ours[our_index], theirs[their_index]
        if our_source.is_input != their_source.is_input:
            computed = their_source if our_source.is_input else our_source
            return Blame("path", computed.line, computed.func)
    return None


# -------------------------------------------------------------------- helpers


def find_different_number(call: CallEntry, matches: Sequence[CallEntry]) -> tuple[str, tuple[str, ...]] | None:
    """Return the name and both values of a number argument that differs between corresponding calls, or None.

    Args:
        call: Call of one run.
        matches: Corresponding calls of other runs.
    """
    for match in matches:
        for index, (ours, theirs) in enumerate(zip(call.numbers, match.numbers, strict=False)):
            if ours != theirs:
                names = call.number_names or match.number_names
                return (names[index] if index < len(names) else ""), (f"{ours:.6g}", f"{theirs:.6g}")
    return None


def find_needed_calls(calls: Sequence[CallEntry], last_call: int) -> set[int]:
    """Return the indices of the calls on which the result of one call depends, including the call itself.

    Args:
        calls: Recorded calls.
        last_call: Index of the call. If it is unknown, pass -1: all indices are then returned.
    """
    if last_call < 0:
        return set(range(len(calls)))
    needed, waiting = set(), [last_call]
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            waiting += calls[index].inputs
    return needed


def align_calls(
    calls: Sequence[CallEntry], other_calls: Sequence[Sequence[CallEntry]]
) -> list[tuple[int, list[CallEntry] | None]]:
    """Return, for each call of one record, a pair of its index and its corresponding calls in other records.

    Corresponding calls have the same script line and function. The second item of a pair is None if any other record
    has no corresponding call.

    Args:
        calls: Calls of the record.
        other_calls: Calls of each other record, which belongs to another run or to a part of the batch.
    """
    keys = [make_call_key(each) for each in calls]
    positions_by_record: list[dict[int, int]] = []  # index in `calls` -> index in the other record
    for others in other_calls:
        other_keys = [make_call_key(each) for each in others]
        if other_keys == keys:  # the usual case, for which no search is needed
            positions_by_record.append({index: index for index in range(len(keys))})
            continue
        blocks = SequenceMatcher(None, keys, other_keys, autojunk=False).get_matching_blocks()
        positions_by_record.append({block.a + k: block.b + k for block in blocks for k in range(block.size)})
    pairs: list[tuple[int, list[CallEntry] | None]] = []
    for index in range(len(keys)):
        if all(index in positions for positions in positions_by_record):
            records = zip(other_calls, positions_by_record, strict=True)
            pairs.append((index, [others[positions[index]] for others, positions in records]))
        else:
            pairs.append((index, None))
    return pairs


def make_call_key(call: CallEntry) -> tuple[str, str, str]:
    """Return the script line and the function of a call. For an input, also its name and its shape without rows."""
    detail = f"{call.model_tensor} {call.shape[1:]}" if call.is_input else ""
    return call.line, call.func, detail
