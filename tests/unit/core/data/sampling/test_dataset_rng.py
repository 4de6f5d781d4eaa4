"""Test streams that draw from the global generators in this process: numbers of a plain loop, and exact resumes."""

import itertools
import random
from contextlib import nullcontext

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from headway import Accelerator, ProjectConfiguration
from headway.core.data.sampling.dataset_rng import DatasetRNGStates, NumpyReader
from headway.core.data.sampling.rng import complete_states_text, encode_state, is_rng_states_text

NUM_SAMPLES, BATCH, EPOCHS = 22, 4, 3
STOPS = range(1, 18)  # all updates of three epochs except the last
FEW_STOPS = (1, 5, 6, 7, 11, 17)  # start, around the end of an epoch, before the last batch of a pass, end


class Shuffled(IterableDataset):
    """Stream with a shuffle buffer and noise from the generators in `kinds`. Before the index `late`, no noise is drawn."""

    def __init__(self, kinds, late=0):
        self.kinds, self.late = kinds, late

    def __iter__(self):
        buffer = []
        for index in range(NUM_SAMPLES):
            buffer.append(float(index))
            if len(buffer) < 3:
                continue
            chosen = random.randrange(3) if "python" in self.kinds else 0
            value = torch.full((4,), buffer.pop(chosen))
            if index >= self.late:
                value = value + (torch.randn(4) if "torch" in self.kinds else 0)
                value = value + (float(numpy.random.rand()) if "numpy" in self.kinds else 0)
            yield value
        yield from (torch.full((4,), value) for value in buffer)


class DrawsOnIter(IterableDataset):
    """Stream that draws in `__iter__`, before it is read."""

    def __iter__(self):
        return iter(torch.randperm(NUM_SAMPLES)[:, None].expand(-1, 4).float())


DATASETS = {
    "all": lambda: Shuffled(("torch", "python", "numpy")),
    "python": lambda: Shuffled(("python",)),
    "late": lambda: Shuffled(("torch",), late=11),
    "on iter": DrawsOnIter,
    "none": lambda: Shuffled(()),
}


def train(make, accelerator=None, stop=None, resumes=False, dropout=0.5, num=None):
    """Return each update's loss, then the weights and the next random numbers of all generators."""
    torch.manual_seed(3), random.seed(4), numpy.random.seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = DataLoader(make(), batch_size=BATCH)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if resumes:
            accelerator.resume("latest")
    losses = []
    count = accelerator.num_updates if resumes else 0
    for _ in range(EPOCHS) if accelerator is None else accelerator.epochs(EPOCHS):
        for batch in itertools.islice(loader, num):
            with nullcontext() if accelerator is None else accelerator.accumulate(model):
                loss = model(batch).square().mean()
                loss.backward() if accelerator is None else accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            count += 1
            if count == stop and num is None:
                accelerator.save_state()
                return losses
        if count == stop:
            accelerator.save_state()  # after an interrupted pass
            return losses
    weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    return losses + weights + [torch.rand(()).item(), random.random(), float(numpy.random.rand())]


def build_accelerator(folder, steps=1):
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    return Accelerator(cpu=True, gradient_accumulation_steps=steps, project_config=project)


@pytest.mark.parametrize("kind", DATASETS)
def test_numbers_equal_a_plain_loop_if_training_draws_from_other_generators(kind, tmp_path):
    dropout = 0.5 if kind in ("python", "none") else 0.0
    assert train(DATASETS[kind], build_accelerator(tmp_path), dropout=dropout) == train(DATASETS[kind], dropout=dropout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DATASETS)
def test_resumed_run_equals_the_uninterrupted_run(kind, tmp_path):
    whole = train(DATASETS[kind], build_accelerator(tmp_path / "whole"))
    for stop in STOPS if kind == "all" else FEW_STOPS:
        first = train(DATASETS[kind], build_accelerator(tmp_path / str(stop)), stop)
        rest = train(DATASETS[kind], build_accelerator(tmp_path / str(stop)), resumes=True)
        assert first + rest == whole, stop


