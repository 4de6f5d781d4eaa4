"""Accelerators of vendors' packages are found by what is installed, and torch is asked only then."""

import sys

from headway.launch import machine


def package(folder, text):
    made = folder / "vendor-1.0.dist-info"
    made.mkdir()
    (made / "entry_points.txt").write_text(text)


def test_a_package_tells_torch_about_itself(tmp_path):
    folders = [str(tmp_path), str(tmp_path / "absent")]
    assert not machine.is_installed(folders)
    package(tmp_path, "[console_scripts]\nvendor = vendor:main\n\n[torch.backends]\nvendor = vendor:load\n")
    assert machine.is_installed(folders)


def test_nobody_is_asked_where_none_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    package(tmp_path, "[console_scripts]\nvendor = vendor:main\n")
    assert machine.accelerator({}, [str(tmp_path)]) is None


def test_torch_answers_and_may_say_none(tmp_path, monkeypatch):
    package(tmp_path, "[torch.backends]\nvendor = vendor:load\n")
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))  # in torch's place: tests/accelerator asks a real one
    for said, found in (("hello\\nheadway: npu 8", ("npu", 8)), ("no driver", None)):
        python.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
        python.chmod(0o755)
        assert machine.accelerator({}, [str(tmp_path)]) == found
        assert machine.accelerator({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, [str(tmp_path)]) is None
        assert machine.accelerator({"HEADWAY_DEVICE": "npu"}, [str(tmp_path / "empty")]) == found  # by the user's word
        assert machine.accelerator({"HEADWAY_DEVICE": "cpu"}, [str(tmp_path / "empty")]) is None
    python.unlink()
    assert machine.accelerator({}, [str(tmp_path)]) is None
