"""Test memory budgets, measured or given by the user."""

import psutil
import pytest
import torch

from headway import (
    cpu_offload,
    dispatch_model,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    load_checkpoint_and_dispatch,
)
from headway.core.runtime import process
from headway.errors import DeviceMapError
from headway.offload.placement import budget


def test_budgets_are_parsed_and_ordered():
    given = {"disk": "1GB", "cpu": "2GiB", "cuda:1": 5, 0: "10 MB", "3": 7}
    before = dict(given)
    found = get_max_memory(given)
    assert list(found.items()) == [(0, 10**7), (1, 5), (3, 7), ("cpu", 2 << 30), ("disk", 10**9)]
    assert given == before


def test_every_invalid_budget_is_named():
    with pytest.raises(
        DeviceMapError,
        match=r"'gpu': 'gpu' is not a device.*-1: -1 is not a device.*'cpu': '10 potatoes' is not a size",
    ):
        get_max_memory({"gpu": 1, -1: 1, "cpu": "10 potatoes"})


def test_memory_of_the_machine_is_measured():
    found = get_max_memory()
    assert 0 < found["cpu"] <= psutil.virtual_memory().total
    assert len(found) == 1 + torch.cuda.device_count()


def test_limit_of_a_container_counts(tmp_path):
    folder = tmp_path / "sys/fs/cgroup"
    files = {"memory.max": "1000000", "memory.current": "700000", "memory.stat": "anon 5\ninactive_file 200000\n"}
    for path, text in [(tmp_path / "proc/self/cgroup", "0::/\n"), *((folder / name, files[name]) for name in files)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert budget.measure_available_memory(tmp_path) == 500_000
    (folder / "memory.max").write_text("max\n")
    assert budget.measure_available_memory(tmp_path) > 500_000


def test_devices_are_parsed():
    assert [budget.parse_device(d) for d in (1, "1", "cuda", "cuda:2", torch.device("cpu"), "disk", "mps")] == [
        1, 1, 0, 2, "cpu", "disk", "mps",
    ]  # fmt: skip
    for wrong in (True, -1, "gpu", 1.5, None):
        with pytest.raises(DeviceMapError, match="is not a device"):
            budget.parse_device(wrong)


class FourGpus:
    """Stand-in for torch.cuda on a machine with four GPUs."""

    current = 0
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 4)

    def is_initialized(self):
        return self.current > 0

    def current_device(self):
        return self.current

    def set_device(self, device):
        self.current = device.index


@pytest.fixture
def four(monkeypatch):
    """torch.cuda replaced by one with four GPUs."""
    module = FourGpus()
    found = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module if kind == "cuda" else found(kind))
    return module


def test_cuda_without_an_index_is_the_device_of_the_rank(four, monkeypatch):
    assert budget.parse_device("cuda") == 0
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert get_max_memory({"cuda": 5, "cpu": 1}) == {2: 5, "cpu": 1}
    assert budget.parse_device(torch.device("cuda")) == 2
    assert [budget.parse_device(name) for name in ("cuda:0", "0", 0, "cuda:3")] == [0, 0, 0, 3]
    monkeypatch.setenv("LOCAL_RANK", "7")  # each process sees only its own devices
    assert budget.parse_device("cuda") == 0
    four.current = 1  # chosen by the script
    assert budget.parse_device("cuda") == 1


def test_device_of_a_started_runtime_is_used(four, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("HEADWAY_DEVICE", "cuda")
    assert process.start().device == torch.device("cuda", 3)
    four.current = 1
    assert get_max_memory({"cuda": 5}) == {3: 5}
    assert budget.parse_device("xpu") == 0


def test_device_with_two_budgets_is_refused():
    with pytest.raises(DeviceMapError, match="'cuda:0': device 0 already has a budget under another name"):
        get_max_memory({0: 1, "cuda:0": 2})


ABSENT = 4000  # no machine has so many devices


def test_plan_for_another_machine_is_reported(caplog):
    model = torch.nn.Linear(3, 3)
    assert infer_auto_device_map(model, {ABSENT: "1GB"}) == {"": ABSENT}
    assert f"names {ABSENT}, and this machine has " in caplog.text
    assert "for another machine" in caplog.text
    caplog.clear()
    assert get_balanced_memory(model, {"cpu": "1GB"}) == {"cpu": 10**9}
    assert caplog.text == ""


def test_budget_for_a_missing_device_places_nothing(tmp_path):
    model = torch.nn.Linear(3, 3)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        DeviceMapError, match=rf"max_memory={{{ABSENT}: '1GB'}} names {ABSENT}, and this machine has .*'cpu'"
    ):
        load_checkpoint_and_dispatch(model, tmp_path, device_map="auto", max_memory={ABSENT: "1GB"})
    assert not hasattr(model, "hf_device_map")
    load_checkpoint_and_dispatch(model, tmp_path, device_map="auto", max_memory={"cpu": "1GB"})


def test_missing_execution_device_is_refused():
    model = torch.nn.Linear(3, 3)
    with pytest.raises(DeviceMapError, match=f"execution_device={ABSENT} cannot run the model: this machine has "):
        cpu_offload(model, ABSENT)
    with pytest.raises(DeviceMapError, match=f"main_device={ABSENT} cannot run the model"):
        dispatch_model(model, {"": "cpu"}, main_device=ABSENT)
