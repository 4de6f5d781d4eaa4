"""Workers killed at random times in runs that keep each update in memory: each kill loses at most one update.

`python -m tests.sweep.memory --seed 7 --count 100` runs the sweep; `--layout fsdp` shards the model. Each launch is
killed ten times, in any of its ranks, up to 30 ms after the end of an update, while the state is being copied. Then the
run is compared bit for bit with an uninterrupted run that keeps nothing in memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LAYOUTS = {"ddp": ("--strategy", "ddp"), "fsdp": ("--strategy", "fsdp")}
KILLS_PER_LAUNCH = 10
SLACK = 1800

PROGRAM = """
import json, os, random, signal, sys, threading, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from headway import Accelerator, ProjectConfiguration, set_seed

NUM_EPOCHS = 6
seed, num_kills, keeps, damage = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
set_seed(0)
torch.set_num_threads(1)  # the same on one machine and on several
project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2, keep_in_memory=keeps)
accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=2)
out = os.open(f"rank{accelerator.process_index}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def tell(**what):
    os.write(out, (json.dumps(what) + "\\n").encode())


model = torch.nn.Sequential(
    torch.nn.Linear(8, 256), torch.nn.BatchNorm1d(256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 256), torch.nn.Linear(256, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
x = torch.randn(96, 8)
model, optimizer, schedule, loader = accelerator.prepare(
    model, optimizer, schedule, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
)
if damage != "none" and attempt and accelerator.is_local_main_process:
    files = sorted(Path(os.environ["HEADWAY_MEMORY"]).glob("*/update_*/*.safetensors"))
    newest = max((path.parent for path in files), key=lambda each: int(each.name.removeprefix("update_")), default=None)
    for path in [each for each in files if damage == "all" or each.parent == newest]:
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
if "HEADWAY_MEMORY" in os.environ:
    Path("folder").write_text(os.environ["HEADWAY_MEMORY"])
accelerator.wait_for_everyone()
restored = accelerator.resume("latest")
tell(begun=accelerator.num_updates, memory="update_" in str(restored and restored.folder))
draw = random.Random(f"{seed}/{attempt}")
victim, after, delay = draw.randrange(accelerator.num_processes), draw.randrange(1, 4), draw.uniform(0, 0.03)
end = accelerator.num_updates + after if attempt < num_kills else -1


def strike():
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


for epoch in accelerator.epochs(NUM_EPOCHS):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            number = accelerator.num_updates
            tell(update=number, loss=loss.item().hex(), lr=schedule.get_last_lr()[0])
            if number == end and accelerator.process_index == victim:
                threading.Thread(target=strike, daemon=True).start()
            if number % 7 == 3:
                accelerator.save_state()
weights = accelerator.get_state_dict(model)
tell(weights={name: value.double().sum().item().hex() for name, value in weights.items()})
accelerator.end_training()
"""


@dataclass
class Outcome:
    """Result of a launch.

    Attributes:
        lost: For each restart, number of updates that were repeated, counted from the rank that was furthest.
        from_memory: For each restart, whether it resumed from memory.
        problems: Violated promises.
    """

    lost: list[int] = field(default_factory=list)
    from_memory: list[bool] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def launch(folder: Path, layout: str, seed: str, num_kills: int, keeps: int, damage: str = "none") -> list[list[dict]]:
    """Launch the script with `num_kills` restarts, and return the JSON records of each rank."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    words = ["-m", "headway", "launch", "--cpu", "-n", "2", *LAYOUTS[layout], "--max_restarts", str(num_kills)]
    result = subprocess.run(
        [sys.executable, *words, "train.py", seed, str(num_kills), str(keeps), damage],
        cwd=folder, capture_output=True, text=True, timeout=SLACK, env=kept,
    )  # fmt: skip
    if result.returncode:
        raise RuntimeError(result.stderr)
    (folder / "stderr").write_text(result.stderr)
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("rank*.jsonl"))]


def compare(records: Sequence[Sequence[dict]], whole: Sequence[Sequence[dict]]) -> Outcome:
    """Return how many updates were lost, and how the records differ from those of the uninterrupted run."""
    outcome = Outcome()
    for lines, expected in zip(records, whole, strict=True):
        known = {line["update"]: line for line in expected if "update" in line}
        outcome.problems += [
            f"{line} instead of {known[line['update']]}"
            for line in lines
            if line != known.get(line.get("update"), line)
        ]
        if {line["update"] for line in lines if "update" in line} != known.keys():
            outcome.problems.append("updates are missing")
        if lines[-1] != expected[-1]:
            outcome.problems.append("the weights differ")
    furthest = [_find_last_updates(lines) for lines in records]
    for reached, again in zip(
        zip(*furthest), zip(*([line for line in lines if "begun" in line][1:] for lines in records))
    ):
        outcome.lost.append(max(reached) - again[0]["begun"])
        outcome.from_memory.append(again[0]["memory"])
    return outcome


def _find_last_updates(lines: Sequence[dict]) -> list[int]:
    """Return the last update before each restart."""
    found, last = [], 0
    for line in lines[1:]:
        if "begun" in line:
            found.append(last)
        last = line.get("update", line.get("begun", last))
    return found


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", default="7")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp")
    args = parser.parse_args()
    lost: list[int] = []
    from_memory = 0
    with tempfile.TemporaryDirectory() as name:
        whole = launch(Path(name) / "whole", args.layout, "0", 0, 0)
        done = 0
        while done < args.count:
            kills = min(KILLS_PER_LAUNCH, args.count - done)
            outcome = compare(launch(Path(name) / f"run{done}", args.layout, f"{args.seed}/{done}", kills, 1), whole)
            if outcome.problems or max(outcome.lost) > 1:
                sys.exit(f"seed {args.seed}, kills {done} to {done + kills}: {outcome}")
            lost += outcome.lost
            from_memory += sum(outcome.from_memory)
            done += kills
            print(
                f"{done} kills: {lost.count(1)} lost one update, {lost.count(0)} none; {from_memory} from memory",
                flush=True,
            )


if __name__ == "__main__":
    main()
