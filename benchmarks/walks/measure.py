"""Number of calls into the library for one action, the files that they are in, and the changes of file.

Counts are exact and do not depend on the machine, so one run is enough. A call is an entry into a Python function of the
library, or a resumption of one of its generators. A change of file is a call into another file than the previous call.

Run it with `python -m benchmarks.walks.measure`.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.ranks import run_ranks

RESULT = Path(__file__).with_name("result.json")
_WARM_UP = 6
"""Micro-steps before the counted one, so that one-time work is not counted."""


class CallCounter:
    """Counter of the calls into one package."""

    def __init__(self, package: str) -> None:
        self._root = package
        self._files: list[str] = []
        self._functions: set[Any] = set()

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count the calls made in the block."""

        def record(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(self._root):
                self._files.append(frame.f_code.co_filename)
                self._functions.add(frame.f_code)

        sys.setprofile(record)
        try:
            yield
        finally:
            sys.setprofile(None)

    def row(self) -> dict[str, int]:
        """Return the counts."""
        changes = sum(file != following for file, following in zip(self._files, self._files[1:]))
        return {
            "calls": len(self._files),
            "functions": len(self._functions),
            "files": len(set(self._files)),
            "changes of file": changes,
        }


def _prepare(library: str, **options: Any) -> tuple[Any, ...]:
    accelerator = __import__(library).Accelerator(cpu=True, **options)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loader = DataLoader(TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def _find_package(library: str) -> str:
    return str(Path(__import__(library).__file__).parent)


def count_micro_step(library: str, strategy: str | None = None) -> dict[str, int]:
    """Count one micro-step of the README's loop, from the loader to `zero_grad`, without optional features."""
    options = {} if strategy is None else {"strategy": strategy}
    accelerator, model, optimizer, loader, schedule = _prepare(library, **options)
    counter, batches = CallCounter(_find_package(library)), iter(loader)
    for step in range(_WARM_UP + 1):
        with counter.count() if step == _WARM_UP else contextlib.nullcontext():
            inputs, targets = next(batches)
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return counter.row()


def count_checkpoint(library: str, action: str) -> dict[str, int]:
    """Count the second call of `save_state` or `load_state` for one linear layer."""
    accelerator, *_ = _prepare(library)
    counter = CallCounter(_find_package(library))
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(f"{folder}/first")
        if action == "load_state":
            accelerator.load_state(f"{folder}/first")
        with counter.count():
            getattr(accelerator, action)(f"{folder}/{'second' if action == 'save_state' else 'first'}")
    return counter.row()


def count_dry_run() -> dict[str, int]:
    """Count `headway launch -n 2 --cpu --dry_run` after its imports are done."""
    from headway.cli.main import main

    counter = CallCounter(_find_package("headway"))
    for is_counted in (False, True):
        counting = counter.count() if is_counted else contextlib.nullcontext()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit), counting:
            main(["launch", "-n", "2", "--cpu", "--dry_run", __file__])
    return counter.row()


def _count_in_new_process(function: Callable[..., dict[str, int]], *args: Any) -> dict[str, int]:
    """Run a count in a separate process, because an Accelerator leaves state behind."""
    counts: dict[str, int] = run_ranks(function, 1, *args)[0]
    return counts


def measure() -> dict[str, dict[str, int]]:
    """Return the counts by action."""
    rows = {
        "micro-step, one process": _count_in_new_process(count_micro_step, "headway"),
        "micro-step, one process, Accelerate": _count_in_new_process(count_micro_step, "accelerate"),
        "micro-step, DDP, 2 ranks": run_ranks(count_micro_step, 2, "headway")[0],
        "micro-step, DDP, 2 ranks, Accelerate": run_ranks(count_micro_step, 2, "accelerate")[0],
        "micro-step, FSDP, 2 ranks": run_ranks(count_micro_step, 2, "headway", "fsdp")[0],
        "save_state of a linear layer": _count_in_new_process(count_checkpoint, "headway", "save_state"),
        "load_state of a linear layer": _count_in_new_process(count_checkpoint, "headway", "load_state"),
        "launch -n 2 --dry_run": _count_in_new_process(count_dry_run),
    }
    return rows


def main() -> None:
    """Print the counts and their changes since the recorded ones; `--record` records the new counts."""
    rows = measure()
    recorded = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    columns = ("calls", "functions", "files", "changes of file")
    print(f"{'':38}" + "".join(f"{column:>22}" for column in columns))
    for name, row in rows.items():
        cells = []
        for column in columns:
            before = recorded.get(name, {}).get(column)
            change = "" if before in (None, row[column]) else f" ({row[column] - before:+})"
            cells.append(f"{row[column]}{change}")
        print(f"{name:38}" + "".join(f"{cell:>22}" for cell in cells))
    if "--record" in sys.argv:
        RESULT.write_text(
            json.dumps({"date": date.today().isoformat(), "torch": torch.__version__, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
