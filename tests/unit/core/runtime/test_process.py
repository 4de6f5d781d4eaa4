"""Test the runtime of one process: started once, reset, and refused if it differs from what the launcher promised."""

import pytest
import torch

from headway.core.config.load import encode_payload, merge_layers
from headway.core.runtime import device, process
from headway.core.runtime.collective_ledger import CollectiveLedger
from headway.errors import ConfigError, DeviceUnavailable, UnsupportedError


def test_runtime_starts_once_and_ends():
    assert not process.is_started()
    first = process.start(cpu=True)
    assert process.start() is first
    assert process.current() is first
    assert (first.rank, first.world_size, first.is_last_process) == (0, 1, True)
    process.reset()
    assert not process.is_started()
    process.reset()


def test_device_cannot_change_after_the_start(monkeypatch):
    fake = device.Hardware("mps")
    monkeypatch.setattr(process, "detect_hardware", lambda: fake)
    process.start()
    with pytest.raises(ConfigError, match="give it to the first Accelerator"):
        process.start(cpu=True)


def test_invalid_rank_variable_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        process.start(cpu=True)


def test_more_processes_than_devices_are_refused(monkeypatch):
    hardware = device.Hardware("cuda")
    monkeypatch.setattr(device.Hardware, "count_devices", lambda self: 2)
    with pytest.raises(DeviceUnavailable, match="local rank 2 has no cuda device: this machine shows 2"):
        hardware.select_device(2)


def test_missing_device_that_the_launcher_promised_is_refused(monkeypatch):
    """On ROCm, a wrong variable hides all devices, and the run used to continue on the CPU."""
    monkeypatch.setattr(process, "detect_hardware", lambda: device.CPU)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")
    told = encode_payload(merge_layers([]), 1, device="cuda")
    monkeypatch.setenv("HEADWAY_RUN", told)
    with pytest.raises(
        DeviceUnavailable, match=r"started this process for a cuda device.*HIP_VISIBLE_DEVICES='2'.*--cpu"
    ):
        process.start()
    assert process.start(cpu=True).hardware is device.CPU  # the script asks for the CPU
    process.reset()
    monkeypatch.setenv("HEADWAY_DEVICE", "cpu")  # the user asks for the CPU
    assert process.start().hardware is device.CPU


def test_device_that_the_launcher_has_not_found_is_refused(monkeypatch):
    """The launcher counts devices without torch. It reported "2 processes on cpu", but both computed on CUDA devices."""
    monkeypatch.setattr(process, "detect_hardware", lambda: device.Hardware("cuda"))  # no such device is available here
    monkeypatch.setattr(device.Hardware, "count_devices", lambda self: 2)
    monkeypatch.setenv("HEADWAY_RUN", encode_payload(merge_layers([]), 1, device="cpu"))
    told = r"found no accelerator.*for the CPU, but torch .* finds 2 of cuda here\. Start with HEADWAY_DEVICE=cuda .*; --cpu "
    with pytest.raises(DeviceUnavailable, match=told):
        process.start()
    assert process.start(cpu=True).hardware is device.CPU


def test_missing_device_type_is_refused_with_the_available_ones():
    missing = next(name for name in ("xpu", "mps") if not device.HARDWARE[name].is_available())
    with pytest.raises(DeviceUnavailable, match=rf"'{missing}' is not on this machine; available here: cpu"):
        device.find_hardware(missing)
    assert device.find_hardware("cpu") is device.CPU


def test_cpu_supports_all_queries():
    cpu = device.CPU
    cpu.synchronize()
    cpu.empty_cache()
    assert cpu.get_memory_in_use() is None
    assert cpu.is_available()
    assert (cpu.count_devices(), cpu.select_device(3).type) == (1, "cpu")
    assert isinstance(cpu.supports_bf16(), bool)


def test_ledger_records_the_number_and_caller_of_each_collective():
    ledger = CollectiveLedger()
    entries = [ledger.record_entry(name) for name in ("a", "b", "c")]
    assert [(entry.sequence, entry.operation) for entry in entries] == [(1, "a"), (2, "b"), (3, "c")]
    assert "test_process.py:" in entries[-1].call_site


def test_device_types_are_those_of_torch():
    assert dict(device.HARDWARE) == {"cpu": device.CPU} | {
        name: device.Hardware(name) for name in list(device.HARDWARE)[1:]
    }
    assert device.HARDWARE["xpu"] == device.Hardware("xpu")
    assert "npu" not in device.HARDWARE
    assert device.is_device_type("hpu")
    assert not device.is_device_type("npu")
    with pytest.raises(
        DeviceUnavailable, match=r"'npu' is not a kind of device that torch knows .*once its package is imported"
    ):
        device.find_hardware("npu")
    with pytest.raises(DeviceUnavailable, match=r"'xla' was asked for: .*torch_xla"):
        device.find_hardware("xla")


def test_backends_are_those_of_torchs_table(monkeypatch):
    table = torch.distributed.Backend.default_device_backend_map
    assert device.CPU.backend_string == device.Hardware("mps").backend_string == "gloo"
    assert device.Hardware("cuda").backend_string == "cpu:gloo,cuda:nccl"
    assert device.Hardware("xpu").backend_string == "cpu:gloo,xpu:xccl"
    assert "mtia" not in table
    with pytest.raises(
        UnsupportedError,
        match=r"torch.distributed has no default backend for tensors on mtia .*backend='cpu:gloo,mtia:<backend>'",
    ):
        _ = device.Hardware("mtia").backend_string
    monkeypatch.setitem(table, "mtia", "mccl")  # like Backend.register_backend(devices=["mtia"])
    assert device.Hardware("mtia").backend_string == "cpu:gloo,mtia:mccl"


def test_device_type_without_a_current_device_has_no_index():
    assert [kind for kind in ("cpu", "cuda", "xpu", "mtia", "mps") if device.HARDWARE[kind].is_indexed] == [
        "cuda",
        "xpu",
        "mtia",
    ]
