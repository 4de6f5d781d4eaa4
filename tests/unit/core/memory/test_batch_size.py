import inspect
import logging
import random
import weakref

import pytest
import torch

import headway
from headway import Accelerator, find_executable_batch_size
from headway.core.runtime import process
from headway.errors import BatchSizeError, ConfigError


@pytest.fixture(autouse=True)
def own_runtime():
    process.reset()
    yield
    process.reset()


def trying(fits, **settings):
    """A decorated function that fits up to `fits`, and the list of what it was called with."""
    tried = []

    @find_executable_batch_size(**settings)
    def inner(batch_size, *rest):
        tried.append(batch_size)
        if batch_size > fits:
            raise MemoryError
        return batch_size, *rest

    return inner, tried


def test_halves_from_128_by_default():
    tried = []

    @find_executable_batch_size
    def inner(batch_size):
        """What it says."""
        tried.append(batch_size)
        if batch_size > 20:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return "result"

    assert inner.batch_size is None
    assert inner() == "result"
    assert tried == [128, 64, 32, 16]
    assert inner.batch_size == 16
    assert (inner.__name__, inner.__doc__) == ("inner", "What it says.")
    assert str(inspect.signature(inner)) == "()"


def test_a_later_call_begins_with_what_fitted():
    inner, tried = trying(10, starting_batch_size=32)
    assert inner("a") == (8, "a")
    assert inner("b") == (8, "b")
    assert tried == [32, 16, 8, 8]


def test_a_custom_reduce_function():
    inner, tried = trying(10, starting_batch_size=16, reduce_batch_size_fn=lambda size: size - 2)
    assert inner() == (10,)
    assert tried == [16, 14, 12, 10]
    left = iter([5, 0])
    inner, tried = trying(5, starting_batch_size=16, reduce_batch_size_fn=lambda: next(left))
    assert inner() == (5,)


def test_zero_is_a_clear_error_with_the_cause():
    inner, _ = trying(0, starting_batch_size=4)
    with pytest.raises(BatchSizeError, match=r"reached zero. inner ran out of memory .*\(4, 2, 1\)") as caught:
        inner()
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, MemoryError)


def test_other_errors_pass_at_once():
    calls = []

    @find_executable_batch_size
    def inner(batch_size):
        calls.append(batch_size)
        raise ValueError("a mistake about memory")

    with pytest.raises(ValueError, match="a mistake"):
        inner()
    assert calls == [128]


def test_passing_a_batch_size_is_a_clear_error():
    @find_executable_batch_size(starting_batch_size=4)
    def inner(batch_size, rate):
        return batch_size, rate

    assert inner(0.1) == inner(rate=0.1) == (4, 0.1)
    with pytest.raises(TypeError, match=r"parameter 'batch_size' is filled in .* call it without: inner\(0.1\)"):
        inner(16, 0.1)
    with pytest.raises(TypeError, match=r"call it without: inner\(rate=0.1\)"):
        inner(batch_size=16, rate=0.1)
    with pytest.raises(TypeError, match=r"cannot be called with these arguments: .*rate"):
        inner()
    with pytest.raises(TypeError, match="cannot be called with these arguments"):
        inner(1, 2, 3)


class Job:
    """Methods get the size after their object."""

    rate = 3

    @find_executable_batch_size(starting_batch_size=16)
    def run(self, batch_size, times=1):
        if batch_size > 4:
            raise MemoryError
        return batch_size * self.rate * times

    @classmethod
    @find_executable_batch_size
    def of_class(cls, batch_size):
        return cls, batch_size

    @find_executable_batch_size(starting_batch_size=6, keep_global_batch=True)
    def keep(self, batch_size, gradient_accumulation_steps):
        if batch_size > 3:
            raise MemoryError
        return batch_size, gradient_accumulation_steps


def test_a_method():
    job = Job()
    assert (job.run(), job.run(2), job.run(times=3), Job.run.batch_size) == (12, 24, 36, 4)
    assert Job.of_class() == (Job, 128)
    assert job.keep() == (3, 2)
    assert list(inspect.signature(Job.run).parameters) == ["self", "times"]
    with pytest.raises(TypeError, match=r"parameter 'batch_size' is filled in .* call it without: run\(2\)"):
        job.run(8, 2)
    with pytest.raises(TypeError, match=r"call it without: run\(times=2\)"):
        job.run(batch_size=8, times=2)
    with pytest.raises(ConfigError, match="no first parameter for the batch size"):
        find_executable_batch_size(lambda self: self)


