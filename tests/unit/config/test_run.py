"""Settings that the user's code gives."""

import dataclasses
import inspect

import pytest

from headway import Accelerator
from headway.config.run import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.errors import CallError, ConfigError


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2", None])
def test_steps_are_a_whole_positive_number(steps):
    with pytest.raises(ConfigError, match="1 or more"):
        GradientAccumulationPlugin(num_steps=steps)


def test_a_keyword_typed_wrong_is_answered_with_the_right_one():
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


def test_the_logs_go_to_the_project_unless_told():
    assert ProjectConfiguration(project_dir="a").with_defaults().logging_dir == "a"
    assert ProjectConfiguration(project_dir="a", logging_dir="b").with_defaults().logging_dir == "b"
    assert ProjectConfiguration().with_defaults().logging_dir is None


def test_settings_cannot_be_changed_under_way():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DataLoaderConfiguration().even_batches = False
