"""Proof about the memory of the single-process run: it does not grow with each update, and it matches its forecast."""

from itertools import pairwise

from headway.common.text import format_bytes
from headway.verify.proofs.forecast_memory import MEMORY_PROOF, compare_with_forecast
from headway.verify.record_types import AliveTensorsEntry
from headway.verify.verdict import RunSet, Verdict

_LEAST_GROWTH = 1_000_000
"""Smallest growth of memory that is reported, in bytes per update."""
_LEAST_GRAPH = 100_000
"""Smallest size of autograd graphs kept alive that is reported, in bytes per update."""
_LEAST_UPDATES = 3
"""Smallest number of earlier updates with tensors still alive for which the script line that made them is reported."""


def check_memory(runs: RunSet) -> Verdict:
    """Return the verdict on the memory of the single-process run.

    The memory must not grow with each update, and its peak must match the forecast.
    """
    updates = sorted(runs.baseline.rank0_updates.items())
    sizes = [update.resident_bytes for _, update in updates]
    alive = [each for each in runs.baseline.rank0_facts.alive_tensors if len(each["updates"]) >= _LEAST_UPDATES]
    growth = _find_steady_growth(sizes) or _confirm_growth(sizes, alive)
    if growth or any(_has_large_graphs(each) for each in alive):
        return _explain_growth(sizes, growth, alive)
    return compare_with_forecast(runs)


def _has_large_graphs(tensors: AliveTensorsEntry) -> bool:
    """Whether tensors keep autograd graphs alive that are large enough to be reported, on average per update."""
    return tensors["graph_bytes"] / len(tensors["updates"]) > _LEAST_GRAPH


def _explain_growth(sizes: list[int], growth: int, alive: list[AliveTensorsEntry]) -> Verdict:
    """Return the failed verdict on memory that grows, with the line of the script whose tensors are kept alive.

    Args:
        sizes: Memory in use after each update, in bytes.
        growth: Bytes by which the memory grows with each update; 0 if it does not grow steadily.
        alive: Tensors of earlier updates that are still alive after the last update, by script line.
    """
    graphs = [each for each in alive if _has_large_graphs(each)]
    if graphs:
        worst = max(graphs, key=lambda each: each["graph_bytes"])
        graph_bytes = worst["graph_bytes"] // len(worst["updates"])
        reason = f"tensors made at {worst['line']} are kept with their graphs, about {format_bytes(graph_bytes)} for each update"
        advice = "keep loss.item() or output.detach() instead of the tensor; evaluate in torch.no_grad(), and without retain_graph"
    elif alive:
        worst = max(alive, key=lambda each: each["tensor_bytes"])
        reason = (
            f"memory grows by about {format_bytes(growth)} with each update: tensors made at {worst['line']} are kept"
        )
        advice = (
            "remove what keeps them: a list that is never emptied, or hooks that are registered again and never removed"
        )
    else:
        reason = f"memory grows by about {format_bytes(growth)} with each update"
        advice = "something keeps data of earlier updates: a list or dict that is never emptied, or hooks that are never removed"
    details = (f"after each update: {', '.join(map(format_bytes, sizes))}",)
    return MEMORY_PROOF.report_failure(reason, details=details, advice=advice)


def _find_steady_growth(sizes: list[int]) -> int:
    """Return the median number of bytes by which memory grows per update; 0 if it does not grow steadily.

    The growth in the first two updates is left out, because early updates fill caches.

    Args:
        sizes: Memory in use after each update, in bytes.
    """
    steps = sorted(after - before for before, after in list(pairwise(sizes))[2:])
    if len(steps) < 3:
        return 0
    smallest, median = steps[0], steps[len(steps) // 2]
    return median if smallest >= max(_LEAST_GROWTH, 0.5 * median) else 0


def _confirm_growth(sizes: list[int], alive: list[AliveTensorsEntry]) -> int:
    """Return the mean number of bytes of kept tensors per update if the memory in use confirms them, else 0.

    On a CPU, the memory in use does not grow steadily if updates also allocate and free memory, for example to save
    checkpoints. It confirms the kept tensors if it grows by more than half of their size between the first and the last
    update.

    Args:
        sizes: Memory in use after each update, in bytes.
        alive: Tensors of earlier updates that are still alive after the last update, by script line.
    """
    total = sum(each["tensor_bytes"] for each in alive)
    bytes_per_update = total // max((len(each["updates"]) for each in alive), default=1)
    is_confirmed = sizes[-1] - sizes[0] > total // 2
    return bytes_per_update if is_confirmed and bytes_per_update > _LEAST_GROWTH else 0
