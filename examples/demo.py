"""The project's demo: a small GPT survives an out-of-memory error and a SIGKILL, and ends with the loss of an undisturbed run.

    make demo
    python examples/demo.py            the same, with the Python that has Headway installed

Nothing is simulated: it starts two processes, sets a memory limit that makes an allocation fail, sends a signal, and writes
checkpoints to the disk. It runs on the CPU, so that the result is the same on every machine.
On a GPU, try `headway launch examples/text.py`.
"""

import math
import os
import re
import shutil
import subprocess
import sys
import time
import webbrowser
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = Path("runs/demo")
HEADWAY = [sys.executable, "-m", "headway"]


def run(title: str, command: list[str]) -> str:
    """Print a title and the command, run it, and return what it printed.

    Raises:
        SystemExit: If the command fails.
    """
    command_line = " ".join(["headway", *command]).replace(f"{HERE}{os.sep}", "examples/")
    print(f"\n== {title}\n$ {command_line}", flush=True)
    # Make malloc request large blocks from the system and return them. Otherwise a batch could reuse the former batch's memory,
    # and would never reach the demo's limit.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    process = subprocess.Popen(
        [*HEADWAY, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(f"  {line}", end="", flush=True)
        lines.append(line)
    if process.wait() != 0:
        raise SystemExit(f"the command failed with exit code {process.returncode}")
    return "".join(lines)


def train(title: str, name: str, *flags: str) -> tuple[float, str]:
    """Train one of the two runs, and return its final loss and its output."""
    restarts = ["--max_restarts", "1"] if flags else []
    script = [str(HERE / "demo_training.py"), "--folder", str(FOLDER / name), *flags]
    output = run(title, ["launch", "--cpu", "-n", "2", *restarts, *script])
    losses = re.findall(r"loss after \d+ updates: (\S+)", output)
    return float(losses[-1]), output


def main() -> None:
    start = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    undisturbed, _ = train("1 of 3: a small GPT, two processes, nothing happens", "undisturbed")
    troubled, output = train("2 of 3: memory runs out on rank 1, then rank 0 is killed", "troubled", "--trouble")
    # A batch that is split is summed in another order. In plain PyTorch, micro-batches of 4 rows instead of 16 change this loss
    # by 4e-6 within 40 updates. Other sizes and machines change it more, because AdamW amplifies such differences.
    if not math.isclose(undisturbed, troubled, rel_tol=1e-4):
        raise SystemExit(f"the runs differ: loss {undisturbed} without trouble, {troubled} with it")
    page = (FOLDER / "report.html").resolve()
    runs = [str(FOLDER / name) for name in ("undisturbed", "troubled")]
    run("3 of 3: both runs on one page", ["report", *runs, "--out", str(page)])

    print(f"\nLoss without trouble: {undisturbed:.6f}\nLoss with trouble:    {troubled:.6f}")
    killed_at = re.search(r"update (\d+), micro-step", output)
    resumed_at = re.search(r"resumed after (\d+) updates", output)
    if killed_at is None or resumed_at is None:
        raise SystemExit("the second run was not killed and resumed; see its output above")
    if undisturbed != troubled:
        print("The last digits differ because the split batch was summed in another order.")
    num_lost = int(killed_at[1]) - int(resumed_at[1])
    print(
        "The out-of-memory error cost one batch, which ran again in smaller micro-batches. "
        f"The kill cost {num_lost} updates."
    )
    print(f"Open the report: file://{page}")
    if sys.stdout.isatty() and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(page.as_uri())
    print(
        "\nNext:\n"
        "  source .venv/bin/activate\n"
        "  headway launch -n 2 --cpu examples/cookbook/early_stopping.py   the first of ten recipes (docs/cookbook.md)\n"
        "  headway estimate --script examples/text.py --device h100        the memory that a training takes, before you run it\n"
        "  headway launch --as accelerate your_script.py                   your own script, if it imports Accelerate\n"
        f"The demo took {time.monotonic() - start:.0f} s."
    )


if __name__ == "__main__":
    main()
