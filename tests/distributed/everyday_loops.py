"""Everyday training loops over several loaders. Their ranks can be killed at an update and started again."""

import json
import os
import signal
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, Mixture, ProjectConfiguration

BATCH = 8
"""Samples per update over all ranks."""


class Numbers(Dataset):
    def __init__(self, first, length):
        self.first = first
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([self.first + index], dtype=torch.float64)


class Training:
    """Training run that logs the samples of each update and can kill its ranks at one update.

    Args:
        folder: Folder of the log and the checkpoints.
        stop: Update at which all ranks are killed, or None.
        is_saved: Whether the ranks are killed right after the save of that update, instead of right before it.
    """

    def __init__(self, folder, stop, is_saved):
        self.folder = Path(folder)
        self.stop = stop
        self.is_saved = is_saved
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        torch.manual_seed(2)
        self.model = torch.nn.Linear(1, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)

    def prepare(self, *datasets, shuffle=True):
        size = BATCH // self.accelerator.num_processes
        loaders = [
            DataLoader(dataset, batch_size=size, shuffle=shuffle and not isinstance(dataset, Mixture))
            for dataset in datasets
        ]
        self.model, self.optimizer, *loaders = self.accelerator.prepare(self.model, self.optimizer, *loaders)
        self.accelerator.resume()
        return loaders

    def update(self, *batches):
        with self.accelerator.accumulate(self.model):
            loss = sum(self.model(batch).square().mean() for batch in batches)
            self.accelerator.backward(loss, weight=len(batches[0]))
            self.optimizer.step()
            self.optimizer.zero_grad()
        samples = [sorted(self.accelerator.gather_for_metrics(batch)[:, 0].tolist()) for batch in batches]
        self.log(update=self.accelerator.num_updates, samples=samples)

    def save(self):
        is_end = self.stop is not None and self.accelerator.num_updates >= self.stop
        if not is_end or self.is_saved:
            self.accelerator.save_state()
        if is_end:
            self.accelerator.wait_for_everyone()
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluate(self, loader):
        with torch.no_grad():
            found = [self.accelerator.gather_for_metrics(self.model(batch).square()) for batch in loader]
        self.log(evaluated_after=self.accelerator.num_updates, loss=torch.cat(found).mean().item())

    def log(self, **line):
        if self.accelerator.is_main_process:
            with (self.folder / "log").open("a") as log:
                log.write(json.dumps(line) + "\n")

    def end(self):
        model = self.accelerator.unwrap_model(self.model)
        self.log(weights=[each.tolist() for each in model.parameters()])


def zip_loaders(training):
    first, second = training.prepare(Numbers(0, 40), Numbers(100, 40))
    for _ in training.accelerator.epochs(3):
        for pair in zip(first, second):
            training.update(*pair)
            training.save()


def zip_a_repeated_shorter_loader(training):
    long, short = training.prepare(Numbers(0, 56), Numbers(100, 24))
    for _ in training.accelerator.epochs(2):
        for pair in zip(long, cycle_loader(short)):
            training.update(*pair)
            training.save()


def cycle_loader(loader):
    while True:
        yield from loader


def take_turns(training):
    first, second = training.prepare(Numbers(0, 40), Numbers(100, 24))
    for _ in training.accelerator.epochs(3):
        for loader in (first, second):
            for batch in loader:
                training.update(batch)
                training.save()


def alternate(training):
    first, second = training.prepare(Numbers(0, 40), Numbers(100, 40))
    for _ in training.accelerator.epochs(3):
        for one, other in zip(first, second):
            training.update(one)
            training.update(other)
            training.save()  # saving between the two updates would lose `other`, which has been read already


def evaluate_in_mid_epoch(training):
    loader, evaluation = training.prepare(Numbers(0, 80), Numbers(500, 24))
    for _ in training.accelerator.epochs(2):
        for batch in loader:
            training.update(batch)
            if training.accelerator.num_updates % 3 == 0:
                training.evaluate(evaluation)
            training.save()


def follow_a_curriculum(training):
    mixture = Mixture(
        {"easy": Numbers(0, 30), "hard": Numbers(100, 50)},
        weights={0: {"easy": 1, "hard": 0}, 6: {"easy": 0.5, "hard": 0.5}, 12: {"easy": 0, "hard": 1}},
        samples_per_update=BATCH,
        num_samples=20 * BATCH,
        adds_source=False,
    )
    (loader,) = training.prepare(mixture)
    for _ in training.accelerator.epochs(1):
        for batch in loader:
            training.update(batch)
            training.save()


def change_the_loader(training):
    """Switch to another loader at update 6, as a hand-written curriculum does."""
    easy, hard = training.prepare(Numbers(0, 80), Numbers(100, 80))
    for epoch in training.accelerator.epochs(2):
        if epoch == 0:
            for batch in islice(easy, 6 - training.accelerator.num_updates):
                training.update(batch)
                training.save()
        else:
            for batch in hard:
                training.update(batch)
                training.save()


LOOPS = {
    each.__name__: each
    for each in (
        zip_loaders,
        zip_a_repeated_shorter_loader,
        take_turns,
        alternate,
        evaluate_in_mid_epoch,
        follow_a_curriculum,
        change_the_loader,
    )
}


def run(name, folder, stop=None, is_saved=True):
    training = Training(folder, stop, is_saved)
    LOOPS[name](training)
    training.end()
