"""Test the settings that the user's code passes to the Accelerator."""

import inspect
from pathlib import Path

import pytest
import torch

from headway import Accelerator, TrainingArguments
from headway.core.config.run import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.core.config.torch_kwargs import GradScalerKwargs
from headway.errors import CallError, ConfigError


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2", None])
def test_steps_must_be_a_positive_whole_number(steps):
    with pytest.raises(ConfigError, match="1 or more"):
        GradientAccumulationPlugin(num_steps=steps)


def test_misspelled_keyword_gets_a_suggestion():
    with pytest.raises(
        CallError, match=r"ProjectConfiguration\(\) has no argument 'total_limits'; did you mean total_limit\?"
    ):
        ProjectConfiguration(total_limits=3)
    with pytest.raises(
        TypeError, match=r"Accelerator\(\) has no argument 'mixed_precison'; did you mean mixed_precision\?"
    ):
        Accelerator(mixed_precison="bf16")
    with pytest.raises(CallError, match=r"no argument 'x'; allowed: num_steps, "):
        GradientAccumulationPlugin(x=3)
    assert next(iter(inspect.signature(ProjectConfiguration).parameters)) == "project_dir"


def test_logging_folder_defaults_to_the_project_folder():
    assert ProjectConfiguration(project_dir="a").with_defaults().logging_dir == "a"
    assert ProjectConfiguration(project_dir="a", logging_dir="b").with_defaults().logging_dir == "b"
    assert ProjectConfiguration().with_defaults().logging_dir is None


def test_settings_can_be_changed_until_an_accelerator_copies_them():
    loading, windows, scaling = DataLoaderConfiguration(), GradientAccumulationPlugin(), GradScalerKwargs()
    loading.even_batches, windows.num_steps, scaling.enabled = False, 3, False
    accelerator = Accelerator(
        cpu=True, dataloader_config=loading, gradient_accumulation_plugin=windows, kwargs_handlers=[scaling]
    )
    assert accelerator.gradient_accumulation_steps == 3
    loading.even_batches = True  # the script's own object stays mutable, for its next Accelerator
    taken = accelerator.dataloader_config
    assert (taken.even_batches, accelerator.options.scaler.enabled, GradScalerKwargs().enabled) == (False, False, True)
    for settings in (taken, accelerator.options.scaler, accelerator.options.ddp, accelerator.project_configuration):
        with pytest.raises(
            ConfigError, match=r"an Accelerator already uses these options\. Set them before you create it"
        ):
            settings.any = 1
    with pytest.raises(
        CallError, match="DataLoaderConfiguration has no field 'evn_batches'; did you mean even_batches"
    ):
        loading.evn_batches = False


def test_assigned_values_are_checked_by_the_accelerator():
    windows = GradientAccumulationPlugin()
    windows.num_steps = 0
    with pytest.raises(ConfigError, match="accumulation over 0 steps"):
        Accelerator(cpu=True, gradient_accumulation_plugin=windows)
    project = ProjectConfiguration()
    project.set_directories("runs")
    assert Accelerator(cpu=True, project_config=project).logging_dir == "runs"


@pytest.mark.parametrize("kind", [str, Path])
def test_leading_tilde_is_the_home_directory(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    project = ProjectConfiguration(kind("~/run"), kind("~/logs"), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    assert accelerator.project_dir == kind(tmp_path / "home/run")
    accelerator.init_trackers("p")
    accelerator.save_state()
    accelerator.end_training()
    assert (tmp_path / "home/run/checkpoints/checkpoint_0").is_dir()
    assert (tmp_path / "home/logs/p/log.jsonl").is_file()
    assert Accelerator(cpu=True, project_dir=kind("~/run")).logging_dir == kind(tmp_path / "home/run")
    arguments = TrainingArguments(output_dir=kind("~/out"), logging_dir=kind("~/logs"))
    assert (arguments.output_dir, arguments.logging_dir) == (kind(tmp_path / "home/out"), kind(tmp_path / "home/logs"))
    accelerator.save_model(torch.nn.Linear(1, 1), kind("~/model"))
    assert list((tmp_path / "home/model").iterdir())
    assert not (tmp_path / "~").exists()
