"""Quick check for regressions of a step, loader, import, launch, save and load, in two minutes.

Each figure is what Headway adds to plain PyTorch, so the speed of the machine partly cancels out. The floor is measured a
second time as a separate variant, and its difference from itself is the noise of this run. No check fails: read the
last column. `make guard` prints the table beside the recorded one. After an intended change, `make guard ARGS=--record` records it.
"""

import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint.measure import force_to_disk, list_state, read_raw, write_raw
from benchmarks.launch_time import measure as launch_time
from benchmarks.loader_cost import measure as loader_cost
from benchmarks.step_cost import measure as step_cost
from benchmarks.timing import (
    HAS_ACCELERATE,
    describe_machine,
    find_command,
    get_children_cpu_seconds,
    make_command_runner,
    time_interleaved,
)

RESULT = Path(__file__).with_name("result.json")
FLOOR = "by hand"
AGAIN = "by hand, again"
_WIDTH = 512
_NUM_LAYERS = 10
_SUSPICIOUS = 3.0
"""A figure is marked if it has changed by more than this many times the noise, the larger of both runs' noises."""


@dataclass(frozen=True)
class Figure:
    """What a variant adds to the floor.

    Attributes:
        value: Median over the repeats, in the unit of the row's name.
        noise: Median of what the floor adds to itself, plus half the distance between its quartiles.
    """

    value: float
    noise: float


def compare_to_floor(times: Mapping[str, list[tuple[float, float]]], scale: float, column: int) -> dict[str, Figure]:
    """Return what each variant adds to the floor.

    Args:
        times: Wall and CPU seconds of every repeat of every variant, as `time_interleaved` returns them.
        scale: Factor from seconds per repeat to the row's unit, such as 1e6 / batches for microseconds per batch.
        column: 0 for wall time, 1 for CPU time.
    """

    def subtract_floor(name: str) -> list[float]:
        return [(row[column] - floor[column]) * scale for row, floor in zip(times[name], times[FLOOR])]

    low, middle, high = statistics.quantiles(subtract_floor(AGAIN), n=4)
    noise = abs(middle) + (high - low) / 2
    return {
        name: Figure(statistics.median(subtract_floor(name)), noise) for name in times if name not in (FLOOR, AGAIN)
    }


def measure_step() -> dict[str, Figure]:
    """Return the CPU microseconds per micro-batch that a prepared loop adds."""
    variants = {FLOOR: step_cost.make_plain_loop(), AGAIN: step_cost.make_plain_loop()}
    for library, module in _libraries().items():
        accelerator = module.Accelerator(gradient_accumulation_steps=step_cost.STEPS, cpu=True)
        variants[library] = step_cost.make_prepared_loop(accelerator)
    return compare_to_floor(time_interleaved(variants, 40), 1e6 / step_cost.NUM_BATCHES, 1)


def measure_loader() -> dict[str, Figure]:
    """Return the CPU microseconds per batch that a prepared loader of a shuffled map-style data set adds."""
    kind = "shuffled map"
    variants = {name: loader_cost.make_pass(loader_cost.make_loader(kind)) for name in (FLOOR, AGAIN)}
    for library, module in _libraries().items():
        variants[library] = loader_cost.make_pass(module.Accelerator(cpu=True).prepare(loader_cost.make_loader(kind)))
    return compare_to_floor(time_interleaved(variants, 40), 1e6 / loader_cost.NUM_BATCHES, 1)


def measure_import() -> dict[str, Figure]:
    """Return the CPU seconds that importing the Accelerator adds to importing torch."""
    lines = dict.fromkeys((FLOOR, AGAIN), "import torch, torch.utils.data")
    lines |= {library: f"from {library} import Accelerator" for library in _libraries()}
    return _measure_processes({name: [sys.executable, "-c", line] for name, line in lines.items()})


def measure_launch() -> dict[str, Figure]:
    """Return the CPU seconds that launching a script on one process adds to running it."""
    script = str(Path(launch_time.__file__).with_name("script.py"))
    commands = {name: [sys.executable, script] for name in (FLOOR, AGAIN)}
    commands["headway"] = [find_command("headway"), "launch", "--cpu", "-n", "1", script]
    if HAS_ACCELERATE:
        commands["accelerate"] = [find_command("accelerate"), "launch", "--cpu", "--num_processes", "1", script]
    return _measure_processes(commands)


