"""Proof that updates of the single-process run do not wait long for data."""

from headway.verify.records import RunRecord
from headway.verify.verdict import Proof, RunSet, Verdict

_PROOF = Proof("data", title="data keeps up", page="data.md")
_MOST_WAITING = 0.33
"""Largest share of an update's time that may be spent on waiting for data."""
_LEAST_SECONDS = 0.02
"""Time in seconds that each update may always wait for data."""
_MOST_CPU_SHARE = 0.5
"""Largest fraction of an update's CPU time that the main process may spend on fetching batches."""
_LEAST_CPU_SECONDS = 0.008
"""CPU time in seconds that the main process may always spend on fetching the batches of an update."""


def check_data_wait(runs: RunSet) -> Verdict:
    """Return the verdict on the time that updates wait for data.

    The first update is left out, because the loader starts its workers then.
    """
    updates = [update for _, update in sorted(runs.baseline.rank0_updates.items())][1:]
    total_seconds = sum(update.seconds for update in updates)
    # Batches of loaders that the script does not prepare are recorded as the model's inputs, without a time.
    batches = [batch for update in updates for batch in update.batches if "wait_seconds" in batch]
    if not batches or not total_seconds:
        return _PROOF.report_unchecked("too few updates, or no prepared loader")
    wait_seconds = sum(batch.get("wait_seconds", 0.0) for batch in batches)
    wait_share, wait_per_update = wait_seconds / total_seconds, wait_seconds / len(updates)
    text = f"{wait_per_update * 1000:.1f} ms per update, {100 * wait_share:.0f} % of its time"
    # CPU time depends little on other programs on the machine, so its limit can be lower than that of elapsed time.
    cpu_seconds = sum(batch.get("cpu_seconds", 0.0) for batch in batches)
    cpu_share = cpu_seconds / max(sum(update.cpu_seconds for update in updates), 1e-9)
    is_busy = cpu_share > _MOST_CPU_SHARE and cpu_seconds / len(updates) > _LEAST_CPU_SECONDS
    if wait_share > _MOST_WAITING and (is_busy or wait_per_update > _LEAST_SECONDS):
        return _explain_wait(runs.baseline, text)
    return _PROOF.report_pass(f"waits for data {text}")


def _explain_wait(baseline: RunRecord, text: str) -> Verdict:
    """Return the failed verdict on updates that wait for data, with the script's function that takes most of the time.

    Args:
        baseline: Single-process run.
        text: Description of the time that updates wait.
    """
    where = ""
    slow_functions = baseline.rank0_facts.slow_functions
    if slow_functions:
        task = {"collate": "the collate function", "item": "reading one sample"}[slow_functions[0]["task"]]
        where = f": most of it is spent in {task}, {slow_functions[0]['function']}"
    has_workers = any(each["workers"] for each in baseline.rank0_facts.loaders.values())
    advice = "do less for each sample: prepare it beforehand, or compute on whole tensors"
    return _PROOF.report_failure(
        f"updates wait for data: {text}{where}",
        advice=f"{advice}; {'use more workers' if has_workers else 'or read in worker processes'} (num_workers=)",
    )
