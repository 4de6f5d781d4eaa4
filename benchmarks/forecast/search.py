"""How many real trials a forecast saves a search for the largest batch, under a real limit of memory on a CPU.

Each search runs in a process of its own, which makes one small step, forecasts, limits its address space, and then lets
`find_executable_batch_size` try real updates, whose allocations really fail.
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
from benchmarks.timing import machine
from headway import Accelerator, find_executable_batch_size
from headway.forecasting.device.devices import MIB

FOLDER = Path(__file__).parent
MODELS = ("MLP", "GPT-2")
STARTS = ("8", "128", "forecast")
ROOM = 300 * MIB
TOLERANCE = 0.05
UPDATES = 2
_ATTEMPTS = 3


def _updates(accelerator: Accelerator, name: str, size: int, count: int = UPDATES) -> None:
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


def _limit(num_bytes: int) -> None:
    """Let the process map so many bytes more than now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def search(name: str, start: str) -> dict[str, Any]:
    """One search in this process: what was tried, and what it took.

    Args:
        name: of the model.
        start: the first batch; "forecast": what a forecast says.
    """
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    _updates(accelerator, name, 8)  # what a process maps once is there
    _limit(ROOM)
    took, held, first, tried = 0.0, 0, int(start) if start.isdigit() else 0, []
    if not first:
        case, before = CASES[name], _peak_rss()
        model = case.make()
        optimizer = torch.optim.AdamW(model.parameters())
        found = accelerator.forecast(
            model,
            case.batch(8),
            optimizer=optimizer,
            loss=case.loss,
            batch_fn=case.batch,
            largest=True,
            loop="loss_function",
        )
        first, took, held = max(1, found.largest_batch or 0), found.seconds, _peak_rss() - before
        del model, optimizer

    @find_executable_batch_size(starting_batch_size=first, search="largest", tolerance=TOLERANCE)
    def run(size: int) -> int:
        tried.append(size)
        _updates(accelerator, name, size)
        return size

    began = time.perf_counter()
    largest = run()
    return {
        "model": name,
        "start": start,
        "largest": largest,
        "tried": tried,
        "trial_seconds": round(time.perf_counter() - began, 1),
        "forecast_seconds": round(took, 1),
        "forecast_host_bytes": held,
    }


def _in_own_process(name: str, start: str) -> dict[str, Any]:
    """A search there; where what fails under the limit is not torch's to report (a thread, say), once more."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.forecast.search", name, start]
    for _ in range(_ATTEMPTS):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found
        print(done.stderr[-500:], file=sys.stderr)
    raise SystemExit(f"the search for {name} from {start} failed {_ATTEMPTS} times")


def main() -> None:
    """Write search.json and search.md."""
    if len(sys.argv) == 3:
        print(json.dumps(search(*sys.argv[1:])))
        return
    rows = []
    for name in MODELS:
        for start in STARTS:
            rows.append(_in_own_process(name, start))
            print(rows[-1], flush=True)
    result = {"date": date.today().isoformat(), "machine": machine(), "torch": torch.__version__, "rows": rows}
    (FOLDER / "search.json").write_text(json.dumps(result, indent=1) + "\n")
    table = ["| model | start | first | found | trials | s in trials | s in forecast | host MiB |", "|" + "---|" * 8]
    table += [
        f"| {row['model']} | {row['start']} | {row['tried'][0]} | {row['largest']} | {len(row['tried'])} | "
        f"{row['trial_seconds']:.1f} | {row['forecast_seconds']:.1f} | {row['forecast_host_bytes'] / MIB:.0f} |"
        for row in rows
    ]
    (FOLDER / "search.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
