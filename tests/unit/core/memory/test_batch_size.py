"""Test the search for a batch size: sizes tried, results, limits, arguments, errors, and what remains of failed attempts."""

import inspect
import logging
import random
import weakref
from math import ceil, log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headway
from headway import Accelerator, find_executable_batch_size
from headway.core.memory.size_search import FirstThatFits, LargestSize, list_divisors
from headway.core.runtime import process
from headway.errors import BatchSizeError, ConfigError


@pytest.fixture(autouse=True)
def fresh_runtime():
    process.reset()
    yield
    process.reset()


def make_function(fits, **settings):
    """Return a decorated function that fits batch sizes up to `fits`, and the list of sizes it was called with."""
    tried = []

    @find_executable_batch_size(**settings)
    def inner(batch_size, *rest):
        tried.append(batch_size)
        if batch_size > fits:
            raise MemoryError
        return batch_size, *rest

    return inner, tried


def test_size_is_halved_from_128_by_default():
    tried = []

    @find_executable_batch_size
    def inner(batch_size):
        """Docstring of the function."""
        tried.append(batch_size)
        if batch_size > 20:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return "result"

    assert inner.batch_size is None
    assert inner() == "result"
    assert tried == [128, 64, 32, 16]
    assert inner.batch_size == 16
    assert (inner.__name__, inner.__doc__) == ("inner", "Docstring of the function.")
    assert str(inspect.signature(inner)) == "()"


def test_later_call_begins_with_the_size_that_fitted():
    inner, tried = make_function(10, starting_batch_size=32)
    assert inner("a") == (8, "a")
    assert inner("b") == (8, "b")
    assert tried == [32, 16, 8, 8]


def test_custom_reduce_function():
    inner, tried = make_function(10, starting_batch_size=16, reduce_batch_size_fn=lambda size: size - 2)
    assert inner() == (10,)
    assert tried == [16, 14, 12, 10]
    left = iter([5, 0])
    inner, tried = make_function(5, starting_batch_size=16, reduce_batch_size_fn=lambda: next(left))
    assert inner() == (5,)


def test_size_zero_is_an_error_with_the_cause():
    inner, _ = make_function(0, starting_batch_size=4)
    with pytest.raises(BatchSizeError, match=r"reached zero. inner ran out of memory .*\(4, 2, 1\)") as exc_info:
        inner()
    assert isinstance(exc_info.value, RuntimeError)
    assert isinstance(exc_info.value.__cause__, MemoryError)


def test_other_errors_are_raised_at_once():
    calls = []

    @find_executable_batch_size
    def inner(batch_size):
        calls.append(batch_size)
        raise ValueError("a mistake about memory")

    with pytest.raises(ValueError, match="a mistake"):
        inner()
    assert calls == [128]


def test_passing_a_batch_size_is_an_error():
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


def test_passing_the_accumulation_steps_is_an_error():
    @find_executable_batch_size(starting_batch_size=8, keep_global_batch=True)
    def inner(batch_size, gradient_accumulation_steps):
        return batch_size, gradient_accumulation_steps

    assert inner() == (8, 1)
    with pytest.raises(TypeError, match="called with gradient_accumulation_steps=2, but with keep_global_batch=True"):
        inner(gradient_accumulation_steps=2)


@pytest.mark.parametrize("search", ["first", "largest", "predicted"])
def test_final_call_draws_what_a_direct_call_draws(search):
    @find_executable_batch_size(
        starting_batch_size=2, search=search, **({} if search == "first" else {"max_batch_size": 8})
    )
    def draw(batch_size):
        number = torch.rand(()).item()
        if batch_size > 4:
            raise MemoryError
        return number

    torch.manual_seed(0)
    expected = torch.rand(()).item()
    torch.manual_seed(0)
    assert draw() == expected


class Job:
    """Class whose methods receive the batch size after `self` or `cls`."""

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


def test_methods_can_be_decorated():
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


def test_generators_and_coroutines_are_refused():
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
        ({"starting_batch_size": 8, "max_batch_size": 16}, "max_batch_size is only for search='largest'"),
        ({"keep_global_batch": True}, "add it, and pass it"),
    ],
)
def test_invalid_settings_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        find_executable_batch_size(**settings)(lambda batch_size: None)