def test_bodies_that_run_later_are_refused():
    async def coroutine(batch_size):
        return batch_size

    def generator(batch_size):
        yield batch_size

    for late in (coroutine, generator):
        with pytest.raises(ConfigError, match=f"{late.__name__} is a generator or a coroutine"):
            find_executable_batch_size(late)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"starting_batch_size": 0}, "starting_batch_size=0"),
        ({"search": "best"}, "search='best'"),
        ({"search": "largest", "reduce_batch_size_fn": lambda: 1}, "no meaning with search='largest'"),
        ({"search": "predicted", "reduce_batch_size_fn": lambda: 1}, "no meaning with search='predicted'"),
        ({"tolerance": 0.1}, "only for search='largest' and 'predicted'"),
        ({"starting_batch_size": 8, "max_batch_size": 4}, "below starting_batch_size=8"),
        ({"keep_global_batch": True}, "add it, and hand it"),
    ],
)
def test_impossible_settings(settings, said):
    with pytest.raises(ConfigError, match=said):
        find_executable_batch_size(**settings)(lambda batch_size: None)


def test_impossible_functions():
    with pytest.raises(ConfigError, match="no first parameter"):
        find_executable_batch_size(lambda: None)
    with pytest.raises(ConfigError, match="no first parameter"):
        find_executable_batch_size(lambda *, batch_size: None)
    with pytest.raises(ConfigError, match="starting_batch_size="):
        find_executable_batch_size(64)


def test_the_global_batch_is_kept():
    seen = []

    @find_executable_batch_size(starting_batch_size=60, keep_global_batch=True)
    def inner(batch_size, gradient_accumulation_steps, rate=1):
        seen.append((batch_size, gradient_accumulation_steps))
        if batch_size > 7:
            raise MemoryError
        return rate

    assert inner(rate=3) == 3
    assert all(size * steps == 60 for size, steps in seen)
    assert seen[-1] == (6, 10)
    assert list(inspect.signature(inner).parameters) == ["rate"]
    seen.clear()
    inner()
    assert seen == [(6, 10)]


def test_rng_states_are_restored():
    def draw():
        return random.random(), torch.rand(1).item()

    @find_executable_batch_size(starting_batch_size=8)
    def inner(batch_size):
        drawn = draw()
        if batch_size > 2:
            raise MemoryError
        return drawn

    headway.set_seed(3)
    found = inner()
    headway.set_seed(3)
    assert found == draw()


def test_what_a_failed_attempt_prepared_is_gone_before_the_next():
    accelerator = Accelerator(cpu=True)
    alive = []

    @find_executable_batch_size(starting_batch_size=8)
    def inner(batch_size):
        assert [ref() for ref in alive] == [None] * len(alive)
        model = torch.nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        alive.append(weakref.ref(model))
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.randn(batch_size, 100)).sum())
        if batch_size > 2:
            raise MemoryError
        return model

    model = inner()
    assert len(alive) == 3
    assert alive[-1]() is model


def test_objects_from_outside_are_named_and_kept(caplog):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    @find_executable_batch_size(starting_batch_size=2)
    def inner(batch_size):
        inside = accelerator.prepare(torch.nn.Bilinear(2, 2, 2))
        if batch_size > 1:
            raise MemoryError
        return inside

    with caplog.at_level(logging.WARNING):
        inside = inner()
    (said,) = [
        record.getMessage() for record in caplog.records if "before the batch-size search" in record.getMessage()
    ]
    assert "Linear, SGD" in said
    assert "Bilinear" not in said
    assert accelerator.prepare(model) is model
    accelerator.backward(model(torch.ones(1, 2)).sum())
    before = model.weight.clone()
    optimizer.step()
    assert not torch.equal(before, model.weight)
    assert isinstance(inside, torch.nn.Bilinear)


# ---------------------------------------------------------------- the largest


def largest(fits):
    tried = []

    @find_executable_batch_size(starting_batch_size=16, search="largest")
    def probe(batch_size):
        tried.append(batch_size)
        if batch_size > fits:
            raise MemoryError
        return batch_size

    return probe, tried


def test_the_largest_is_found():
    probe, tried = largest(37)
    assert probe() == 37
    assert tried[-1] == 37, "the last call is the one with the size found"
    assert len(tried) <= 12


