"""How long the way through the library is: calls, files, and changes of file for one action.

Counts are exact and do not depend on the machine, so one run is enough. A call is an entry into a Python function of the
library, and each resumption of one of its generators. A change of file is a call into another file than the call before.
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
"""Micro-steps before the counted one, so that nothing is done for the first time."""


class Walk:
    """Counts the calls into one package."""

    def __init__(self, package: str) -> None:
        self._root = package
        self._files: list[str] = []
        self._functions: set[Any] = set()

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count the calls made in the block."""

        def note(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(self._root):
                self._files.append(frame.f_code.co_filename)
                self._functions.add(frame.f_code)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def row(self) -> dict[str, int]:
        """Return the counts."""
        changes = sum(one != other for one, other in zip(self._files, self._files[1:]))
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


def _package(library: str) -> str:
    return str(Path(__import__(library).__file__).parent)


def count_micro_step(library: str, strategy: str | None = None) -> dict[str, int]:
    """Count one micro-step of the README's loop, from the loader to `zero_grad`, with every feature off."""
    options = {} if strategy is None else {"strategy": strategy}
    accelerator, model, optimizer, loader, schedule = _prepare(library, **options)
    walk, batches = Walk(_package(library)), iter(loader)
    for step in range(_WARM_UP + 1):
        with walk.count() if step == _WARM_UP else contextlib.nullcontext():
            inputs, targets = next(batches)
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return walk.row()


def count_checkpoint(library: str, action: str) -> dict[str, int]:
    """Count `save_state` or `load_state` of one linear layer, the second time it is called."""
    accelerator, *_ = _prepare(library)
    walk = Walk(_package(library))
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(f"{folder}/first")
        if action == "load_state":
            accelerator.load_state(f"{folder}/first")
        with walk.count():
            getattr(accelerator, action)(f"{folder}/{'second' if action == 'save_state' else 'first'}")
    return walk.row()


def count_dry_run() -> dict[str, int]:
    """Count `headway launch -n 2 --cpu --dry_run`, with its imports done."""
    from headway.cli.main import main

    walk = Walk(_package("headway"))
    for is_counted in (False, True):
        counting = walk.count() if is_counted else contextlib.nullcontext()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit), counting:
            main(["launch", "-n", "2", "--cpu", "--dry_run", __file__])
    return walk.row()


def _alone(function: Callable[..., dict[str, int]], *args: Any) -> dict[str, int]:
    """Run a count in a process of its own, because an Accelerator leaves state behind."""
    found: dict[str, int] = run_ranks(function, 1, *args)[0]
    return found


def measure() -> dict[str, dict[str, int]]:
    """Return the counts by action."""
    rows = {
        "micro-step, one process": _alone(count_micro_step, "headway"),
        "micro-step, one process, Accelerate": _alone(count_micro_step, "accelerate"),
        "micro-step, DDP, 2 ranks": run_ranks(count_micro_step, 2, "headway")[0],
        "micro-step, DDP, 2 ranks, Accelerate": run_ranks(count_micro_step, 2, "accelerate")[0],
        "micro-step, FSDP, 2 ranks": run_ranks(count_micro_step, 2, "headway", "fsdp")[0],
        "save_state of a linear layer": _alone(count_checkpoint, "headway", "save_state"),
        "load_state of a linear layer": _alone(count_checkpoint, "headway", "load_state"),
        "launch -n 2 --dry_run": _alone(count_dry_run),
    }
    return rows


def main() -> None:
    """Print the table beside the last recorded one; with `--record`, keep the new one."""
    rows = measure()
    former = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    columns = ("calls", "functions", "files", "changes of file")
    print(f"{'':38}" + "".join(f"{column:>22}" for column in columns))
    for name, row in rows.items():
        cells = []
        for column in columns:
            before = former.get(name, {}).get(column)
            change = "" if before in (None, row[column]) else f" ({row[column] - before:+})"
            cells.append(f"{row[column]}{change}")
        print(f"{name:38}" + "".join(f"{cell:>22}" for cell in cells))
    if "--record" in sys.argv:
        RESULT.write_text(
            json.dumps({"date": date.today().isoformat(), "torch": torch.__version__, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
