"""Test the warning about a save between two updates on batches that were read together, before the second update."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration

WARNING = "a checkpoint was saved between two updates on batches that were read together"


class Run:
    """Prepared model, optimizer and two loaders of one Accelerator.

    Args:
        folder: Folder of the checkpoints.
        num_steps: Micro-batches per update.
    """

    def __init__(self, folder: Path, num_steps: int = 1) -> None:
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
        self.accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=num_steps)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loaders = [DataLoader(torch.rand(12, 1), batch_size=2) for _ in range(2)]
        self.model, self.optimizer, self.first, self.second = self.accelerator.prepare(model, optimizer, *loaders)

    def train(self, *batches: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(sum(self.model(batch).square().mean() for batch in batches))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self) -> None:
        self.accelerator.save_state()


def save_between_updates(run: Run) -> None:
    for one, other in islice(zip(run.first, run.second), 2):
        run.train(one)
        run.save()
        run.train(other)


def save_after_the_round(run: Run) -> None:
    for one, other in zip(run.first, run.second):
        run.train(one)
        run.train(other)
        run.save()


def save_after_a_joint_update(run: Run) -> None:
    for one, other in zip(run.first, run.second):
        run.train(one, other)
        run.save()


def save_in_turns(run: Run) -> None:
    first, second = iter(run.first), iter(run.second)
    for _ in range(3):
        run.train(next(first))
        run.save()
        run.train(next(second))
        run.save()


def save_with_an_evaluation(run: Run) -> None:
    for batch in run.first:
        for _ in run.second:
            pass
        run.train(batch)
        run.save()


def test_save_inside_a_round_warns_once(tmp_path: Path, caplog: Any) -> None:
    save_between_updates(Run(tmp_path))
    assert caplog.text.count(WARNING) == 1
    assert "(2 batches" in caplog.text


def test_warning_comes_before_the_second_update(tmp_path: Path, caplog: Any) -> None:
    run = Run(tmp_path)
    rounds = zip(run.first, run.second)
    one, other = next(rounds)
    run.train(one)
    run.save()
    assert WARNING not in caplog.text
    with run.accelerator.accumulate(run.model):
        assert WARNING in caplog.text
        run.accelerator.backward(run.model(other).mean())


@pytest.mark.parametrize(
    "loop", [save_after_the_round, save_after_a_joint_update, save_in_turns, save_with_an_evaluation]
)
def test_save_after_the_round_causes_no_warning(loop: Callable[[Run], None], tmp_path: Path, caplog: Any) -> None:
    loop(Run(tmp_path))
    assert WARNING not in caplog.text


def test_save_inside_a_window_causes_no_warning_because_it_resumes_at_the_start(tmp_path: Path, caplog: Any) -> None:
    save_between_updates(Run(tmp_path, num_steps=2))
    assert WARNING not in caplog.text
