"""Test reading the hardware of a machine from a fake /dev, /proc and /sys."""

import pytest

from headway.launch import machine
from headway.launch.machine import count_cores, inspect_machine
from headway.launch.visible_devices import list_visible_ids


@pytest.fixture
def root(tmp_path):
    """Folder that stands in for the root of the file system."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "sys/class/net/lo").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def torch_build(monkeypatch):
    """Function that chooses the build of torch."""

    def choose(build):
        monkeypatch.setattr(machine, "_read_torch_build", lambda: build)

    choose("cu130")
    return choose


def add_nvidia_devices(root, count):
    for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))]:
        (root / "dev" / name).touch()


def test_machine_without_accelerators_uses_the_cpu(root):
    here = inspect_machine({}, root)
    assert (here.accelerator, here.device_ids, here.torch_device) == (None, (), "cpu")
    assert here.loopback == "lo"
    assert here.num_cores >= 1


def test_nvidia_devices_are_found(root, torch_build):
    add_nvidia_devices(root, 2)
    here = inspect_machine({}, root)
    assert (here.accelerator, here.device_ids, here.torch_device) == ("cuda", ("0", "1"), "cuda")
    assert inspect_machine({"CUDA_VISIBLE_DEVICES": ""}, root).accelerator is None


@pytest.mark.parametrize("node", ["nvhost-gpu", "nvgpu"])
def test_jetson_device_is_found(root, torch_build, node):
    (root / "dev" / node).touch()
    here = inspect_machine({}, root)
    assert (here.accelerator, here.device_ids) == ("cuda", ("0",))


def test_variables_that_name_only_missing_devices_are_reported(root, torch_build):
    add_nvidia_devices(root, 2)
    assert inspect_machine({"CUDA_VISIBLE_DEVICES": "7"}, root).hidden_by == "CUDA_VISIBLE_DEVICES='7'"
    for meant in ("", "-1", "NoDevFiles"):
        assert inspect_machine({"CUDA_VISIBLE_DEVICES": meant}, root).hidden_by == ""
    assert inspect_machine({"CUDA_VISIBLE_DEVICES": "1"}, root).hidden_by == ""


def test_torch_for_cpus_uses_no_accelerator(root, torch_build):
    add_nvidia_devices(root, 2)
    torch_build("cpu")
    assert inspect_machine({}, root).accelerator is None


def test_amd_devices_are_found(root, torch_build):
    (root / "dev/kfd").touch()
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for index, count in enumerate([0, 304, 304]):  # node 0 is the CPU
        (nodes / str(index)).mkdir(parents=True)
        (nodes / str(index) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {count}\n")
    torch_build("rocm6.4")
    here = inspect_machine({}, root)
    assert (here.accelerator, here.device_ids, here.torch_device) == ("rocm", ("0", "1"), "cuda")
    assert inspect_machine({"HIP_VISIBLE_DEVICES": "1"}, root).device_ids == ("1",)


@pytest.mark.parametrize(
    ("variables", "ids"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ("0", "1")),  # HIP counts the devices that remain after ROCR
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ("1",)),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2"}, ()),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1a,GPU-2b,GPU-3c"}, ("0", "1", "2")),
        ({"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0,1"}, ("3",)),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ("0", "1")),
        ({"ROCR_VISIBLE_DEVICES": ""}, ()),
    ],
)
def test_amd_variables_are_applied_in_order(variables, ids):
    assert list_visible_ids("rocm", 4, variables) == ids


def test_intel_device_counts_only_with_a_torch_for_it(root, torch_build):
    device = root / "sys/class/drm/renderD128/device"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x8086\n")
    assert inspect_machine({}, root).accelerator is None
    torch_build("xpu")
    assert inspect_machine({}, root).accelerator == "xpu"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0,1", ("0", "1")),
        ("3, 1", ("3", "1")),
        ("-1", ()),
        ("", ()),
        ("0,-1,2", ("0",)),  # like the driver, which ends the list at the first unknown device
        ("0,9,1", ("0",)),
        ("GPU-1a2b,GPU-3c4d", ("GPU-1a2b", "GPU-3c4d")),
        ("MIG-1a2b", ("MIG-1a2b",)),
    ],
)
def test_visible_devices_follow_the_environment_variable(text, ids):
    assert list_visible_ids("cuda", 4, {"CUDA_VISIBLE_DEVICES": text}) == ids


def test_cores_are_limited_by_the_cgroup(root):
    free = count_cores(root)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert count_cores(root) == free
    (root / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    assert count_cores(root) == 1


DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Jun  6 22:20:39 UTC 2023\nGCC version:  gcc version 11.3.0\n"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@box)  Thu Feb 22 01:25:25 UTC 2024\n"
CARD = "Model: \t\t NVIDIA {}\nIRQ:   \t\t 92\nGPU UUID: \t GPU-1\nBus Location: \t 0000:01:00.0\n"


def add_nvidia_driver(root, version, *cards, text=DRIVER):
    """Write the driver's files as Linux shows them in /proc."""
    add_nvidia_devices(root, len(cards))
    folder = root / "proc/driver/nvidia"
    for index, card in enumerate(cards):
        (folder / f"gpus/0000:0{index}:00.0").mkdir(parents=True)
        (folder / f"gpus/0000:0{index}:00.0/information").write_text(CARD.format(card))
    (folder / "version").write_text(text.format(version))


@pytest.mark.parametrize(
    ("version", "cards", "expected"),
    [
        ("535.54.03", ["GeForce RTX 4090"] * 2, "NVIDIA GeForce RTX 4090 with driver 535.54.03"),
        ("550.40.06", ["GeForce RTX 3090", "GeForce RTX 4070 Ti SUPER"], "NVIDIA GeForce RTX 4070 Ti SUPER with driver 550.40.06"),
        ("550.40.07", ["GeForce RTX 4090"] * 2, ""),
        ("550.54", ["GeForce RTX 4090"] * 2, ""),
        ("570.86.15", ["GeForce RTX 4090"] * 2, ""),
        ("535.54.03", ["GeForce RTX 3090"] * 2, ""),
        ("535.54.03", ["RTX 4000 Ada Generation"] * 2, ""),
        ("unknown", ["GeForce RTX 4090"] * 2, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", [DRIVER, OPEN_DRIVER])
def test_cards_whose_direct_transfers_fail_are_found(root, torch_build, version, cards, expected, text):
    add_nvidia_driver(root, version, *cards, text=text)
    assert inspect_machine({}, root).broken_transfers == expected


def test_direct_transfers_of_other_accelerators_are_not_checked(root, torch_build):
    add_nvidia_driver(root, "535.54.03", "GeForce RTX 4090")
    torch_build("cpu")
    assert inspect_machine({}, root).broken_transfers == ""