def measure_checkpoints() -> tuple[dict[str, Figure], dict[str, Figure]]:
    """Return the wall milliseconds that saving and loading a training state of 30 MB add.

    The floor writes the same bytes into one file with fsync, and reads them back. Accelerate does not call fsync, so its
    files are flushed to the disk within the measured time.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        saves: dict[str, Callable[[], Any]] = {}
        loads: dict[str, Callable[[], Any]] = {}
        for library, module in _libraries().items():
            accelerator, tensors = _train_once(module)
            place = folder / library
            saves[library] = _save_and_flush(accelerator, place, is_flushed=library == "headway")
            loads[library] = lambda accelerator=accelerator, place=place: accelerator.load_state(str(place))
        copies = [torch.empty_like(tensor) for tensor in tensors]
        raw = folder / "raw"
        for name in (FLOOR, AGAIN):
            saves[name] = lambda: write_raw(tensors, raw)
            loads[name] = lambda: read_raw(copies, raw)
        saved = compare_to_floor(time_interleaved(saves, 12), 1e3, 0)
        return saved, compare_to_floor(time_interleaved(loads, 12), 1e3, 0)


def _libraries() -> dict[str, Any]:
    names = ["headway", *(["accelerate"] if HAS_ACCELERATE else [])]
    return {name: __import__(name) for name in names}


def _measure_processes(commands: Mapping[str, list[str]]) -> dict[str, Figure]:
    variants = {name: make_command_runner(command) for name, command in commands.items()}
    return compare_to_floor(time_interleaved(variants, 4, get_children_cpu_seconds), 1.0, 1)


def _train_once(module: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return an Accelerator whose model has made one step, and the tensors of its training state."""
    accelerator = module.Accelerator(cpu=True)
    layers = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS)))
    model, optimizer = accelerator.prepare(layers, torch.optim.Adam(layers.parameters(), 1e-4))
    accelerator.backward(model(torch.ones(1, _WIDTH)).mean())
    optimizer.step()
    return accelerator, list_state(model, optimizer)


def _save_and_flush(accelerator: Any, place: Path, is_flushed: bool) -> Callable[[], None]:
    def save() -> None:
        accelerator.save_state(str(place))
        if not is_flushed:
            force_to_disk(place)

    return save


def measure() -> dict[str, dict[str, Figure]]:
    """Return all figures by row and library."""
    save, load = measure_checkpoints()
    return {
        "micro-step, us of CPU": measure_step(),
        "loader, us of CPU per batch": measure_loader(),
        "save_state of 30 MB, ms": save,
        "load_state of 30 MB, ms": load,
        "import, s of CPU": measure_import(),
        "launch, s of CPU": measure_launch(),
    }


def render(rows: Mapping[str, Mapping[str, Figure]], recorded: Mapping[str, Any]) -> str:
    """Return the table: what Headway and Accelerate add now, the noise, the recorded figure, and a mark if it has changed."""
    lines = [f"{'added to plain PyTorch':30}{'headway':>10}{'accelerate':>12}{'noise':>8}{'recorded':>10}"]
    for name, row in rows.items():
        ours = row["headway"]
        theirs = f"{row['accelerate'].value:.3g}" if "accelerate" in row else "-"
        line = f"{name:30}{ours.value:10.3g}{theirs:>12}{ours.noise:8.2g}"
        before = recorded.get(name, {}).get("headway")
        if before is not None:
            line += f"{before['value']:10.3g}"
            change = ours.value - before["value"]
            if abs(change) > _SUSPICIOUS * max(ours.noise, before["noise"]):
                line += "   slower than recorded" if change > 0 else "   faster than recorded"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table beside the recorded one, and record it with `--record`."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    rows = measure()
    recorded = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": {}}
    print(render(rows, recorded["rows"]))
    if recorded["rows"]:
        print(f"recorded {recorded['date']} on {recorded['machine']}")
    print(f"now on {describe_machine()}")
    if "--record" in sys.argv:
        figures = {name: {library: asdict(figure) for library, figure in row.items()} for name, row in rows.items()}
        record = {"date": date.today().isoformat(), "machine": describe_machine(), "rows": figures}
        RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
