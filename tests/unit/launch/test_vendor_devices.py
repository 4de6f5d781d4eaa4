"""Accelerators of vendors' packages are found in the installed packages. Torch is queried only if there is one."""

import sys

from headway.launch import vendor_devices


def package(folder, text):
    made = folder / "vendor-1.0.dist-info"
    made.mkdir()
    (made / "entry_points.txt").write_text(text)


def test_a_package_registers_itself_with_torch(tmp_path):
    folders = [str(tmp_path), str(tmp_path / "absent")]
    assert not vendor_devices.has_vendor_package(folders)
    package(tmp_path, "[console_scripts]\nvendor = vendor:main\n\n[torch.backends]\nvendor = vendor:load\n")
    assert vendor_devices.has_vendor_package(folders)


def test_torch_is_not_queried_without_a_vendor_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    package(tmp_path, "[console_scripts]\nvendor = vendor:main\n")
    assert vendor_devices.find_vendor_accelerator({}, [str(tmp_path)]) is None


def test_torch_answers_and_may_say_none(tmp_path, monkeypatch):
    package(tmp_path, "[torch.backends]\nvendor = vendor:load\n")
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))  # in torch's place: tests/accelerator asks a real one
    for said, found in (("hello\\nheadway: npu 8", ("npu", 8)), ("no driver", None)):
        python.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
        python.chmod(0o755)
        assert vendor_devices.find_vendor_accelerator({}, [str(tmp_path)]) == found
        assert vendor_devices.find_vendor_accelerator({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, [str(tmp_path)]) is None
        assert (
            vendor_devices.find_vendor_accelerator({"HEADWAY_DEVICE": "npu"}, [str(tmp_path / "empty")]) == found
        )  # by the user's word
        assert vendor_devices.find_vendor_accelerator({"HEADWAY_DEVICE": "cpu"}, [str(tmp_path / "empty")]) is None
    python.unlink()
    assert vendor_devices.find_vendor_accelerator({}, [str(tmp_path)]) is None
