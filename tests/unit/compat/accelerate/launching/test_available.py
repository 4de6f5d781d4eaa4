"""Test the functions that report installed packages and the abilities of the machine against Accelerate's."""

import accelerate.utils
import accelerate.utils.imports as theirs
import pytest
import torch
from packaging import version

import headway
from headway.compat.accelerate.launching import available
from headway.compat.accelerate.provided_names.tables import PROVIDED
from headway.errors import ConfigError

# `is_rich_available` depends on a setting of Accelerate, and `is_torch_version` takes arguments.
ELSEWHERE = {"is_rich_available", "is_torch_version"}


PROBES = sorted(name for name in PROVIDED if name.startswith("is_") and hasattr(theirs, name) and name not in ELSEWHERE)


@pytest.mark.parametrize("name", PROBES)
def test_probe_answers_like_accelerate(name):
    assert getattr(headway, name)() == bool(getattr(theirs, name)())


def test_probes_are_many():
    assert len(PROBES) > 50


def test_folder_without_init_is_not_a_package(tmp_path, monkeypatch):
    """Trackers create folders with their own names beside the script, such as `wandb/`."""
    (tmp_path / "tracker_of_nobody").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    probe = available._make_package_check("is_tracker_available", "tracker_of_nobody")
    assert not probe()
    (tmp_path / "tracker_of_nobody" / "__init__.py").write_text("")
    assert probe()


def test_versions_are_compared():
    assert headway.compare_versions("torch", ">=", "2.0")
    assert not headway.compare_versions(version.parse("1.9"), ">", "1.10")
    assert headway.compare_versions(version.parse("2.0.0rc1"), "<", "2.0")
    assert headway.compare_versions("headway", ">=", "0.16.0")
    assert headway.is_torch_version(">=", "2.0") is accelerate.utils.is_torch_version(">=", "2.0")
    assert headway.is_torch_version("<", str(torch.__version__)) is False
    with pytest.raises(ConfigError, match="operation='=>'; allowed: >, >=, =="):
        headway.is_torch_version("=>", "2.0")


def test_package_version_is_in_a_range():
    assert available._has_package("numpy", "1.0")
    assert not available._has_package("numpy", "99.0")
    assert not available._has_package("numpy", below="1.0")
    assert not available._has_package("no_such.package")


def test_fp8_is_available_only_if_all_gpus_support_it(monkeypatch):
    monkeypatch.setattr(available, "_query_nvidia_smi", lambda field: ["8.9"])
    assert available.check_cuda_fp8_capability() is True
    monkeypatch.setattr(available, "_query_nvidia_smi", lambda field: ["8.6", "9.0"])
    assert available.check_cuda_fp8_capability() is False
