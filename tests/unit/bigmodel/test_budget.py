"""Budgets: measured here, or as the user says."""

import psutil
import pytest
import torch

from headway import get_max_memory
from headway.bigmodel import budget
from headway.errors import DeviceMapError


def test_text_devices_and_order():
    given = {"disk": "1GB", "cpu": "2GiB", "cuda:1": 5, 0: "10 MB", "3": 7}
    before = dict(given)
    found = get_max_memory(given)
    assert list(found.items()) == [(0, 10**7), (1, 5), (3, 7), ("cpu", 2 << 30), ("disk", 10**9)]
    assert given == before


def test_every_fault_is_named():
    with pytest.raises(
        DeviceMapError, match=r"'gpu': 'gpu' is no device.*-1: -1 is no device.*'cpu': '10 potatoes' is no size"
    ):
        get_max_memory({"gpu": 1, -1: 1, "cpu": "10 potatoes"})


def test_the_machine_is_measured():
    found = get_max_memory()
    assert 0 < found["cpu"] <= psutil.virtual_memory().total
    assert len(found) == 1 + torch.cuda.device_count()


def test_a_containers_limit_counts(tmp_path):
    folder = tmp_path / "sys/fs/cgroup"
    files = {"memory.max": "1000000", "memory.current": "700000", "memory.stat": "anon 5\ninactive_file 200000\n"}
    for path, text in [(tmp_path / "proc/self/cgroup", "0::/\n"), *((folder / name, files[name]) for name in files)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert budget.available_memory(tmp_path) == 500_000
    (folder / "memory.max").write_text("max\n")
    assert budget.available_memory(tmp_path) > 500_000


def test_devices():
    assert [budget.as_device(d) for d in (1, "1", "cuda", "cuda:2", torch.device("cpu"), "disk", "mps")] == [
        1, 1, 0, 2, "cpu", "disk", "mps",
    ]  # fmt: skip
    for wrong in (True, -1, "gpu", 1.5, None):
        with pytest.raises(DeviceMapError, match="is no device"):
            budget.as_device(wrong)
