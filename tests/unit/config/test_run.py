"""Settings that the user's code gives."""

import dataclasses

import pytest

from headway.config.run import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.errors import ConfigError


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2", None])
def test_steps_are_a_whole_positive_number(steps):
    with pytest.raises(ConfigError, match="1 or more"):
        GradientAccumulationPlugin(num_steps=steps)


def test_the_logs_go_to_the_project_unless_told():
    assert ProjectConfiguration(project_dir="a").with_defaults().logging_dir == "a"
    assert ProjectConfiguration(project_dir="a", logging_dir="b").with_defaults().logging_dir == "b"
    assert ProjectConfiguration().with_defaults().logging_dir is None


def test_settings_cannot_be_changed_under_way():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DataLoaderConfiguration().even_batches = False
