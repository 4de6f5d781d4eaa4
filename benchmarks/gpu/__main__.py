"""The command line: `python -m benchmarks.gpu` runs all steps, `python -m benchmarks.gpu gpt2 saves` some, `--list` names them."""

import argparse
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.plan import ON_CPU, SIZES, STEPS, TOTAL, lacking, named

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT / "src"))  # on a bare machine nothing is installed
NEEDED = ("torch", "numpy", "safetensors", "xxhash", "click", "cloudpickle", "rich", "psutil", "yaml")
"""Nothing runs without these."""
USED = ("transformers", "accelerate", "pytest", "triton")
"""Some steps, or rows of them, use these."""


def accelerator() -> str:
    """The kind of accelerator that torch finds; empty: none. Asked in another process, so that this one holds no device memory.

    Raises:
        ValueError: torch fails.
    """
    code = "import torch; found = torch.accelerator.current_accelerator(check_available=True); print(found.type if found else '')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if ran.returncode:
        raise ValueError(f"torch does not work here: {(ran.stderr.strip() or 'it said nothing').splitlines()[-1]}")
    return ran.stdout.strip()


def kind_of(device: str) -> str:
    """Under which name the results are kept."""
    kind = device.partition(":")[0]
    return "simulated" if kind == "cuda" and not lacking(["simulated_cuda"]) else kind


def unpack(wheels: Path | None, folder: str) -> list[str]:
    """Unpack all wheels into the folder; returns what to import from."""
    if wheels is None:
        return []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    sys.path.append(folder)
    return [folder]


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
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
    given = parser.parse_args(words)
    try:
        given.steps = named(given.steps)
    except ValueError as error:
        parser.error(str(error))
    if given.wheels is not None and not list(given.wheels.glob("*.whl")):
        parser.error(f"--wheels {given.wheels} contains no .whl file")
    if given.list:
        return given
    if lacking(["torch"]):
        parser.error(f"{sys.executable} has no torch; use a Python that has it")
    try:
        given.device = given.device or accelerator()
    except ValueError as error:
        parser.error(str(error))
    if not given.device:
        parser.error(
            "torch finds no accelerator on this machine; `--device cpu` runs the steps on the CPU at a small size"
        )
    given.minutes = given.minutes or (ON_CPU if given.device == "cpu" else TOTAL) / 60
    given.size = given.size or ("small" if given.device == "cpu" else "full")
    if given.device == "cpu" and given.size == "full":
        parser.error("--size full is meant for an accelerator; on a CPU it is small or smallest")
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Run; the exit code is 1 where a step did not end well, and 2 where nothing can run."""
    given = arguments(words)
    if given.list:
        for step in STEPS:
            sys.stdout.write(f"{step.name:<18}{step.seconds:>4.0f} s  {step.question}\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        path = unpack(given.wheels, folder)
        if missing := lacking((*NEEDED, *USED)):
            told = (
                "nothing runs without " + ", ".join(lacking(NEEDED))
                if lacking(NEEDED)
                else "what needs them is left out"
            )
            sys.stdout.write(
                f"not installed: {', '.join(missing)}: {told}; install them, or bring their wheels (--wheels)\n"
            )
        if lacking(NEEDED):
            return 2
        from benchmarks.gpu.record import Record
        from benchmarks.gpu.runner import run_all

        record = Record(given.out, kind_of(given.device))
        ended_well = run_all(given.steps, given.device, given.size, record, 60 * given.minutes, path)
    sys.stdout.write("\n" + record.summary([step.name for step in given.steps]))
    sys.stdout.write(f"\n{record.json}\n{record.table}\n")
    return 0 if ended_well else 1


if __name__ == "__main__":
    sys.exit(main())
