"""A forward of a 1.6 GB model with 23 of 24 blocks on disk: page cache cold and warm, beside reading and computing."""

import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.offload.model import NUM_BLOCKS, NUM_TOKENS, WIDTH, anonymous_bytes, build, drop, read, write
from benchmarks.timing import HAS_ACCELERATE, num_repeats, rows_of, save


def forward(model: torch.nn.Module) -> Callable[[], None]:
    """One forward without gradients."""
    inputs = torch.randn(NUM_TOKENS, WIDTH)

    def run() -> None:
        with torch.no_grad():
            model(inputs)

    return run


def placed(folder: Path, library: str, device_map: dict[str, str], offload: Path | None = None) -> torch.nn.Module:
    """The model as `library` loads and places it."""
    load = __import__(library).load_checkpoint_and_dispatch
    return load(build(), str(folder), device_map=device_map, offload_folder=str(offload) if offload else None)


def main() -> None:
    """Measure and save. A cold pass begins with its files dropped from the page cache, which mincore confirms."""
    logging.disable(logging.WARNING)
    repeats = num_repeats(10)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write(folder)
        device_map = {str(number): "cpu" if number == 0 else "disk" for number in range(NUM_BLOCKS)}
        resident = build("cpu")
        resident.load_state_dict(placed(folder, "headway", {"": "cpu"}).state_dict())
        ours = placed(folder, "headway", device_map)
        cold: dict[str, tuple[Callable[[], object], torch.nn.Module | None]] = {
            "cold: read the files": (lambda: read(files), None),
            "cold: read the files, again (A/A)": (lambda: read(files), None),
            "cold: headway": (forward(ours), ours),
        }
        warm: dict[str, Callable[[], object]] = {
            "warm: all in memory": forward(resident),
            "warm: all in memory, again (A/A)": forward(resident),
            "warm: headway": forward(ours),
            "warm: headway, next forward": forward(
                ours
            ),  # the first finds the pages in the cache, but not in its tables
        }
        if HAS_ACCELERATE:
            (folder / "offload").mkdir()
            theirs = placed(folder, "accelerate", device_map, folder / "offload")
            theirs_files = [*files, *(folder / "offload").glob("*.dat")]
            cold["cold: accelerate"] = (forward(theirs), theirs)
            warm["warm: accelerate"] = forward(theirs)
        all_files = theirs_files if HAS_ACCELERATE else files
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*warm, *cold)}
        stayed, anonymous = 0.0, 0
        for repeat in range(repeats + 1):
            for cold_name, (run, _) in shifted(cold, repeat).items():
                stayed = max(stayed, drop(all_files, ours))
                before = anonymous_bytes()
                took = timed(run)
                if cold_name == "cold: headway" and repeat:
                    anonymous = max(anonymous, anonymous_bytes() - before)
                if repeat:
                    found[cold_name].append(took)
            for file in all_files:
                file.read_bytes()
            for warm_name, run in shifted(warm, repeat).items():
                if warm_name.endswith("next forward"):
                    run()
                took = timed(run)
                if repeat:
                    found[warm_name].append(took)
        note = {"share of the files left in memory before a cold pass, at most": stayed,
                "anonymous MiB that a cold forward adds, at most": round(anonymous / 2**20, 1)}  # fmt: skip
        save("offload", "s", rows_of(found, 1.0), note=json.dumps(note))


def shifted(passes: dict, repeat: int) -> dict:
    """The passes, beginning with another one each time."""
    names = list(passes)
    shift = repeat % len(names)
    return {name: passes[name] for name in names[shift:] + names[:shift]}


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
