"""Which epoch a resumed run goes on in: no epoch is trained twice, and none is left out."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration

EPOCHS = 4


class Killed(Exception):
    """Takes the place of a kill: what follows starts from the checkpoint alone."""


def side_by_side(one, other):
    yield from zip(one, other)


def unequal(one, other):
    """The first loader is never read to its end."""
    yield from zip(other, one)


def left_by_break(one, _):
    for step, batch in enumerate(one):
        yield batch, None
        if step == 1:
            break


def left_by_islice(one, _):
    yield from ((batch, None) for batch in islice(one, 2))


def one_only(one, _):
    yield from ((batch, None) for batch in one)


def in_turn(one, other):
    """A kill in the second pass must not repeat the first."""
    for loader in (one, other):
        yield from ((batch, None) for batch in loader)


def there_and_back(one, other):
    for loader in (one, other, one):
        yield from ((batch, None) for batch in loader)


def in_turn_with_set_epoch(one, other):
    for loader in (one, other):
        loader.set_epoch(one.epoch if loader is one else other.epoch)
        yield from ((batch, None) for batch in loader)


def beside_and_after(one, other):
    yield from zip(one, other)
    yield from ((batch, None) for batch in one)


PASSES = {
    "in turn": (in_turn, 12, 8), "there and back": (there_and_back, 12, 8), "set_epoch": (in_turn_with_set_epoch, 12, 8),
    "beside and after": (beside_and_after, 12, 12),
    "side by side": (side_by_side, 12, 12), "unequal": (unequal, 12, 6), "break": (left_by_break, 12, 12),
    "islice": (left_by_islice, 12, 12), "one": (one_only, 12, 12),
}  # fmt: skip


class Run:
    """One process of a training; `kills` are the numbers of saves (over all processes) after which it is killed."""

    def __init__(self, folder, kind, kills=(), saves_each_update=True):
        self.folder, self.kills, self.saves_each = folder, set(kills), saves_each_update
        self.read, *self.lengths = PASSES[kind]
        self.seen, self.num_saves = [], 0

    def save(self, accelerator):
        accelerator.save_state()
        self.num_saves += 1
        if self.num_saves in self.kills:
            raise Killed

    def process(self):
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

    def to_the_end(self):
        for _ in range(100):
            try:
                return self.process(), self.seen
            except Killed:
                continue
        raise AssertionError("it never ended")


COUNTED_BY_THE_LOOP = ("break", "islice")
"""A loop that counts its own steps cannot go on in the middle of an epoch: the count begins again."""


LONG = ("there and back", "set_epoch", "beside and after")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in LONG else []) for kind in PASSES]
)
def test_a_run_killed_after_every_save_equals_the_uninterrupted_run(kind, tmp_path):
    each = kind not in COUNTED_BY_THE_LOOP
    updates, seen = Run(tmp_path / "whole", kind, saves_each_update=each).to_the_end()
    assert updates == len(seen) > EPOCHS
    again = Run(tmp_path / "killed", kind, range(1, 100), each)
    assert again.to_the_end() == (updates, seen)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", PASSES)
def test_a_run_killed_once_equals_the_uninterrupted_run(kind, tmp_path):
    each = kind not in COUNTED_BY_THE_LOOP
    run = Run(tmp_path / "whole", kind, saves_each_update=each)
    whole = run.to_the_end()
    for kill in range(1, run.num_saves):
        assert Run(tmp_path / str(kill), kind, [kill], each).to_the_end() == whole


def test_an_exception_that_leaves_the_loop_does_not_end_the_pass(tmp_path):
    def process(raises):
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

    process(raises=True)
    assert process(raises=False) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_pass_that_was_left_is_over_for_the_run_and_not_for_the_loader():
    accelerator = Accelerator(cpu=True)
    _model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(list(range(12)), batch_size=4))
    for _ in loader:
        assert loader.run_state() == loader.state_dict()
        assert loader.is_unfinished
        break
    assert (loader.epoch, loader.next_epoch, loader.is_unfinished) == (0, 1, False)
    assert loader.run_state() == {"epoch": 1, "consumed": 0}
    loader.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(("place", "is_told"), [("within", False), ("between", True), ("after", False)])
def test_a_save_between_two_training_loops_is_warned_about(place, is_told, tmp_path, caplog):
    """Nothing tells it from a save at the epoch's end, before the second loop begins."""
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


def test_a_resumed_run_that_was_finished_reports_that_nothing_is_left(tmp_path, caplog):
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
