"""Proofs about the single-process run: its memory does not grow, and its updates do not wait long for data."""

from itertools import pairwise
from typing import Any

from headway.common.text import format_bytes
from headway.verify.proofs.forecast_memory import compare_with_forecast
from headway.verify.records import RunRecord
from headway.verify.verdict import RunSet, Verdict

_MOST_WAITING = 0.33
"""Largest share of an update's time that may be spent on waiting for data."""
_LEAST_SECONDS = 0.02
"""Time in seconds that each update may always wait for data."""
_MOST_BUSY = 0.5
"""Largest fraction of an update's CPU time that the main process may spend on fetching batches."""
_LEAST_BUSY = 0.008
"""CPU time in seconds that the main process may always spend on fetching the batches of an update."""
_LEAST_GROWTH = 1_000_000
"""Smallest growth of memory that is reported, in bytes per update."""
_LEAST_GRAPH = 100_000
"""Smallest size of autograd graphs kept alive that is reported, in bytes per update."""
_LEAST_KEPT = 3
"""Smallest number of earlier updates with tensors still alive for which the script line that made them is reported."""

Kept = dict[str, Any]
"""Record of a script line whose tensors stay alive: "line", "updates", and the tensors' "bytes" and "graph" bytes."""


def check_memory(runs: RunSet) -> Verdict:
    """Return the verdict on the memory of the single-process run.

    The memory must not grow with each update, and its peak must match the forecast.
    """
    first = runs.first
    sizes = [first.first[each].resident for each in sorted(first.first)]
    kept = [each for each in first.fact.get("kept", []) if len(each["updates"]) >= _LEAST_KEPT]
    growth = _find_growth(sizes) or _confirm_growth(sizes, kept)
    graphs = [each for each in kept if each["graph"] / len(each["updates"]) > _LEAST_GRAPH]
    if growth or graphs:
        return _explain_growth(first, growth, kept, graphs)
    return compare_with_forecast(runs)


def _explain_growth(first: RunRecord, growth: int, kept: list[Kept], graphs: list[Kept]) -> Verdict:
    """Return the failed verdict on memory that grows, with the line of the script whose tensors are kept alive.

    Args:
        first: Single-process run.
        growth: Bytes by which the memory grows with each update; 0 if it does not grow steadily.
        kept: One record for each script line whose tensors of earlier updates are still alive after the last update.
        graphs: Records in `kept` of lines whose tensors keep large autograd graphs alive.
    """
    sizes = ", ".join(format_bytes(first.first[each].resident) for each in sorted(first.first))
    details = [f"after each update: {sizes}"]
    if graphs:
        worst = max(graphs, key=lambda each: each["graph"])
        each_update = worst["graph"] // len(worst["updates"])
        reason = f"tensors made at {worst['line']} are kept with their graphs, about {format_bytes(each_update)} for each update"
        advice = "keep loss.item() or output.detach() instead of the tensor; evaluate in torch.no_grad(), and without retain_graph"
    elif kept:
        worst = max(kept, key=lambda each: each["bytes"])
        reason = (
            f"memory grows by about {format_bytes(growth)} with each update: tensors made at {worst['line']} are kept"
        )
        advice = (
            "remove what keeps them: a list that is never emptied, or hooks that are registered again and never removed"
        )
    else:
        reason = f"memory grows by about {format_bytes(growth)} with each update"
        advice = "something keeps data of earlier updates: a list or dict that is never emptied, or hooks that are never removed"
    return Verdict("memory", "memory", "FAIL", reason, tuple(details), advice, "memory.md")


def _find_growth(sizes: list[int]) -> int:
    """Return the median number of bytes by which memory grows per update; 0 if it does not grow steadily.

    The growth in the first two updates is left out, because early updates fill caches.

    Args:
        sizes: Memory in use after each update, in bytes.
    """
    steps = [after - before for before, after in pairwise(sizes)][2:]
    if len(steps) < 3 or min(steps) < _LEAST_GROWTH or min(steps) < 0.5 * sorted(steps)[len(steps) // 2]:
        return 0
    return sorted(steps)[len(steps) // 2]


def _confirm_growth(sizes: list[int], kept: list[Kept]) -> int:
    """Return the mean number of bytes of kept tensors per update if the memory in use confirms them, else 0.

    On a CPU, the memory in use does not grow steadily if updates also allocate and free memory, for example to save
    checkpoints. It confirms the kept tensors if it grows by more than half of their size between the first and the last
    update.

    Args:
        sizes: Memory in use after each update, in bytes.
        kept: One record for each script line whose tensors of earlier updates are still alive after the last update.
    """
    total = sum(each["bytes"] for each in kept)
    per_update = total // max((len(each["updates"]) for each in kept), default=1)
    return per_update if per_update > _LEAST_GROWTH and sizes[-1] - sizes[0] > total // 2 else 0


def _explain_wait(first: RunRecord, text: str) -> Verdict:
    """Return the failed verdict on updates that wait for data, with the script's function that takes most of the time.

    Args:
        first: Single-process run.
        text: Description of the time that updates wait.
    """
    slow = first.fact.get("slow_lines", [])
    kind, name = (slow[0][1], slow[0][2]) if slow else ("", "")
    what = {"collate": "the collate function", "item": "reading one sample"}.get(kind, "the script's function")
    where = f": most of it is spent in {what}, {name}" if name else ""
    workers = max((each["workers"] for each in first.fact.get("loaders", {}).values()), default=0)
    advice = "do less for each sample: prepare it beforehand, or compute on whole tensors"
    return Verdict(
        "data", "data keeps up", "FAIL", f"updates wait for data: {text}{where}", (),
        f"{advice}; {'use more workers' if workers else 'or read in worker processes'} (num_workers=)", "data.md",
    )  # fmt: skip


def check_data_wait(runs: RunSet) -> Verdict:
    """Return the verdict on the time that updates wait for data.

    The first update is left out, because the loader starts its workers then.
    """
    title = "data keeps up"
    updates = [update for number, update in sorted(runs.first.first.items())][1:]
    waits = [sum(batch.get("waited", 0.0) for batch in update.batches) for update in updates]
    total = sum(update.seconds for update in updates)
    if not updates or not total or not any(update.batches for update in updates):
        return Verdict("data", title, "NOT CHECKED", "too few updates, or no prepared loader")
    share, each = sum(waits) / total, sum(waits) / len(updates)
    text = f"{each * 1000:.1f} ms per update, {100 * share:.0f} % of its time"
    # CPU time depends little on other programs on the machine, so its limit can be lower than that of elapsed time.
    busy = sum(batch.get("busy", 0.0) for update in updates for batch in update.batches)
    busy_share = busy / max(sum(update.busy for update in updates), 1e-9)
    is_busy = busy_share > _MOST_BUSY and busy / len(updates) > _LEAST_BUSY
    if share > _MOST_WAITING and (is_busy or each > _LEAST_SECONDS):
        return _explain_wait(runs.first, text)
    return Verdict("data", title, "PASS", f"waits for data {text}")
