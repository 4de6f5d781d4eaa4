"""Test the epoch in which a resumed run continues: no epoch is trained twice or left out."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration

EPOCHS = 4


class Killed(Exception):
    """Error that stands for a kill. The next process starts only from the checkpoint."""


def read_side_by_side(one, other):
    yield from zip(one, other)


def read_unequal_lengths(one, other):
    """Read both loaders in parallel. The first one is never read to its end."""
    yield from zip(other, one)


def read_until_break(one, _):
    for step, batch in enumerate(one):
        yield batch, None
        if step == 1:
            break


def read_until_islice(one, _):
    yield from ((batch, None) for batch in islice(one, 2))


def read_one_loader(one, _):
    yield from ((batch, None) for batch in one)


def read_in_turn(one, other):
    """Read one loader after the other. A kill in the second pass must not repeat the first."""
    for loader in (one, other):
        yield from ((batch, None) for batch in loader)


def read_one_loader_twice(one, other):
    for loader in (one, other, one):
        yield from ((batch, None) for batch in loader)


def read_in_turn_with_set_epoch(one, other):
    for loader in (one, other):
        loader.set_epoch(one.epoch if loader is one else other.epoch)
        yield from ((batch, None) for batch in loader)


def read_side_by_side_and_then_one(one, other):
    yield from zip(one, other)
    yield from ((batch, None) for batch in one)


PASSES = {
    "in turn": (read_in_turn, 12, 8), "there and back": (read_one_loader_twice, 12, 8),
    "set_epoch": (read_in_turn_with_set_epoch, 12, 8),
    "beside and after": (read_side_by_side_and_then_one, 12, 12),
    "side by side": (read_side_by_side, 12, 12), "unequal": (read_unequal_lengths, 12, 6), "break": (read_until_break, 12, 12),
    "islice": (read_until_islice, 12, 12), "one": (read_one_loader, 12, 12),
}  # fmt: skip


class Run:
    """Training in several processes.

    Args:
        folder: Project folder.
        kind: Key of `PASSES`.
        kills: Numbers of the saves, counted over all processes, after which the process is killed.
        saves_each_update: Whether to save after each update. Otherwise, only at the end of each epoch.
    """

    def __init__(self, folder, kind, kills=(), saves_each_update=True):
        self.folder, self.kills, self.saves_each = folder, set(kills), saves_each_update
        self.read, *self.lengths = PASSES[kind]
        self.seen, self.num_saves = [], 0

    def save(self, accelerator):
        accelerator.save_state()
        self.num_saves += 1
        if self.num_saves in self.kills:
            raise Killed

    def run_process(self):
        """Run one process from the latest checkpoint to its end. Return the number of updates."""
        torch.manual_seed(0)
        project = ProjectConfiguration(self.folder, automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(cpu=True, project_config=project)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        loaders = [DataLoader([float(row) for row in range(n)], batch_size=4, shuffle=True) for n in self.lengths]
        evaluated = DataLoader([0.0, 1.0], batch_size=1)
        model, optimizer, one, other, evaluated = accelerator.prepare(model, optimizer, *loaders, evaluated)
        accelerator.resume("latest")
        del self.seen[accelerator.num_updates :]
        for epoch in accelerator.epochs(EPOCHS):
            for batch, _ in self.read(one, other):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch[:, None].float()).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                self.seen.append((epoch, batch.tolist()))
                if self.saves_each:
                    self.save(accelerator)
            for _ in evaluated:
                pass
            self.save(accelerator)
        return accelerator.num_updates

    def run_to_the_end(self):
        """Start processes until one ends. Return the number of updates and the (epoch, batch) pairs."""
        for _ in range(100):
            try:
                return self.run_process(), self.seen
            except Killed:
                continue
        raise AssertionError("the run did not end within 100 processes")


COUNTED_BY_THE_LOOP = ("break", "islice")
"""Passes that cannot resume in the middle of an epoch, because the loop counts its own steps from 0."""


LONG = ("there and back", "set_epoch", "beside and after")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in LONG else []) for kind in PASSES]
)
def test_run_killed_after_each_save_equals_the_uninterrupted_run(kind, tmp_path):
    each = kind not in COUNTED_BY_THE_LOOP
    updates, seen = Run(tmp_path / "whole", kind, saves_each_update=each).run_to_the_end()
    assert updates == len(seen) > EPOCHS
    again = Run(tmp_path / "killed", kind, range(1, 100), each)
    assert again.run_to_the_end() == (updates, seen)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", PASSES)
def test_run_killed_once_equals_the_uninterrupted_run(kind, tmp_path):
    each = kind not in COUNTED_BY_THE_LOOP
    run = Run(tmp_path / "whole", kind, saves_each_update=each)
    whole = run.run_to_the_end()
    for kill in range(1, run.num_saves):
        assert Run(tmp_path / str(kill), kind, [kill], each).run_to_the_end() == whole


def test_exception_in_the_loop_does_not_end_the_pass(tmp_path):
    def run_process(raises):
        accelerator = Accelerator(cpu=True)
        _model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(list(range(12)), batch_size=4))
        if not raises:
            accelerator.load_state(tmp_path / "c")
            return [batch.tolist() for batch in loader]
        try:
            for batch in loader:
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            accelerator.save_state(tmp_path / "c")

    run_process(raises=True)
    assert run_process(raises=False) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_interrupted_pass_is_over_for_the_run_and_not_for_the_loader():
    accelerator = Accelerator(cpu=True)
    _model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(list(range(12)), batch_size=4))
    for _ in loader:
        assert loader.checkpoint_state() == loader.state_dict()
        assert loader.is_unfinished
        break
    assert (loader.epoch, loader.epoch_at_resume, loader.is_unfinished) == (0, 1, False)
    assert loader.checkpoint_state() == {"epoch": 1, "consumed": 0}
    loader.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(("place", "is_told"), [("within", False), ("between", True), ("after", False)])
def test_save_between_two_training_loops_causes_a_warning(place, is_told, tmp_path, caplog):
    """Such a save looks like one at the end of an epoch, because the second loop has not begun."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    rows = [torch.ones(1)] * 4
    model, optimizer, *loaders = accelerator.prepare(
        model, torch.optim.SGD(model.parameters()), DataLoader(rows, 2), DataLoader(rows, 2)
    )

    def save(where):
        if where == place:
            accelerator.save_state(tmp_path / where)

    for _ in accelerator.epochs(2):
        for loader in loaders:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                save("within")
            save("between" if loader is loaders[0] else "after")
    assert ("between two loops of epoch 0 that train" in caplog.text) == is_told


