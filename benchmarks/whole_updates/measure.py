"""Time of an update with Muon under fsdp, compared with AdamW and with a hand-written distributed Muon.

`python -m benchmarks.whole_updates.measure` runs two and then four gloo ranks; `python -m benchmarks.whole_updates.measure
4` runs only four. The model is a Llama with four layers. The three optimizers
take turns, so that other activity on the machine affects all of them. Only the optimizer's step is timed.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from headway import Accelerator
from tests.distributed.ranks import run_ranks

WIDTH, INNER, LAYERS, ROUNDS = 256, 688, 4, 7


def build_model() -> torch.nn.Module:
    """Return a small Llama with fixed initial weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def split_parameters(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the parameters for Muon (matrices inside the blocks), and all other parameters."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    known = set(map(id, matrices))
    return matrices, [p for _, p in named if id(p) not in known]


class HandWrittenMuon:
    """Hand-written Muon for sharded matrices, in the usual way: ranks gather one matrix after the other.

    Args:
        matrices: Sharded parameters that Muon updates.
        rest: Sharded parameters that AdamW updates.
    """

    def __init__(self, matrices: list[Any], rest: list[Any]) -> None:
        self._matrices = matrices
        self._adamw = torch.optim.AdamW(rest, lr=1e-3, foreach=True)
        rank, count = dist.get_rank(), dist.get_world_size()
        self._own = {n: torch.nn.Parameter(torch.empty(p.shape)) for n, p in enumerate(matrices) if n % count == rank}
        self._muon = torch.optim.Muon(self._own.values(), lr=0.02)

    def step(self) -> None:
        """Update all parameters."""
        rank, count = dist.get_rank(), dist.get_world_size()
        for number, parameter in enumerate(self._matrices):
            owner = number % count
            for source, name in ((parameter.grad, "grad"), (parameter, "data")):
                local = source.to_local().detach().contiguous()
                shards = [torch.empty_like(local) for _ in range(count)] if rank == owner else None
                dist.gather(local, shards, dst=owner)
                if shards is not None:
                    setattr(self._own[number], name, torch.cat(shards))
        self._muon.step()
        for number, parameter in enumerate(self._matrices):
            owner, local = number % count, parameter.to_local().detach()
            shards = list(self._own[number].detach().chunk(count)) if rank == owner else None
            dist.scatter(local, shards, src=owner)
        self._adamw.step()


def measure() -> dict[str, list[float]]:
    """Return the wall seconds of each step on this rank by optimizer, and its CPU seconds under "<optimizer>, CPU"."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    loops: dict[str, tuple[Any, Callable[[], None]]] = {}
    for name in ("AdamW", "Muon", "by hand"):
        model = build_model()
        matrices, rest = split_parameters(model)
        if name == "Muon":
            optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3, foreach=True)]
        else:
            optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)]
        model, *prepared = accelerator.prepare(model, *optimizers)
        if name == "by hand":
            loops[name] = model, HandWrittenMuon(*split_parameters(model)).step
        else:
            loops[name] = model, partial(_step_all, accelerator, [optimizer.optimizer for optimizer in prepared])
    ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(1))
    times: dict[str, list[float]] = {name: [] for name in loops}
    cpu_times: dict[str, list[float]] = {f"{name}, CPU": [] for name in loops}
    for _ in range(ROUNDS):
        for name, (model, step) in loops.items():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            times[name].append(time.perf_counter() - wall)
            cpu_times[f"{name}, CPU"].append(time.process_time() - cpu)
            for parameter in model.parameters():
                parameter.grad = None
    return times | cpu_times


def _step_all(accelerator: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        accelerator.strategy.step_optimizer(optimizer, accelerator._run.precision, None)


if __name__ == "__main__":
    for count in map(int, sys.argv[1:] or ("2", "4")):
        print(f"{count} ranks")
        for label, seconds in run_ranks(measure, count, timeout=560)[0].items():
            print(
                f"  {label:14s} median {statistics.median(seconds[2:]) * 1e3:7.1f} ms, minimum {min(seconds) * 1e3:7.1f} ms"
            )
