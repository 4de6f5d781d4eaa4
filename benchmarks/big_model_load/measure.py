"""Time to load a 1.6 GB checkpoint of 24 shards into a model and place it, compared with mapping its files.

`python benchmarks/run.py big_model_load` runs it, and rewrites the table in benchmarks/README.md.
"""

import gc
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from benchmarks.offload.model import build_model, write_checkpoint
from benchmarks.timing import HAS_ACCELERATE, get_num_repeats, make_rows, save_result, time_interleaved


def make_mapper(files: list[Path]) -> Callable[[], object]:
    """Return the floor: a function that opens every tensor of every file with safetensors, without reading the values."""

    def run() -> object:
        tensors = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        return tensors

    return run


def make_loader(folder: Path, library: str, repeats: int = 0) -> Callable[[], object]:
    """Return a function that loads a meta model with `library`'s load_checkpoint_and_dispatch.

    Args:
        folder: Folder of the checkpoint.
        library: "headway" or "accelerate".
        repeats: Number of timed calls. The meta models are built here, outside of the measured time.
    """
    module = __import__(library)
    meta_models = [build_model() for _ in range(repeats + 1)]  # one more for the warm-up

    def run() -> object:
        return module.load_checkpoint_and_dispatch(meta_models.pop(), str(folder), device_map={"": "cpu"})

    return run


def measure_added_memory(folder: Path, library: str) -> int:
    """Return the anonymous bytes that a load has added when it ends, measured in a separate process."""
    code = (
        "import sys, pathlib; from benchmarks.offload.model import *; from benchmarks.big_model_load.measure import *;"
        "folder = pathlib.Path(sys.argv[1]); library = sys.argv[2]; run = make_mapper(sorted(folder.glob('*.safetensors')))"
        " if library == 'safetensors' else make_loader(folder, library); before = get_anonymous_bytes(); result = run();"
        "print(get_anonymous_bytes() - before)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code, str(folder), library], check=True, capture_output=True, text=True
    )
    return int(finished.stdout.split()[-1])


def main() -> None:
    """Measure all variants in turn and write result.json."""
    logging.disable(logging.WARNING)
    repeats = get_num_repeats(15)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_checkpoint(folder)
        passes = {
            "map the files (safetensors)": make_mapper(files),
            "map the files, again (A/A)": make_mapper(files),
            "headway": make_loader(folder, "headway", repeats),
        }
        libraries = ["safetensors", "headway"]
        if HAS_ACCELERATE:
            passes["accelerate"] = make_loader(folder, "accelerate", repeats)
            libraries.append("accelerate")
        rows = make_rows(time_interleaved(passes, repeats), 1.0)
        gc.collect()
        memory = {library: round(measure_added_memory(folder, library) / 2**20, 1) for library in libraries}
        save_result("big_model_load", "s", rows, note=f"anonymous MiB that a load adds: {json.dumps(memory)}")


if __name__ == "__main__":
    main()
