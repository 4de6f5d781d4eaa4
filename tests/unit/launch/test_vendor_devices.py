"""Test that accelerators of vendors are found in the installed packages, and torch is queried only if there is one."""

import sys

from headway.launch import vendor_devices


def write_package(folder, text):
    made = folder / "vendor-1.0.dist-info"
    made.mkdir()
    (made / "entry_points.txt").write_text(text)


def test_package_registers_itself_with_torch(tmp_path):
    folders = [str(tmp_path), str(tmp_path / "absent")]
    assert not vendor_devices.has_vendor_package(folders)
    write_package(tmp_path, "[console_scripts]\nvendor = vendor:main\n\n[torch.backends]\nvendor = vendor:load\n")
    assert vendor_devices.has_vendor_package(folders)


def test_torch_is_not_queried_without_a_vendor_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    write_package(tmp_path, "[console_scripts]\nvendor = vendor:main\n")
    assert vendor_devices.find_vendor_accelerator({}, [str(tmp_path)]) is None


def test_answer_of_torch_is_used(tmp_path, monkeypatch):
    write_package(tmp_path, "[torch.backends]\nvendor = vendor:load\n")
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))  # stands in for torch, and tests/accelerator queries a real one
    for said, found in (("hello\\nheadway: npu 8", ("npu", 8)), ("no driver", None)):
        python.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
        python.chmod(0o755)
        assert vendor_devices.find_vendor_accelerator({}, [str(tmp_path)]) == found
        assert vendor_devices.find_vendor_accelerator({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, [str(tmp_path)]) is None
        assert (
            vendor_devices.find_vendor_accelerator({"HEADWAY_DEVICE": "npu"}, [str(tmp_path / "empty")]) == found
        )  # chosen by the user
        assert vendor_devices.find_vendor_accelerator({"HEADWAY_DEVICE": "cpu"}, [str(tmp_path / "empty")]) is None
    python.unlink()
    assert vendor_devices.find_vendor_accelerator({}, [str(tmp_path)]) is None