def test_resumed_run_that_was_finished_reports_that_nothing_is_left(tmp_path, caplog):
    def run(num_epochs):
        accelerator = Accelerator(
            cpu=True, project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
        )
        accelerator.resume("latest")
        done = []
        for epoch in accelerator.epochs(num_epochs):
            done.append(epoch)
            accelerator.save_state()
        accelerator.free_memory()
        return done

    assert run(2) == [0, 1]
    assert "nothing is left" not in caplog.text
    assert run(1) == []
    assert "nothing is left to train: resumed after 1 of 1 epochs" in caplog.text


def train_without_a_loader(num_epochs, saves, stop_after=None):
    """Train on batches of a registered generator. Return the number of updates, the weight and whether the run was stopped.

    Args:
        num_epochs: Number of epochs, with three updates each.
        saves: "start", "middle" or "end": where in an epoch a checkpoint is saved.
        stop_after: Epoch in which the run ends after its second update, as if it was killed.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)

    class Source:
        def state_dict(self):
            return {"state": generator.get_state()}

        def load_state_dict(self, state):
            generator.set_state(state["state"])

    project = ProjectConfiguration("without_loader", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(Source())
    accelerator.resume("latest")
    for epoch in accelerator.epochs(num_epochs):
        if saves == "start" and epoch:
            accelerator.save_state()
        for step in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(4, 3, generator=generator)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if step == 1 and saves == "middle":
                accelerator.save_state()
            if step == 1 and epoch == stop_after:
                return accelerator.num_updates, model.weight.tolist()
        if saves == "end":
            accelerator.save_state()
    return accelerator.num_updates, model.weight.tolist()


def test_a_loop_without_a_loader_resumes_from_a_save_at_the_start_of_an_epoch(monkeypatch, tmp_path, caplog):
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = train_without_a_loader(4, "start")
    monkeypatch.chdir(tmp_path)
    train_without_a_loader(4, "start", stop_after=2)
    assert train_without_a_loader(4, "start") == whole
    assert whole[0] == 12
    assert "was saved at the end of epoch" not in caplog.text


@pytest.mark.parametrize(("saves", "is_told"), [("end", True), ("middle", False)])
def test_a_save_that_repeats_a_finished_epoch_is_told(monkeypatch, tmp_path, caplog, saves, is_told):
    monkeypatch.chdir(tmp_path)
    train_without_a_loader(2, saves)
    assert caplog.text.count("a checkpoint was saved at the end of epoch 0, but a run that resumes") == is_told
