"""A small training run with every kind of saved state, and a hash of everything that a load may change."""

import hashlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from headway import Accelerator, ProjectConfiguration


class WithExtra(torch.nn.Module):
    """A layer with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3))
        self.seen = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["calls"] += 1
        return x @ self.weight

    def get_extra_state(self) -> Any:
        return dict(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = dict(state)


class UserState:
    """A user's object with a state dict."""

    def __init__(self) -> None:
        self.state = {"count": 1, "pair": (1, 2), "scores": torch.ones(3), "names": ["a"], "array": numpy.arange(4)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {name: state[name] for name in self.state}


class Stream(IterableDataset[tuple[torch.Tensor]]):
    """An iterable dataset of rows, shuffled by its own generator."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        for number in torch.randperm(len(self.rows), generator=self.generator).tolist():
            yield (self.rows[number],)


class Run:
    """A small run with every kind of saved state.

    Args:
        folder: Folder for its checkpoints.
        precision: Value of `mixed_precision`.
        num_workers: Number of workers of its loader.
        is_stream: Whether it reads an iterable dataset.
    """

    def __init__(self, folder: Path, precision: str = "no", num_workers: int = 0, is_stream: bool = False) -> None:
        torch.manual_seed(3)
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=False)
        self.accelerator = Accelerator(cpu=True, project_config=project, mixed_precision=precision,
                                       gradient_accumulation_steps=2)  # fmt: skip
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), WithExtra(), torch.nn.Dropout(0.1))
        optimizers = [
            torch.optim.AdamW(model[0].parameters()),
            torch.optim.SGD([*model[1].parameters(), *model[2].parameters()], lr=0.1, momentum=0.9),
        ]
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 1.0),
            torch.optim.lr_scheduler.OneCycleLR(optimizers[1], max_lr=0.2, total_steps=40),
        ]
        rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        data = Stream(rows) if is_stream else TensorDataset(rows)
        loader = DataLoader(data, batch_size=2, shuffle=None if is_stream else True, num_workers=num_workers)
        self.custom = UserState()
        self.accelerator.register_for_checkpointing(self.custom)
        self.model, *prepared = self.accelerator.prepare(model, *optimizers, *schedules, loader)
        self.optimizers, self.schedules, self.loader = prepared[:2], prepared[2:4], prepared[4]

    def train(self, num: int, then: Callable[[], object] = lambda: None) -> None:
        """Train for `num` micro-batches, and call `then` inside the loop after the last of them."""
        for number, (x,) in enumerate(self.loader, 1):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(x).square().mean())
                for each in [*self.optimizers, *self.schedules]:
                    each.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
            if number == num:
                then()
                return

    def print(self) -> str:
        """Return a hash of everything that a load may change."""
        state = self.accelerator._checkpoint_state
        found = [
            self.model.state_dict(), [each.state_dict() for each in [*self.optimizers, *self.schedules]], self.custom.state,
            self.loader.state_dict(), self.loader.seed, state.progress.epoch, state.run.run_id, state.run.clock.num_updates,
            self.accelerator.gradient_accumulation_steps, [each.num_updates for each in self.optimizers],
            sorted(vars(self.schedules[0].scheduler)), sorted(vars(self.schedules[1].scheduler)), state.objects.read_rng_states(),
            state.run.windows.list_nominal_weights(state.objects.models), state.run.precision.state_dict(),
        ]  # fmt: skip
        return hashlib.sha256(pickle.dumps(_to_plain(found))).hexdigest()


def _to_plain(value: Any) -> Any:
    """Convert a value to one whose pickle depends only on its contents."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, numpy.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(repr(key), _to_plain(item)) for key, item in value.items()]
    return [_to_plain(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def save_checkpoint(folder: Path, **settings: Any) -> Path:
    """Save a checkpoint in the middle of an epoch and return its path."""
    run = Run(folder, **settings)
    run.train(6, lambda: run.accelerator.save_state(str(folder / "saved")))
    return folder / "saved"


RUNS: list[dict[str, Any]] = [{}, {}, {"precision": "fp16"}, {"num_workers": 1}, {"is_stream": True}]
"""Arguments of `Run` for each kind of run. The plain one is listed twice, so that it is used more often."""