def test_invalid_functions_are_refused():
    with pytest.raises(ConfigError, match="no first parameter"):
        find_executable_batch_size(lambda: None)
    with pytest.raises(ConfigError, match="no first parameter"):
        find_executable_batch_size(lambda *, batch_size: None)
    with pytest.raises(ConfigError, match="starting_batch_size="):
        find_executable_batch_size(64)


def test_global_batch_is_kept():
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


def test_objects_of_a_failed_attempt_are_freed_before_the_next():
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


# ---------------------------------------------------------------- search="largest"


def make_largest_search(fits):
    tried = []

    @find_executable_batch_size(starting_batch_size=16, search="largest")
    def probe(batch_size):
        tried.append(batch_size)
        if batch_size > fits:
            raise MemoryError
        return batch_size

    return probe, tried


def test_largest_size_is_found():
    probe, tried = make_largest_search(37)
    assert probe() == 37
    assert tried[-1] == 37, "the last call is the one with the size found"
    assert len(tried) <= 12


def test_later_search_for_the_largest_begins_with_the_size_that_fitted():
    probe, tried = make_largest_search(37)
    probe()
    tried.clear()
    assert probe() == 37
    assert tried[0] == 37


def test_search_for_the_largest_stops_at_the_limit():
    tried = []

    @find_executable_batch_size(starting_batch_size=3, search="largest", max_batch_size=20)
    def probe(batch_size):
        tried.append(batch_size)

    probe()
    assert tried == [3, 4, 8, 16, 20]


def test_largest_divisor_is_found():
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


def test_size_that_does_not_fit_a_second_time_is_reduced(monkeypatch):
    calls = []

    @find_executable_batch_size(starting_batch_size=8, search="largest", max_batch_size=16)
    def probe(batch_size):
        calls.append(batch_size)
        if batch_size > 10 or (batch_size == 10 and calls.count(10) == 2):
            raise MemoryError
        return batch_size

    assert probe() == 9
    assert calls[-2:] == [10, 9]


# ---------------------------------------------------------------- search="predicted"


def test_without_a_memory_limit_the_start_is_confirmed_after_three_probes():
    """Host memory has no limit here, so no size is predicted, and a probe confirms the starting size."""
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
            pytest.fail("a probe must not end with an Exception")
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


def test_predicted_search_works_with_errors_alone():
    """If no memory is measured, the search steps down from the start."""
    inner, tried = make_function(11, starting_batch_size=16, search="predicted")
    assert inner() == (11,)
    assert tried == [2, 4, 16, 15, 13, 9, 11, 12, 11]


def test_predicted_search_finds_small_sizes_and_reports_that_none_fits():
    inner, tried = make_function(3, starting_batch_size=4, search="predicted")
    assert (inner(), tried) == ((3,), [4, 3])
    inner, tried = make_function(1, starting_batch_size=100, search="predicted")
    assert (inner(), tried) == ((1,), [2, 1, 1])
    inner, _ = make_function(0, starting_batch_size=100, search="predicted")
    with pytest.raises(BatchSizeError, match="reached zero"):
        inner()


def test_predicted_divisor_is_found():
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


def test_probe_runs_until_the_second_update_of_every_optimizer():
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


def run_search(search, largest):
    """Return all sizes tried if exactly the sizes up to `largest` fit."""
    tried = []
    while not search.is_done:
        assert search.size >= 1
        tried.append(search.size)
        search.report(search.size <= largest)
    return tried


def test_halving_is_the_default():
    search = FirstThatFits(1024)
    assert run_search(search, 8) == [1024, 512, 256, 128, 64, 32, 16, 8]
    assert search.best_size == 8
    search = FirstThatFits(128)
    assert run_search(search, 7) == [128, 64, 32, 16, 8, 4]
    search = FirstThatFits(1)
    assert run_search(search, 0) == [1]
    assert (search.best_size, search.size) == (0, 0)


def test_largest_size_is_found_exactly():
    search = LargestSize(128)
    assert run_search(search, 7) == [128, 127, 119, 59, 29, 14, 7, 10, 8]
    assert (search.best_size, search.size) == (7, 7)
    search = LargestSize(1024)
    assert len(run_search(search, 8)) == 14
    assert search.best_size == 8
    search = LargestSize(16, limit=100)
    assert run_search(search, 10**9) == [16, 17, 25, 50, 100]
    assert search.best_size == 100
    search = LargestSize(2)
    assert run_search(search, 0) == [2, 1]
    assert (search.best_size, search.size) == (0, 0)