@pytest.mark.slow
def test_run_resumed_in_mid_window_equals_the_uninterrupted_run(tmp_path):
    whole = train(DATASETS["all"], build_accelerator(tmp_path / "whole", steps=3))
    for stop in FEW_STOPS:
        train(DATASETS["all"], build_accelerator(tmp_path / str(stop), steps=3), stop)
        rest = train(DATASETS["all"], build_accelerator(tmp_path / str(stop), steps=3), resumes=True)
        assert rest == whole[-len(rest) :], stop


def test_run_resumed_after_interrupted_passes_equals_the_uninterrupted_run(tmp_path):
    whole = train(DATASETS["all"], build_accelerator(tmp_path / "whole"), num=3)
    for stop in (3, 6):
        first = train(DATASETS["all"], build_accelerator(tmp_path / str(stop)), stop, num=3)
        rest = train(DATASETS["all"], build_accelerator(tmp_path / str(stop)), resumes=True, num=3)
        assert first + rest == whole, stop


def test_training_and_dataset_draw_different_numbers():
    torch.manual_seed(0)
    lines = DatasetRNGStates()
    lines.start_pass()
    first = lines.call_with_states(lambda: torch.rand(5))
    training = torch.rand(5)
    second = lines.call_with_states(lambda: torch.rand(5))
    lines.end_pass()
    after = torch.rand(5)
    torch.manual_seed(0)
    assert torch.equal(torch.cat([first, second, after]), torch.cat([torch.rand(5) for _ in range(3)]))
    assert len({*torch.cat([first, second, after, training]).tolist()}) == 20
    assert random.getstate() == (lines.call_with_states(lambda: None), random.getstate())[1]


def test_line_that_no_save_writes_is_refused():
    text = encode_state(torch.get_rng_state(), 0)
    assert is_rng_states_text(complete_states_text(text, 0))
    assert not is_rng_states_text(complete_states_text(text[:100], 0))
    assert not is_rng_states_text(complete_states_text("nonsense!", 2))
    assert not is_rng_states_text(complete_states_text(text + " " + text, 1))


def test_late_first_draw_of_a_dataset_is_noticed():
    lines = DatasetRNGStates()
    lines.start_pass()
    for number in range(60):
        before = torch.get_rng_state()
        lines.call_with_states(lambda number=number: torch.rand(1) if number == 40 else None)
        if number == 40:
            assert lines.state()["lines"] == [[0, 40, encode_state(before, 0)]]
    assert lines.state()["lines"][0][1] == 40
    lines.end_pass()


DRAWS = {
    "rand": lambda: numpy.random.rand(),
    "one of a pair of normal numbers": lambda: numpy.random.standard_normal(),
    "normal numbers": lambda: numpy.random.randn(3),
    "seed": lambda: numpy.random.seed(5),
    "nothing": lambda: None,
    "an earlier state": lambda state=numpy.random.get_state(): numpy.random.set_state(state),
    "another generator": lambda: numpy.random.set_bit_generator(numpy.random.MT19937(3)),
}


@pytest.mark.parametrize("seed", range(5))
def test_numpy_state_is_read_after_any_calls(seed):
    chosen = random.Random(seed)
    own = numpy.random.get_bit_generator()
    reader = NumpyReader()
    try:
        for _ in range(200):
            DRAWS[chosen.choice(list(DRAWS))]()
            told, true = reader.read(), numpy.random.get_state()
            assert numpy.array_equal(told[1], true[1])
            assert told[2:] == true[2:]
        assert reader.read() is reader.read() or reader.read()[3]
    finally:
        numpy.random.set_bit_generator(own)


@pytest.mark.parametrize("number", [1, 2, 311, 312, 623, 624, 625, 1248, 6240])
def test_any_number_of_draws_from_python_is_noticed(number):
    lines = DatasetRNGStates()
    lines.start_pass()
    lines.call_with_states(lambda: [random.getrandbits(32) for _ in range(number)])
    assert [index for index, *_ in lines.state()["lines"]] == [1]
    lines.end_pass()
