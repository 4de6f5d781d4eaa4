"""Runs habits with Accelerate and with Headway, and records Accelerate's results."""

import json
import os
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path

from headway.launch.stand_in import make_variables
from tests.distributed.script_stage import Stage

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded.json"
GROUPS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "run", "record", "material"))
PRELOADED = ["accelerate", "accelerate.utils", "tests.ecosystem.habits.material"]
WORLDS = (1, 2)


def names():
    """Yield the names of all habits as `group.function`."""
    for group in GROUPS:
        module = import_module(f"tests.ecosystem.habits.{group}")
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_") and callable(value):
                yield f"{group}.{name}"


@cache
def _stage(library):
    path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    environment = make_variables(path) if library == "headway" else path
    own = ["headway.accelerator", "headway.compat.accelerate.accelerator", "headway.compat.accelerate.members"]
    return Stage([*PRELOADED, *(own if library == "headway" else ())], environment, grace_s=2.0)


def run(library, name, world_size):
    """Run a habit and return the result of each rank; "no end" replaces the result of a rank that did not finish.

    The run is repeated once if another process took its port.
    """
    results = _run(library, name, world_size)
    return _run(library, name, world_size) if "DistNetworkError" in str(results) else results


def _run(library, name, world_size):
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        _stage(library).run(FOLDER / "run.py", name, folder=folder, world_size=world_size, timeout_s=60)
        files = [folder / "evidence" / f"rank{rank}.json" for rank in range(world_size)]
        return [json.loads(each.read_text()) if each.exists() else "no end" for each in files]


def same(one, other):
    """Whether two results are equal, up to the last digits of floats."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float | int):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other), 1.0)
    return type(one) is type(other) and one == other


def main(chosen, compares):
    """Record the habits, or compare them with the recorded results."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if not compares and not chosen:
        recorded = {}
    for name in names():
        if chosen and not any(name.startswith(each) for each in chosen):
            continue
        for world_size in WORLDS:
            key = f"{name} on {world_size}"
            if not compares:
                recorded[key] = run("accelerate", name, world_size)
            elif not same(theirs := recorded.get(key), ours := run("headway", name, world_size)):
                print(f"{key}\n  accelerate {theirs}\n  headway    {ours}")
    if not compares:
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(recorded[key])}" for key in sorted(recorded))
        RECORDED.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main([each for each in sys.argv[1:] if not each.startswith("-")], "--compare" in sys.argv)
