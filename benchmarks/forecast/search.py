"""Trials that a forecast saves in a search for the largest batch, under a real memory limit on a CPU.

Each search runs in a separate process. It makes one small step, limits its address space, forecasts, and then lets
`find_executable_batch_size` try real updates, whose allocations fail at the limit.
"""

import json
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.forecast.models import CASES
from benchmarks.timing import describe_machine
from headway import Accelerator, find_executable_batch_size
from headway.forecasting.device.devices import MIB

FOLDER = Path(__file__).parent
MODELS = ("MLP", "GPT-2")
STARTS = ("8", "128", "forecast")
LIMIT = 300 * MIB
"""Bytes that a search may allocate beyond what the process already uses."""
TOLERANCE = 0.05
UPDATES = 2
_ATTEMPTS = 3


def _run_updates(accelerator: Accelerator, name: str, size: int, count: int = UPDATES) -> None:
    case = CASES[name]
    accelerator.free_memory()
    model = case.make()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(count):
        batch = case.batch(size)
        if case.loss is None:
            loss = model(**batch).loss
        else:
            loss = case.loss(model(batch[0]), batch[1])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def _limit_memory(num_bytes: int) -> None:
    """Let this process map at most `num_bytes` more than now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _get_peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def search(name: str, start: str) -> dict[str, Any]:
    """Run one search in this process, and return the sizes that it tried, its result, time and memory.

    Args:
        name: Name of the model.
        start: First batch size, or "forecast" to start with the forecast's.
    """
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    _run_updates(accelerator, name, 8)  # map everything that is mapped only once
    _limit_memory(LIMIT)
    seconds, host_bytes, tried = 0.0, 0, []
    first = int(start) if start.isdigit() else 0
    if not first:
        case, before = CASES[name], _get_peak_rss()
        model = case.make()
        optimizer = torch.optim.AdamW(model.parameters())
        forecast = accelerator.forecast(
            model,
            case.batch(8),
            optimizer=optimizer,
            loss=case.loss,
            batch_fn=case.batch,
            largest=True,
            loop="loss_function",
        )
        first, seconds, host_bytes = max(1, forecast.largest_batch or 0), forecast.seconds, _get_peak_rss() - before
        del model, optimizer

    @find_executable_batch_size(starting_batch_size=first, search="largest", tolerance=TOLERANCE)
    def run(size: int) -> int:
        tried.append(size)
        _run_updates(accelerator, name, size)
        return size

    start_time = time.perf_counter()
    largest = run()
    return {
        "model": name,
        "start": start,
        "largest": largest,
        "tried": tried,
        "trial_seconds": round(time.perf_counter() - start_time, 1),
        "forecast_seconds": round(seconds, 1),
        "forecast_host_bytes": host_bytes,
    }


def _search_in_new_process(name: str, start: str) -> dict[str, Any]:
    """Run a search in a separate process. Try again if something else fails under the limit, such as the start of a thread."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.forecast.search", name, start]
    for _ in range(_ATTEMPTS):
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode == 0:
            result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
            return result
        print(finished.stderr[-500:], file=sys.stderr)
    raise SystemExit(f"the search for {name} from {start} failed {_ATTEMPTS} times")


def main() -> None:
    """Run all searches, and write search.json and search.md."""
    if len(sys.argv) == 3:
        print(json.dumps(search(*sys.argv[1:])))
        return
    rows = []
    for name in MODELS:
        for start in STARTS:
            rows.append(_search_in_new_process(name, start))
            print(rows[-1], flush=True)
    result = {"date": date.today().isoformat(), "machine": describe_machine(), "torch": torch.__version__, "rows": rows}
    (FOLDER / "search.json").write_text(json.dumps(result, indent=1) + "\n")
    table = [
        "| model | start | first batch | largest batch | trials | s in trials | s in forecast | host MiB |",
        "|" + "---|" * 8,
    ]
    table += [
        f"| {row['model']} | {row['start']} | {row['tried'][0]} | {row['largest']} | {len(row['tried'])} | "
        f"{row['trial_seconds']:.1f} | {row['forecast_seconds']:.1f} | {row['forecast_host_bytes'] / MIB:.0f} |"
        for row in rows
    ]
    (FOLDER / "search.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
