"""Test throughput with a simulated clock: counted and uncounted times, FLOPs, peaks and stragglers."""

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, Float8Options, track
from headway.core.runtime import events
from headway.core.training.interfaces import PeakRate, RankPace
from headway.errors import ConfigError
from headway.extras import throughput
from headway.extras.peak_rate import get_peak, look_up_peak, measure_peak
from headway.extras.stragglers import find_stragglers
from headway.extras.throughput import Throughput


class SimulatedClock:
    """Clock that is advanced by the test."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def work(self, seconds):
        self.seconds += seconds


class SlowDataset(TensorDataset):
    """Dataset whose batches take one second each."""

    def __init__(self, clock, *tensors):
        super().__init__(*tensors)
        self.clock = clock

    def __getitems__(self, indices):
        self.clock.work(1.0)
        return [self[i] for i in indices]


def build_training(num_rows=8, **options):
    clock = SimulatedClock()
    accelerator = Accelerator(cpu=True, **options)
    meter = Throughput(
        accelerator._training_step, accelerator._run.events, accelerator.clock, accelerator.runtime, clock
    )
    model = nn.Linear(3, 1)
    loader = DataLoader(SlowDataset(clock, torch.ones(num_rows, 3)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return accelerator, meter, clock, model, optimizer, loader


def train(accelerator, clock, model, optimizer, loader):
    for (x,) in loader:
        with accelerator.accumulate(model):
            clock.work(1.0)
            accelerator.backward(model(x).mean())
            clock.work(2.0)
            optimizer.step()
            optimizer.zero_grad()


def test_values_are_rates_and_the_fraction_of_time_spent_waiting():
    accelerator, meter, clock, model, optimizer, loader = build_training()
    assert meter.values() == {}
    train(accelerator, clock, model, optimizer, loader)
    clock.work(50.0)  # between the epochs
    assert meter.seconds == 16.0  # 4 batches: 1 s loading, 1 s forward, 2 s after backward
    assert meter.values() == {"samples_per_second": 0.5, "data_wait": 0.25}
    assert meter.values() == {}
    train(accelerator, clock, model, optimizer, loader)
    assert meter.values() == {"samples_per_second": 0.5, "data_wait": 0.25}
    assert meter.total() == {"samples_per_second": 0.5, "data_wait": 0.25}


def test_values_may_be_read_in_the_middle_of_a_step():
    accelerator, meter, clock, model, _optimizer, loader = build_training()
    for (x,) in loader:
        clock.work(1.0)
        accelerator.backward(model(x).mean())
        clock.work(2.0)
        assert meter.values() == {"samples_per_second": 0.5, "data_wait": 0.25}


def test_only_real_rows_count():
    accelerator, meter, clock, model, optimizer, loader = build_training(num_rows=7)
    train(accelerator, clock, model, optimizer, loader)
    assert meter.values()["samples_per_second"] == 7 / 16


def test_several_losses_and_pieces_of_a_batch_count_once():
    accelerator, meter, clock, model, _optimizer, loader = build_training()
    for (x,) in loader:
        with accelerator.accumulate(model):
            clock.work(1.0)
            accelerator.backward(model(x).mean())
            accelerator.backward(model(x).mean())
            clock.work(2.0)
    assert meter.values() == {"samples_per_second": 0.5, "data_wait": 0.25}


def test_evaluation_and_pauses_are_not_counted():
    accelerator, meter, clock, model, _optimizer, loader = build_training()
    evaluation = accelerator.prepare(DataLoader(SlowDataset(clock, torch.ones(4, 3)), batch_size=2))
    for (x,) in loader:
        with meter.paused():
            clock.work(30.0)  # before its backward
        clock.work(1.0)
        accelerator.backward(model(x).mean())
        clock.work(1.0)
        with meter.paused():
            clock.work(20.0)
        clock.work(1.0)
        for _ in evaluation:
            clock.work(10.0)
    assert meter.values() == {"samples_per_second": 0.5, "data_wait": 0.25}


def test_time_after_an_interrupted_epoch_is_not_counted():
    accelerator, meter, clock, model, _optimizer, loader = build_training()
    for (x,) in loader:
        clock.work(1.0)
        accelerator.backward(model(x).mean())
        clock.work(2.0)
        break
    gc.collect()
    clock.work(40.0)
    assert meter.values() == {"samples_per_second": 0.5, "data_wait": 0.25}


def test_batches_without_a_loader_count_tokens_only():
    accelerator, meter, clock, model, _optimizer, _ = build_training()
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 3)).mean())
        clock.work(2.0)
        meter.add(tokens=torch.tensor(10))
    assert meter.values() == {"tokens_per_second": 5.0, "data_wait": 0.0}


def test_mfu_uses_given_flops_and_prefers_those_per_token():
    accelerator, meter, clock, model, optimizer, loader = build_training()
    meter.peak = 1000.0
    assert meter.peak == PeakRate(1000.0, "given")
    meter.flops_per_sample = 400.0
    train(accelerator, clock, model, optimizer, loader)
    assert meter.total()["mfu"] == pytest.approx(0.5 * 400 / 1000)
    meter.flops_per_token = 6 * 4.0  # tokens take precedence over samples
    meter.add(tokens=160)
    assert meter.values()["mfu"] == pytest.approx(10 * 24 / 1000)
    with pytest.raises(ConfigError, match="above 0"):
        meter.peak = 0.0


def test_flops_are_counted_on_one_real_batch():
    accelerator, meter, clock, model, optimizer, loader = build_training()
    evaluation = accelerator.prepare(DataLoader(TensorDataset(torch.ones(2, 3)), batch_size=2))
    meter.count_flops()
    for (x,) in evaluation:  # not counted, because there is no backward
        model(x)
    assert meter.flops_per_sample is None
    train(accelerator, clock, model, optimizer, loader)
    # Per row, 2 * 3 * 1 in forward and as many for the gradient of the weight. The input needs no gradient.
    assert meter.flops_per_sample == 12
    assert _get_current_dispatch_mode() is None


class PassThroughMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_of_the_caller_is_left_intact():
    accelerator, meter, _clock, model, _optimizer, loader = build_training()
    meter.count_flops()
    own = PassThroughMode()
    for number, (x,) in enumerate(loader):
        if number == 0:
            own.__enter__()
        accelerator.backward(model(x).mean())
        if number == 1:
            own.__exit__(None, None, None)
    assert _get_current_dispatch_mode() is None
    assert meter.flops_per_sample == 12


def test_counting_changes_no_result():
    def train_weights(does_count):
        torch.manual_seed(0)
        accelerator, meter, clock, model, optimizer, loader = build_training()
        if does_count:
            meter.count_flops()
        train(accelerator, clock, model, optimizer, loader)
        return model.weight.detach()

    assert torch.equal(train_weights(True), train_weights(False))


def test_accelerator_creates_the_meter_and_attaches_its_loaders():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 1)
    before = accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2))
    model, _optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not accelerator._run.events.after_fetch_hooks
    assert not accelerator._training_step.hooks.before_backward
    meter = accelerator.throughput
    after = accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2))
    assert meter is accelerator.throughput
    for loader in (before, after):
        for (x,) in loader:
            accelerator.backward(model(x).mean())
    assert meter.total()["samples_per_second"] == pytest.approx(8 / meter.seconds)


def test_progress_bars_show_the_throughput(capsys):
    accelerator, meter, clock, model, optimizer, loader = build_training()
    assert meter.format_rates() == "no batch yet"
    meter.show_in_bars()
    meter.show_in_bars()
    train(accelerator, clock, model, optimizer, loader)
    for _ in track([1]):
        pass
    assert capsys.readouterr().err.count("0 samples/s, 25% waiting for data") == 1
    accelerator.end_training()
    assert meter.format_rates not in events.get_progress_texts()


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5),
        ("NVIDIA H100 80GB HBM3", torch.float16, False, 989.5),
        ("NVIDIA H100 PCIe", torch.bfloat16, False, 756.5),
        ("NVIDIA H200", torch.bfloat16, False, 989.5),
        ("NVIDIA L40S", torch.bfloat16, False, 362.1),
        ("NVIDIA L4", torch.bfloat16, False, 121.0),
        ("Tesla T4", torch.float16, False, 65.0),
        ("Tesla T4", torch.bfloat16, False, None),
        ("Tesla T4", torch.float32, True, 8.1),
        ("Tesla V100-PCIE-16GB", torch.float16, False, 112.0),
        ("AMD Instinct MI300X", torch.bfloat16, False, 1307.4),
        # torch lists each of the two dies as a device, and the data sheet has the rates of both together: 383 and 95.7
        ("AMD Instinct MI250X", torch.bfloat16, False, 383.0 / 2),
        ("AMD Instinct MI250X", torch.float32, False, 95.7 / 2),
        ("NVIDIA A100-SXM4-80GB", torch.float64, False, None),
        ("NVIDIA L400", torch.bfloat16, False, None),
    ],
)
def test_peak_comes_from_the_data_sheet_of_the_device(name, dtype, tf32, tera):
    found = look_up_peak(name, dtype, tf32)
    assert (None if found is None else round(found.flops_per_second / 1e12, 3)) == tera


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16)]
)
def test_peak_is_that_of_the_precision(precision, dtype, monkeypatch):
    if precision == "fp8":
        pytest.importorskip("torchao")
    handlers = [Float8Options(emulate=True)] if precision == "fp8" else []
    dtypes = []
    monkeypatch.setattr(throughput, "get_peak", lambda _, dtype: dtypes.append(dtype) or PeakRate(1.0, "test"))
    _, meter, *_ = build_training(mixed_precision=precision, kwargs_handlers=handlers)
    assert meter.peak == PeakRate(1.0, "test")
    assert dtypes == [dtype]


def test_peak_of_a_cpu_is_measured():
    found = get_peak(torch.device("cpu"), torch.float32)
    assert found.source == "measured"
    assert found.flops_per_second > 1e8
    assert measure_peak(torch.device("cpu"), torch.float32, seconds=0.0).flops_per_second > 1e8


def test_measuring_the_peak_draws_nothing_from_the_global_generator():
    """Draws would change the dropout masks and the sample order of a run that reads its `mfu`."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    measure_peak(torch.device("cpu"), torch.float32, seconds=0.0)
    assert torch.equal(torch.rand(3), expected)


