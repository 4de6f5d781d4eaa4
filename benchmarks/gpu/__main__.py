"""Command line: `python -m benchmarks.gpu` runs all steps, `python -m benchmarks.gpu gpt2 saves` some, and `--list` lists them.

All steps together take at most nine minutes (`--minutes` changes that), and need the checkout and a Python with torch. `--list`
shows the seconds reserved for each step. Try the command line first with `--device cpu`, which runs the same steps at a small
size. Each row is saved as soon as it is measured, in `<kind of device>.json` and `.md` in the folder `--out`, so an interrupted
run loses only its last row. benchmarks/README.md explains the steps, and CONTRIBUTING.md has the command line for a machine
without a network.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.plan import ON_CPU, SIZES, STEPS, TOTAL, find_missing, select_steps

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT / "src"))  # Headway need not be installed
REQUIRED_PACKAGES = ("torch", "numpy", "safetensors", "xxhash", "click", "cloudpickle", "rich", "psutil", "yaml")
"""Packages without which no step runs."""
OPTIONAL_PACKAGES = ("transformers", "accelerate", "pytest", "triton")
"""Packages that only some steps or rows use."""


def find_accelerator() -> str:
    """Return the kind of accelerator that torch finds, such as "cuda", or "" if there is none.

    Another process asks torch, so that this one holds no device memory.

    Raises:
        ValueError: If torch cannot be imported or fails.
    """
    code = "import torch; device = torch.accelerator.current_accelerator(check_available=True); print(device.type if device else '')"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if finished.returncode:
        raise ValueError(f"torch does not work here: {(finished.stderr.strip() or 'no output').splitlines()[-1]}")
    return finished.stdout.strip()


def name_results(device: str) -> str:
    """Return the name of the result files for a device: its type, or "simulated" for the simulated CUDA runtime."""
    kind = device.partition(":")[0]
    return "simulated" if kind == "cuda" and not find_missing(["simulated_cuda"]) else kind


def unpack_wheels(wheels: Path | None, folder: str) -> list[str]:
    """Unpack all wheels into a folder, and return the folders to import from."""
    if wheels is None:
        return []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    sys.path.append(folder)
    return [folder]


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with a message if nothing can run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Run the benchmarks and tests that need an accelerator."
    )
    parser.add_argument(
        "steps", nargs="*", metavar="step", help=f"any of {', '.join(step.name for step in STEPS)}; default: all"
    )
    parser.add_argument("--list", action="store_true", help="list the steps and the time reserved for each, and exit")
    parser.add_argument("--device", help="torch's name of the device; default: this machine's accelerator")
    parser.add_argument(
        "--size", choices=SIZES, help="size of the workloads; default: full on an accelerator, small on a CPU"
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder for <kind>.json and <kind>.md; default: benchmarks/gpu"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"time limit for all steps together; default: {TOTAL / 60:.0f}, or {ON_CPU / 60:.0f} on a CPU",
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels for packages that the machine lacks")
    options = parser.parse_args(words)
    try:
        options.steps = select_steps(options.steps)
    except ValueError as error:
        parser.error(str(error))
    if options.wheels is not None and not list(options.wheels.glob("*.whl")):
        parser.error(f"--wheels {options.wheels} contains no .whl file")
    if options.list:
        return options
    if find_missing(["torch"]):
        parser.error(f"{sys.executable} has no torch; use a Python that has it")
    try:
        options.device = options.device or find_accelerator()
    except ValueError as error:
        parser.error(str(error))
    if not options.device:
        parser.error(
            "torch finds no accelerator on this machine; `--device cpu` runs the steps on the CPU at a small size"
        )
    options.minutes = options.minutes or (ON_CPU if options.device == "cpu" else TOTAL) / 60
    options.size = options.size or ("small" if options.device == "cpu" else "full")
    if options.device == "cpu" and options.size == "full":
        parser.error("--size full is meant for an accelerator; on a CPU it is small or smallest")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps. Return 0 if all ended well, 1 if one did not, and 2 if nothing can run."""
    options = parse_arguments(words)
    if options.list:
        for step in STEPS:
            sys.stdout.write(f"{step.name:<18}{step.seconds:>4.0f} s  {step.question}\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        path = unpack_wheels(options.wheels, folder)
        if missing := find_missing((*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES)):
            required = find_missing(REQUIRED_PACKAGES)
            effect = f"nothing runs without {', '.join(required)}" if required else "steps that need them are left out"
            sys.stdout.write(
                f"not installed: {', '.join(missing)}: {effect}; install them, or pass their wheels with --wheels\n"
            )
        if find_missing(REQUIRED_PACKAGES):
            return 2
        from benchmarks.gpu.record import Record
        from benchmarks.gpu.runner import run_all

        record = Record(options.out, name_results(options.device))
        ended_well = run_all(options.steps, options.device, options.size, record, 60 * options.minutes, path)
    sys.stdout.write("\n" + record.summarize([step.name for step in options.steps]))
    sys.stdout.write(f"\n{record.json}\n{record.table}\n")
    return 0 if ended_well else 1


if __name__ == "__main__":
    sys.exit(main())
