"""Test errors for arguments of the Accelerator that have a wrong type."""

from types import SimpleNamespace

import pytest

from headway.core.config.run import DataLoaderConfiguration, resolve_loading, resolve_project, resolve_windows
from headway.errors import ConfigError


def test_dict_is_refused_with_the_class_to_use():
    with pytest.raises(ConfigError) as raised:
        resolve_loading({"split_batches": True}, False)
    assert (
        "dataloader_config is of type dict; give dataloader_config=DataLoaderConfiguration(split_batches=True)"
        in str(raised.value)
    )
    with pytest.raises(
        ConfigError, match=r"project_config is of type dict; give project_config=ProjectConfiguration\(total_limit=2\)"
    ):
        resolve_project(None, {"total_limit": 2})
    with pytest.raises(
        ConfigError, match=r"gradient_accumulation_plugin is of type int; give .*=GradientAccumulationPlugin\("
    ):
        resolve_windows(None, 4, None, "")


def test_object_of_another_library_is_named():
    with pytest.raises(ConfigError, match=r"dataloader_config is of type types.SimpleNamespace; .* from headway"):
        resolve_loading(SimpleNamespace(split_batches=True), False)


def test_right_class_is_accepted():
    config = DataLoaderConfiguration(even_batches=False)
    assert resolve_loading(config, False) == config