def test_stragglers_are_named():
    even = [RankPace(rank, 50, 0.010, 0.02) for rank in range(4)]
    assert find_stragglers(even, 1.3) == {}
    assert find_stragglers(even[:1], 1.3) == {}
    slow = [*even[:3], RankPace(3, 50, 0.021, 0.02)]
    assert find_stragglers(slow, 1.3) == {
        3: "rank 3 delays the others: it takes 21 ms for a forward, 2.1 times the median"
    }
    hungry = [*even[:3], RankPace(3, 50, 0.010, 0.42)]
    assert find_stragglers(hungry, 1.3) == {
        3: "rank 3 delays the others: it waits for data 42% of its time, the median is 2%"
    }
    # Of two ranks, the faster one is the reference. A time of 0 from a coarse clock marks no rank as slow.
    assert list(find_stragglers([RankPace(0, 1, 0.02, 0), RankPace(1, 1, 0.01, 0)], 1.3)) == [0]
    assert find_stragglers([RankPace(0, 1, 0.0, 0), RankPace(1, 1, 0.01, 0)], 1.3) == {}


def test_one_process_publishes_no_pace():
    accelerator, meter, clock, model, optimizer, loader = build_training()
    meter.every = 1
    train(accelerator, clock, model, optimizer, loader)
    assert meter.paces() == []
    assert meter.stragglers() == {}
