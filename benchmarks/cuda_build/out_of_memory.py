"""Memory that runs out in torch's own allocator, on one and two ranks, whole and fragmented: what Headway makes of it.

`python -m benchmarks.cuda_build.out_of_memory` runs on the simulated runtime (`make cuda` sets it up). Every case trains on a small
device, once with whole free memory and once with fragmented memory on the last rank, and on a large device that fits a whole batch.
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
"""MiB of a context, of cuBLAS's workspaces on each device, and of further memory on all devices together (small or large)."""
ROWS, WIDTH, UPDATES = 2048, 8192, 3
HOLE, NUM_HOLES = 8, 6
"""MiB of each free hole with one device, and number of holes. Each activation of a whole batch takes 64 MiB."""


class Net(torch.nn.Module):
    """A perceptron with few weights, and several activations of 64 MiB for 2048 rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(16, WIDTH), torch.nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.down(torch.nn.functional.gelu(self.up(x)))
        return {"loss": mse_loss(out, y), "logits": out}


def make_data(num_rows: int) -> torch.utils.data.TensorDataset:
    """Return a dataset of random rows, with the reversed rows as targets."""
    x = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x.flip(1))


def fragment_memory(num_ranks: int) -> list[torch.Tensor]:
    """Allocate all blocks of one segment, free every second one, and return the others, which keep the holes apart."""
    size = HOLE * MIB // num_ranks
    torch.empty(
        2 * NUM_HOLES * size, dtype=torch.uint8, device="cuda"
    )  # reserves the segment that the blocks are cut from
    return [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2 * NUM_HOLES)][::2]


Result = dict[str, Any]
"""The trained "model", the batch or micro-batch sizes "tried", and the size "found"."""


def update(accelerator: Accelerator, model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Run one micro-step."""
    with accelerator.accumulate(model):
        accelerator.backward(model(x, y)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def train_in_loop(accelerator: Accelerator, rows: int = ROWS) -> Result:
    """Train with automatic micro-batching in a loop over micro-batches."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(make_data(UPDATES * rows), batch_size=rows // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sizes: list[int] = []
    for batch in loader:
        for x, y in accelerator.microbatches(batch):
            sizes.append(len(x))
            update(accelerator, model, optimizer, x, y)
    return {"model": model, "tried": sizes[:1], "found": sizes[-1]}


def train_with_function(accelerator: Accelerator) -> Result:
    """Train with automatic micro-batching through forward_backward."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(make_data(UPDATES * ROWS), batch_size=ROWS // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sizes: list[int] = []

    def compute_loss(microbatch: Any) -> torch.Tensor:
        sizes.append(len(microbatch[0]))
        return model(*microbatch)["loss"]  # type: ignore[no-any-return]

    for batch in loader:
        accelerator.forward_backward(batch, compute_loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "tried": sizes[:1], "found": sizes[-1]}


def make_search(**options: Any) -> Callable[[Accelerator], Result]:
    """Return a function that trains with find_executable_batch_size and keeps the global batch by accumulation."""

    def run(accelerator: Accelerator) -> Result:
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
            loader = torch.utils.data.DataLoader(make_data(UPDATES * ROWS), batch_size=batch_size)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for x, y in loader:
                update(accelerator, model, optimizer, x, y)
            return model

        model = train()
        return {"model": model, "tried": tried, "found": tried[-1]}

    return run


def make_trainer_run(folder: str = "build/out_of_memory", **options: Any) -> Callable[[Accelerator], Result]:
    """Return a function that trains with Headway's Trainer, which makes its own Accelerator."""

    def run(accelerator: Accelerator) -> Result:
        rows = [{"x": x, "y": y} for x, y in make_data(UPDATES * ROWS)]
        size = {"per_device_train_batch_size": ROWS // accelerator.num_processes, **options}
        arguments = TrainingArguments(
            output_dir=folder, max_steps=UPDATES, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant",
            max_grad_norm=0.0, save_strategy="no", report_to="none", disable_tqdm=True, seed=3, **size,
        )  # fmt: skip
        model = Net()
        make_trainer_run = Trainer(model=model, args=arguments, train_dataset=rows)
        make_trainer_run.train()
        found = (
            "unchanged, in micro-batches" if size.get("auto_find_batch_size") else make_trainer_run._train_batch_size
        )
        return {"model": model, "tried": [size["per_device_train_batch_size"]], "found": found}

    return run


CASES: dict[str, tuple[Callable[[Accelerator], Result], bool]] = {
    'microbatching="auto", loop over micro-batches': (train_in_loop, True),
    'microbatching="auto", forward_backward': (train_with_function, True),
    "find_executable_batch_size": (make_search(), False),
    'find_executable_batch_size(search="largest")': (make_search(search="largest"), False),
    "the Trainer, auto_find_batch_size": (make_trainer_run(auto_find_batch_size=True), False),
    'the Trainer, per_device_train_batch_size="largest"': (
        make_trainer_run(per_device_train_batch_size="largest"),
        False,
    ),
}


def run_rank(name: str, form: str) -> None:
    """Train one case on this rank. Rank 0 saves the weights, and prints the sizes and the allocator's counts.

    Args:
        name: Name of the case.
        form: "whole", or "in holes" to fragment the memory of the last rank.
    """
    run, is_automatic = CASES[name]
    accelerator = Accelerator(microbatching="auto" if is_automatic else None)
    blocks = fragment_memory(accelerator.num_processes) if form == "in holes" and accelerator.is_last_process else []
    result = run(accelerator)
    device = torch.device("cuda", torch.cuda.current_device())
    stats = torch.cuda.memory_stats()
    counts = [stats["num_ooms"], stats["num_alloc_retries"], stats["reserved_bytes.all.peak"] // MIB]
    all_counts = accelerator.gather(torch.tensor([counts], device=device))
    weights = torch.cat([p.detach().double().flatten() for p in result["model"].parameters()]).cpu()
    if accelerator.is_main_process:
        torch.save(weights, os.environ["WEIGHTS"])
        report = {"tried": result["tried"], "found": result["found"], "counts": all_counts.amax(0).tolist()}
        print(json.dumps(report), flush=True)
    del blocks
    accelerator.end_training()


def run_case(name: str, form: str, num_ranks: int, num_mib: int, weights: Path) -> Result:
    """Launch a case on ranks with `num_mib` MiB each besides the context, and return rank 0's report with its weights."""
    environment = {
        **os.environ, "SIMULATED_CUDA_DEVICES": "2", "SIMULATED_CUDA_MIB": str(CONTEXT + num_mib), "OMP_NUM_THREADS": "1",
        "SIMULATED_CUDA_CONTEXT_MIB": str(CONTEXT), "PYTHONPATH": str(ROOT), "WEIGHTS": str(weights),
    }  # fmt: skip
    command = [sys.executable, "-m", "headway", "launch", "-n", str(num_ranks), "-q", __file__, name, form]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    if finished.returncode or not lines:
        sys.exit(finished.stderr)
    report: Result = json.loads(lines[0])
    return {**report, "weights": torch.load(weights)}


def main() -> None:
    """Print the table."""
    print(
        "| | ranks | free memory | rows per rank | rows that fit | out-of-memory errors | retries | reserved MiB | "
        "difference of weights |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    weights = ROOT / "build" / "weights.pt"
    for name in sys.argv[1:] or CASES:
        for num_ranks in (1, 2):
            reference = run_case(name, "whole", num_ranks, LARGE, weights)
            for form in ("whole", "in holes"):
                small = WORKSPACES + SMALL // num_ranks
                result = run_case(name, form, num_ranks, small, weights)
                difference = f"{(result['weights'] - reference['weights']).abs().max():.0e}"
                if result["tried"][0] == "largest":
                    difference = "other batches"
                cells = [name, num_ranks, form, result["tried"][0], result["found"], *result["counts"], difference]
                print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2] in ("whole", "in holes"):
        run_rank(*sys.argv[1:])
    else:
        main()