def test_a_later_search_for_the_largest_begins_with_what_fitted():
    probe, tried = largest(37)
    probe()
    tried.clear()
    assert probe() == 37
    assert tried[0] == 37


def test_the_largest_stops_at_the_limit():
    tried = []

    @find_executable_batch_size(starting_batch_size=3, search="largest", max_batch_size=20)
    def probe(batch_size):
        tried.append(batch_size)

    probe()
    assert tried == [3, 4, 8, 16, 20]


def test_the_largest_divisor():
    seen = []

    @find_executable_batch_size(starting_batch_size=48, search="largest", keep_global_batch=True)
    def probe(batch_size, gradient_accumulation_steps):
        seen.append(batch_size)
        assert batch_size * gradient_accumulation_steps == 48
        if batch_size > 17:
            raise MemoryError
        return batch_size

    assert probe() == 16
    assert seen[-1] == 16


def test_a_size_that_does_not_fit_again_is_left(monkeypatch):
    calls = []

    @find_executable_batch_size(starting_batch_size=8, search="largest", max_batch_size=16)
    def probe(batch_size):
        calls.append(batch_size)
        if batch_size > 10 or (batch_size == 10 and calls.count(10) == 2):
            raise MemoryError
        return batch_size

    assert probe() == 9
    assert calls[-2:] == [10, 9]


# ---------------------------------------------------------------- the predicted


def test_the_predicted_size_without_a_memory_limit_is_the_start_after_three_probes():
    """Host memory has no limit here, so nothing is predicted, and a probe confirms the start itself."""
    headway.set_seed(3)
    calls, draws = [], []
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=16, search="predicted")
    def train(batch_size, num_updates):
        assert accelerator.num_updates == 0
        calls.append([batch_size, 0])
        draws.append(torch.rand(1).item())
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        try:
            for _ in range(num_updates):
                accelerator.backward(model(torch.ones(batch_size, 4)).sum())
                optimizer.step()
                optimizer.zero_grad()
                calls[-1][1] += 1
        except Exception:
            pytest.fail("a probe ends by no Exception")
        return "done"

    assert train(5) == "done"
    assert calls == [[2, 1], [4, 1], [16, 1], [16, 5]], "a probe ends in its second step"
    assert len(set(draws)) == 1
    assert (train.batch_size, accelerator.num_updates) == (16, 5)
    accelerator.free_memory()
    accelerator._training_step.run.clock.resume(0)
    calls.clear()
    assert train(num_updates=1) == "done"
    assert calls == [[16, 1]], "a later call begins with what fitted"


def test_the_predicted_size_with_errors_alone():
    """Where no memory is measured, the search steps down from the start."""
    inner, tried = trying(11, starting_batch_size=16, search="predicted")
    assert inner() == (11,)
    assert tried == [2, 4, 16, 15, 13, 9, 11, 12, 11]


def test_the_predicted_size_of_few_or_of_none():
    inner, tried = trying(3, starting_batch_size=4, search="predicted")
    assert (inner(), tried) == ((3,), [4, 3])
    inner, tried = trying(1, starting_batch_size=100, search="predicted")
    assert (inner(), tried) == ((1,), [2, 1, 1])
    inner, _ = trying(0, starting_batch_size=100, search="predicted")
    with pytest.raises(BatchSizeError, match="reached zero"):
        inner()


def test_a_predicted_divisor():
    seen = []

    @find_executable_batch_size(starting_batch_size=60, search="predicted", keep_global_batch=True)
    def inner(batch_size, gradient_accumulation_steps):
        seen.append(batch_size)
        assert batch_size * gradient_accumulation_steps == 60
        if batch_size > 7:
            raise MemoryError

    inner()
    assert inner.batch_size == 6
    assert seen[:3] == [2, 4, 60]


def test_a_probe_waits_for_the_second_update_of_every_optimizer():
    steps = []

    @find_executable_batch_size(starting_batch_size=8, search="predicted")
    def inner(batch_size):
        steps.append("")
        nets = {name: torch.nn.Linear(1, 1) for name in "dg"}
        optimizers = {name: torch.optim.Adam(net.parameters()) for name, net in nets.items()}
        for _ in range(3):
            for name, net in nets.items():
                net(torch.ones(batch_size, 1)).sum().backward()
                steps[-1] += name
                optimizers[name].step()

    inner()
    assert steps == ["dgdg"] * 3 + ["dgdgdg"]
