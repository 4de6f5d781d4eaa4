"""Forward pass of a 1.6 GB model with 23 of 24 blocks on disk, with a cold and a warm page cache.

Cold passes are compared with reading the files, warm passes with the model in memory.

`python benchmarks/run.py offload` runs it, and rewrites the table in benchmarks/README.md.
"""

import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.offload.model import (
    NUM_BLOCKS,
    NUM_TOKENS,
    WIDTH,
    build_model,
    drop_from_page_cache,
    get_anonymous_bytes,
    read_files,
    write_checkpoint,
)
from benchmarks.timing import HAS_ACCELERATE, get_num_repeats, make_rows, save_result


def make_forward(model: torch.nn.Module) -> Callable[[], None]:
    """Return a function that runs one forward without gradients."""
    inputs = torch.randn(NUM_TOKENS, WIDTH)

    def run() -> None:
        with torch.no_grad():
            model(inputs)

    return run


def load_and_place(
    folder: Path, library: str, device_map: dict[str, str], offload: Path | None = None
) -> torch.nn.Module:
    """Load the model and place it with `library`."""
    load = __import__(library).load_checkpoint_and_dispatch
    return load(build_model(), str(folder), device_map=device_map, offload_folder=str(offload) if offload else None)


def main() -> None:
    """Measure all variants and write result.json.

    Before each cold pass, the files are dropped from the page cache, and mincore confirms it.
    """
    logging.disable(logging.WARNING)
    repeats = get_num_repeats(10)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_checkpoint(folder)
        device_map = {str(number): "cpu" if number == 0 else "disk" for number in range(NUM_BLOCKS)}
        resident = build_model("cpu")
        resident.load_state_dict(load_and_place(folder, "headway", {"": "cpu"}).state_dict())
        ours = load_and_place(folder, "headway", device_map)
        cold: dict[str, tuple[Callable[[], object], torch.nn.Module | None]] = {
            "cold: read the files": (lambda: read_files(files), None),
            "cold: read the files, again (A/A)": (lambda: read_files(files), None),
            "cold: headway": (make_forward(ours), ours),
        }
        warm: dict[str, Callable[[], object]] = {
            "warm: all in memory": make_forward(resident),
            "warm: all in memory, again (A/A)": make_forward(resident),
            "warm: headway": make_forward(ours),
            # The first forward finds the pages in the page cache, but must still map them into this process.
            "warm: headway, next forward": make_forward(ours),
        }
        if HAS_ACCELERATE:
            (folder / "offload").mkdir()
            theirs = load_and_place(folder, "accelerate", device_map, folder / "offload")
            theirs_files = [*files, *(folder / "offload").glob("*.dat")]
            cold["cold: accelerate"] = (make_forward(theirs), theirs)
            warm["warm: accelerate"] = make_forward(theirs)
        all_files = theirs_files if HAS_ACCELERATE else files
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in (*warm, *cold)}
        share_left, anonymous = 0.0, 0
        for repeat in range(repeats + 1):
            for cold_name, (run, _) in rotate(cold, repeat).items():
                share_left = max(share_left, drop_from_page_cache(all_files, ours))
                before = get_anonymous_bytes()
                elapsed = time_once(run)
                if cold_name == "cold: headway" and repeat:
                    anonymous = max(anonymous, get_anonymous_bytes() - before)
                if repeat:
                    times[cold_name].append(elapsed)
            for file in all_files:
                file.read_bytes()
            for warm_name, run in rotate(warm, repeat).items():
                if warm_name.endswith("next forward"):
                    run()
                elapsed = time_once(run)
                if repeat:
                    times[warm_name].append(elapsed)
        note = {"share of the files left in memory before a cold pass, at most": share_left,
                "anonymous MiB that a cold forward adds, at most": round(anonymous / 2**20, 1)}  # fmt: skip
        save_result("offload", "s", make_rows(times, 1.0), note=json.dumps(note))


def rotate(passes: dict, repeat: int) -> dict:
    """Return the passes in a rotated order that depends on the repeat."""
    names = list(passes)
    shift = repeat % len(names)
    return {name: passes[name] for name in names[shift:] + names[:shift]}


def time_once(run: Callable[[], object]) -> tuple[float, float]:
    """Run a function and return its (wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