@given(start=st.integers(1, 5000), largest=st.integers(0, 9000), limit=st.integers(5000, 10_000))
def test_largest_size_is_correct_after_few_tries(start, largest, limit):
    search = LargestSize(start, limit=limit)
    tried = run_search(search, largest)
    assert search.best_size == min(largest, limit)
    assert len(set(tried)) == len(tried)
    farthest = max(start, largest, 1)
    assert len(tried) <= 2 * ceil(log2(farthest + 1)) + 2


@given(start=st.integers(1, 5000), largest=st.integers(0, 9000), tolerance=st.floats(0, 0.5))
def test_tolerance_is_respected(start, largest, tolerance):
    search = LargestSize(start, limit=10_000, tolerance=tolerance)
    tried = run_search(search, largest)
    assert search.best_size <= largest <= max(search.best_size, int(search.best_size * (1 + tolerance)))
    assert len(set(tried)) == len(tried)
    assert len(tried) <= 2 * ceil(log2(max(start, largest, 1) + 1)) + 2


@pytest.mark.parametrize(
    ("start", "largest", "tried"),
    [(128, 128, [128, 134]), (128, 133, [128, 134]), (128, 125, [128, 122]), (16, 16, [16, 17]), (5, 4, [5, 4])],
)
def test_start_near_the_answer_takes_two_tries(start, largest, tried):
    assert run_search(LargestSize(start, tolerance=0.05), largest) == tried


def test_tolerance_must_be_a_share():
    for wrong in (-0.1, 1, "5%", True):
        with pytest.raises(ConfigError, match="as a share"):
            find_executable_batch_size(search="largest", tolerance=wrong)


@given(number=st.integers(1, 5000), largest=st.integers(0, 6000), data=st.data())
def test_only_allowed_sizes_are_tried(number, largest, data):
    sizes = list_divisors(number)
    assert sizes == [each for each in range(1, number + 1) if number % each == 0]
    fitting = [each for each in sizes if each <= largest]
    search = LargestSize(number, limit=number, sizes=sizes)
    assert set(run_search(search, largest)) <= set(sizes)
    assert search.best_size == (fitting[-1] if fitting else 0)
    first = FirstThatFits(number, sizes=sizes)
    assert set(run_search(first, largest)) <= set(sizes)
    assert first.best_size <= search.best_size
    assert bool(first.best_size) == bool(fitting)


@given(start=st.integers(1, 2000), largest=st.integers(0, 2000))
def test_custom_reduce_function_chooses_the_sizes(start, largest):
    search = FirstThatFits(start, lambda size: size - 3)
    tried = run_search(search, largest)
    assert tried == list(range(start, 0, -3))[: len(tried)]
    assert search.best_size == next((size for size in range(start, 0, -3) if size <= largest), 0)
    left = iter(range(start - 1, -1, -1))
    without_argument = FirstThatFits(start, lambda: next(left))
    run_search(without_argument, largest)
    assert without_argument.best_size == min(start, largest)


@pytest.mark.parametrize("returned", [8, 9, 2.0, None, True, "4"])
def test_size_that_is_not_smaller_is_refused(returned):
    search = FirstThatFits(8, lambda: returned)
    if returned is True:
        with pytest.raises(ConfigError, match="returned True"):
            search.report(False)
        return
    with pytest.raises(ConfigError, match="after a batch size of 8"):
        search.report(False)


def test_size_below_zero_counts_as_zero():
    search = FirstThatFits(8, lambda size: size - 100)
    search.report(False)
    assert search.is_done
    assert search.size == 0


@pytest.mark.parametrize("bad", [0, -1, 1.5, "8", True, None])
def test_invalid_sizes_are_refused(bad):
    with pytest.raises(ConfigError, match="starting_batch_size"):
        find_executable_batch_size(starting_batch_size=bad)
    if bad is not None:  # None means no limit
        with pytest.raises(ConfigError, match="max_batch_size"):
            find_executable_batch_size(starting_batch_size=4, max_batch_size=bad)


def test_limit_below_the_start_is_refused():
    with pytest.raises(ConfigError, match="below starting_batch_size=8"):
        find_executable_batch_size(starting_batch_size=8, search="largest", max_batch_size=4)
