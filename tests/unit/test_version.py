"""Test the version: it is defined once, newer than scripts for Accelerate require, and saved in checkpoints."""

import torch
from click.testing import CliRunner
from packaging import version
from setuptools.config.pyprojecttoml import read_configuration

import headway
from headway import Accelerator
from headway.cli.checkpoints import inspect
from headway.version import __version__
from tests.house.tree_of_source import ROOT


def test_version_is_defined_once():
    assert headway.__version__ == __version__
    assert read_configuration(ROOT / "pyproject.toml")["project"]["version"] == __version__


def test_version_is_newer_than_scripts_require():
    year, month, number = (int(part) for part in __version__.split("."))
    assert year >= 2026
    assert 1 <= month <= 12
    assert number >= 0
    assert version.parse(__version__) >= version.parse("0.16.0")
    assert version.parse(__version__) > version.parse("1.15.0")


def test_checkpoint_contains_the_version(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "saved")
    report = CliRunner().invoke(inspect, [str(tmp_path / "saved")])
    assert f"headway {__version__}" in report.output
