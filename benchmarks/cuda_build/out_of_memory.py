"""Memory that really runs out in torch's own allocator, on one and two ranks, whole and in pieces: what comes of it.

`python -m benchmarks.cuda_build.out_of_memory`, on the simulated runtime (`make cuda` sets it up). Every case is trained on a small
device, on the last rank with free memory in holes where it says so, and once more on one device on which a whole batch fits.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

from headway import Accelerator, Trainer, TrainingArguments, find_executable_batch_size

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
CONTEXT, WORKSPACES, SMALL, LARGE = 500, 64, 224, 16384
"""MiB: what a context takes, what cuBLAS takes of each device, and what one has besides, or two together."""
ROWS, WIDTH, UPDATES = 2048, 8192, 3
HOLE, NUM_HOLES = 8, 6
"""MiB of each hole where one device trains: the activations of a whole batch take 64 MiB each."""


class Net(torch.nn.Module):
    """Activations of 64 MiB for 2048 rows, several at a time, and few weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(16, WIDTH), torch.nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.down(torch.nn.functional.gelu(self.up(x)))
        return {"loss": mse_loss(out, y), "logits": out}


def data(num_rows: int) -> torch.utils.data.TensorDataset:
    x = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x.flip(1))


def holes(num_ranks: int) -> list[torch.Tensor]:
    """Blocks of one segment, of which every second is free."""
    size = HOLE * MIB // num_ranks
    torch.empty(2 * NUM_HOLES * size, dtype=torch.uint8, device="cuda")  # one segment, from which the blocks are cut
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2 * NUM_HOLES)][::2]


Found = dict[str, Any]


def update(accelerator: Accelerator, model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(x, y)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def loop(accelerator: Accelerator, rows: int = ROWS) -> Found:
    """Automatic micro-batching in a loop over the pieces."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(data(UPDATES * rows), batch_size=rows // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sizes: list[int] = []
    for batch in loader:
        for x, y in accelerator.microbatches(batch):
            sizes.append(len(x))
            update(accelerator, model, optimizer, x, y)
    return {"model": model, "tried": sizes[:1], "found": sizes[-1]}


def function(accelerator: Accelerator) -> Found:
    """The same through forward_backward."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(data(UPDATES * ROWS), batch_size=ROWS // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sizes: list[int] = []

    def loss(piece: Any) -> torch.Tensor:
        sizes.append(len(piece[0]))
        return model(*piece)["loss"]  # type: ignore[no-any-return]

    for batch in loader:
        accelerator.forward_backward(batch, loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "tried": sizes[:1], "found": sizes[-1]}


def search(**options: Any) -> Callable[[Accelerator], Found]:
    """find_executable_batch_size: the global batch stays, in as many windows as it takes."""

    def run(accelerator: Accelerator) -> Found:
        tried: list[int] = []

        @find_executable_batch_size(
            starting_batch_size=ROWS // accelerator.num_processes, keep_global_batch=True, **options
        )
        def train(batch_size: int, gradient_accumulation_steps: int) -> Any:
            tried.append(batch_size)
            accelerator.free_memory()
            accelerator.gradient_accumulation_steps = gradient_accumulation_steps
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            loader = torch.utils.data.DataLoader(data(UPDATES * ROWS), batch_size=batch_size)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for x, y in loader:
                update(accelerator, model, optimizer, x, y)
            return model

        model = train()
        return {"model": model, "tried": tried, "found": tried[-1]}

    return run


def trainer(folder: str = "build/out_of_memory", **options: Any) -> Callable[[Accelerator], Found]:
    """A Trainer, with its own Accelerator."""

    def run(accelerator: Accelerator) -> Found:
        rows = [{"x": x, "y": y} for x, y in data(UPDATES * ROWS)]
        size = {"per_device_train_batch_size": ROWS // accelerator.num_processes, **options}
        arguments = TrainingArguments(
            output_dir=folder, max_steps=UPDATES, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant",
            max_grad_norm=0.0, save_strategy="no", report_to="none", disable_tqdm=True, seed=3, **size,
        )  # fmt: skip
        model = Net()
        made = Trainer(model=model, args=arguments, train_dataset=rows)
        made.train()
        found = "as before, in pieces" if size.get("auto_find_batch_size") else made._train_batch_size
        return {"model": model, "tried": [size["per_device_train_batch_size"]], "found": found}

    return run


CASES: dict[str, tuple[Callable[[Accelerator], Found], bool]] = {
    'microbatching="auto", a loop over pieces': (loop, True),
    'microbatching="auto", forward_backward': (function, True),
    "find_executable_batch_size": (search(), False),
    'find_executable_batch_size(search="largest")': (search(search="largest"), False),
    "the Trainer, auto_find_batch_size": (trainer(auto_find_batch_size=True), False),
    'the Trainer, per_device_train_batch_size="largest"': (trainer(per_device_train_batch_size="largest"), False),
}


def a_rank(name: str, form: str) -> None:
    run, is_automatic = CASES[name]
    accelerator = Accelerator(microbatching="auto" if is_automatic else None)
    kept = holes(accelerator.num_processes) if form == "in holes" and accelerator.is_last_process else []
    found = run(accelerator)
    device = torch.device("cuda", torch.cuda.current_device())
    stats = torch.cuda.memory_stats()
    counts = [stats["num_ooms"], stats["num_alloc_retries"], stats["reserved_bytes.all.peak"] // MIB]
    everywhere = accelerator.gather(torch.tensor([counts], device=device))
    weights = torch.cat([p.detach().double().flatten() for p in found["model"].parameters()]).cpu()
    if accelerator.is_main_process:
        torch.save(weights, os.environ["WEIGHTS"])
        told = {"tried": found["tried"], "found": found["found"], "counts": everywhere.amax(0).tolist()}
        print(json.dumps(told), flush=True)
    del kept
    accelerator.end_training()


def ran(name: str, form: str, num_ranks: int, num_mib: int, weights: Path) -> Found:
    environment = {
        **os.environ, "SIMULATED_CUDA_DEVICES": "2", "SIMULATED_CUDA_MIB": str(CONTEXT + num_mib), "OMP_NUM_THREADS": "1",
        "SIMULATED_CUDA_CONTEXT_MIB": str(CONTEXT), "PYTHONPATH": str(ROOT), "WEIGHTS": str(weights),
    }  # fmt: skip
    command = [sys.executable, "-m", "headway", "launch", "-n", str(num_ranks), "-q", __file__, name, form]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(done.stderr)
    found: Found = json.loads(lines[0])
    return {**found, "weights": torch.load(weights)}


def main() -> None:
    print(
        "| | ranks | free memory | rows of a rank | rows that fit | errors | retries | reserved MiB | weights differ by |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    weights = ROOT / "build" / "weights.pt"
    for name in sys.argv[1:] or CASES:
        for num_ranks in (1, 2):
            whole = ran(name, "whole", num_ranks, LARGE, weights)
            for form in ("whole", "in holes"):
                small = WORKSPACES + SMALL // num_ranks
                found = ran(name, form, num_ranks, small, weights)
                off = f"{(found['weights'] - whole['weights']).abs().max():.0e}"
                if found["tried"][0] == "largest":
                    off = "other batches"
                cells = [name, num_ranks, form, found["tried"][0], found["found"], *found["counts"], off]
                print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2] in ("whole", "in holes"):
        a_rank(*sys.argv[1:])
    else:
        main()
