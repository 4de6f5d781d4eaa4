"""How long a 1.6 GB checkpoint in 24 shards takes to load into a model and place, beside mapping its files."""

import gc
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from benchmarks.offload.model import build, write
from benchmarks.timing import HAS_ACCELERATE, interleave, num_repeats, rows_of, save


def mapped(files: list[Path]) -> Callable[[], object]:
    """The floor: safetensors gives every tensor of every file; its values are not touched."""

    def run() -> object:
        found = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        return found

    return run


def loaded(folder: Path, library: str, repeats: int = 0) -> Callable[[], object]:
    """Into a model without memory, by `library`'s load_checkpoint_and_dispatch; the meta models are built beforehand."""
    module = __import__(library)
    meta_models = [build() for _ in range(repeats + 1)]  # one more for the warm-up

    def run() -> object:
        return module.load_checkpoint_and_dispatch(meta_models.pop(), str(folder), device_map={"": "cpu"})

    return run


def peak(folder: Path, library: str) -> int:
    """Anonymous bytes that a load adds at the end of it, in a process of its own."""
    code = (
        "import sys, pathlib; from benchmarks.offload.model import *; from benchmarks.big_model_load.measure import *;"
        "folder = pathlib.Path(sys.argv[1]); library = sys.argv[2]; run = mapped(sorted(folder.glob('*.safetensors')))"
        " if library == 'safetensors' else loaded(folder, library); before = anonymous_bytes(); kept = run();"
        "print(anonymous_bytes() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), library], check=True, capture_output=True, text=True
    )
    return int(done.stdout.split()[-1])


def main() -> None:
    """Measure and save."""
    logging.disable(logging.WARNING)
    repeats = num_repeats(15)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write(folder)
        passes = {
            "map the files (safetensors)": mapped(files),
            "map the files, again (A/A)": mapped(files),
            "headway": loaded(folder, "headway", repeats),
        }
        libraries = ["safetensors", "headway"]
        if HAS_ACCELERATE:
            passes["accelerate"] = loaded(folder, "accelerate", repeats)
            libraries.append("accelerate")
        rows = rows_of(interleave(passes, repeats), 1.0)
        gc.collect()
        memory = {library: round(peak(folder, library) / 2**20, 1) for library in libraries}
        save("big_model_load", "s", rows, note=f"anonymous MiB that a load adds: {json.dumps(memory)}")


if __name__ == "__main__":
    main()
