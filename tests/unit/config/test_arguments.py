"""Arguments of the Accelerator that are objects of another kind than asked for."""

from types import SimpleNamespace

import pytest

from headway.config.run import DataLoaderConfiguration, loading_settings, project_settings, windows
from headway.errors import ConfigError


def test_a_dict_is_answered_with_what_to_write():
    with pytest.raises(ConfigError) as raised:
        loading_settings({"split_batches": True}, False)
    assert (
        "dataloader_config is of type dict; give dataloader_config=DataLoaderConfiguration(split_batches=True)"
        in str(raised.value)
    )
    with pytest.raises(
        ConfigError, match=r"project_config is of type dict; give project_config=ProjectConfiguration\(total_limit=2\)"
    ):
        project_settings(None, {"total_limit": 2})
    with pytest.raises(
        ConfigError, match=r"gradient_accumulation_plugin is of type int; give .*=GradientAccumulationPlugin\("
    ):
        windows(None, 4, None, "")


def test_an_object_of_another_library_is_named():
    with pytest.raises(ConfigError, match=r"dataloader_config is of type types.SimpleNamespace; .* from headway"):
        loading_settings(SimpleNamespace(split_batches=True), False)


def test_the_right_kind_passes():
    config = DataLoaderConfiguration(even_batches=False)
    assert loading_settings(config, False) == config
