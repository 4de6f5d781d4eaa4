"""Test the memory monitor: peaks of phases from the kernel and from samples, nesting, the progress bar, and errors."""

import io
import sys
from pathlib import Path

import pytest
import torch

from headway import Accelerator, MemoryMonitor, track
from headway.common import scope
from headway.core.memory import monitor as monitor_file
from headway.core.memory.monitor import KernelMeter, PeakReader, SampledMeter, choose_meter
from headway.core.runtime import events
from headway.core.runtime.device import HARDWARE
from headway.errors import StateError

MIB = 1 << 20
LINUX = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the kernel's peak can be reset on Linux only"
)


def allocate_block(num_mib):
    """Return a tensor whose memory goes back to the system when it is freed: above malloc's largest threshold of 32 MiB."""
    return torch.ones(num_mib * MIB // 4)


@pytest.fixture(params=["kernel", "samples"])
def meter(request, monkeypatch):
    """Name of the meter that the test uses: the kernel's peak or samples."""
    if request.param == "samples":
        monkeypatch.setattr(monitor_file, "choose_meter", lambda device: SampledMeter(0.001))
    elif not Path("/proc/self/clear_refs").exists():
        pytest.skip(reason="the kernel's peak can be reset on Linux only")
    return request.param


def test_each_phase_has_its_own_peak(meter):
    with MemoryMonitor() as monitor:
        start = monitor.summary()["memory/used"]
        with monitor.phase("large"):
            block = allocate_block(192)
            del block
        with monitor.phase("small"):
            block = allocate_block(64)
            del block
    large, small, rest = (monitor.peaks[name] - start for name in ("large", "small", "forward"))
    assert 150 * MIB < large < 250 * MIB
    assert 40 * MIB < small < 110 * MIB
    assert rest < 40 * MIB
    assert monitor.peak == monitor.peaks["large"]
    assert ("kernel" in monitor.source) == (meter == "kernel")


class Hungry(torch.autograd.Function):
    """Function whose backward needs more memory than its forward."""

    @staticmethod
    def forward(context, x):
        return x * allocate_block(64)[0]

    @staticmethod
    def backward(context, grad):
        return grad * allocate_block(256)[0]


class HungrySGD(torch.optim.SGD):
    """Optimizer whose step needs 128 MiB."""

    def step(self, closure=None):
        allocate_block(128)
        return super().step(closure)


@LINUX
def test_prepared_objects_mark_forward_backward_and_step():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, HungrySGD(model.parameters(), lr=0.1))
    heard = []
    with MemoryMonitor() as monitor, events.listen_to_phases(heard.append):
        start = monitor.summary()["memory/used"]
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(Hungry.apply(model(torch.ones(2, 4))).sum(), weight=2)
                optimizer.step()
                optimizer.zero_grad()
    assert heard == ["backward", "forward", "backward", "step", "step", "forward"]
    found = {name: (peak - start) / MIB for name, peak in monitor.peaks.items()}
    assert 40 < found["forward"] < 110
    assert 200 < found["backward"] < 300
    assert 100 < found["step"] < 170
    summary = monitor.summary()
    assert set(summary) == {
        f"memory/{name}" for name in ("used", "reserved", "peak", "peak_forward", "peak_backward", "peak_step")
    }
    assert summary["memory/peak"] == summary["memory/peak_backward"]
    assert "backward" in str(monitor)
    assert not scope.get_or_create(events.Listeners).phase_listeners


def test_marks_without_a_monitor_have_no_effect():
    events.mark_phase("forward")
    assert not scope.get_or_create(events.Listeners).phase_listeners
    assert not scope.get_or_create(monitor_file._ActiveMonitors)


@LINUX
def test_inner_monitor_does_not_change_the_outer_one():
    with MemoryMonitor() as outer:
        start = outer.summary()["memory/used"]
        block = allocate_block(192)
        del block
        with MemoryMonitor() as inner:
            block = allocate_block(64)
            del block
    assert outer.peak - start > 150 * MIB
    assert inner.peak - start < 120 * MIB
    assert not scope.get_or_create(monitor_file._ActiveMonitors)


def test_monitor_can_be_reused_but_not_nested_in_itself():
    monitor = MemoryMonitor()
    with monitor:
        with pytest.raises(StateError, match="another one"):
            monitor.__enter__()
    first = monitor.peak
    with monitor:
        pass
    assert first > 0
    assert monitor.peak > 0
    with pytest.raises(StateError, match="outside"):
        with monitor.phase("evaluation"):
            pass


def test_samples_are_taken_if_the_kernel_refuses(monkeypatch):
    monkeypatch.setattr(KernelMeter, "reset", lambda self: (_ for _ in ()).throw(PermissionError()))
    meter = choose_meter(torch.device("cpu"))
    assert isinstance(meter, SampledMeter)
    meter.close()
    assert not meter._thread.is_alive()


def test_device_counts_its_own_peak(monkeypatch):
    calls = []

    class Module:
        max_memory_allocated = staticmethod(lambda device: 42)
        reset_peak_memory_stats = staticmethod(lambda device: calls.append(device))

    monkeypatch.setattr(torch, "get_device_module", lambda kind: Module)
    meter = choose_meter(torch.device("cuda", 1))
    assert isinstance(meter, PeakReader)
    meter.reset()
    assert (meter.read_peak(), calls) == (42, [torch.device("cuda", 1)])
    assert HARDWARE["cuda"].module is Module


def test_progress_bar_shows_the_peak():
    out = io.StringIO()
    with MemoryMonitor():
        for _ in track(range(2), file=out, interval=0.0):
            pass
    for _ in track(range(2), file=out, interval=0.0):
        pass
    with_monitor, *_, without = out.getvalue().splitlines()
    assert " | peak " in with_monitor
    assert "in forward" in with_monitor
    assert "peak" not in without


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes on exceptions came with Python 3.11")
def test_out_of_memory_error_that_leaves_the_monitor_has_a_report():
    held = torch.zeros(8 * MIB)
    with pytest.raises(RuntimeError) as exc_info:
        with MemoryMonitor():
            torch.empty(1 << 50)
    (note,) = exc_info.value.__notes__
    assert "headway: memory ran out on cpu: " in note
    assert "`held` in test_out_of_memory_error" in note
    assert held.numel()
    with pytest.raises(KeyError) as other:
        with MemoryMonitor():
            raise KeyError("no memory")
    assert not hasattr(other.value, "__notes__")
