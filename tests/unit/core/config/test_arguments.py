"""Test errors for arguments of the Accelerator that have a wrong type."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.config.load import COMMAND_LINE, SettingValue, encode_payload, merge_layers
from headway.core.config.preemption import Preemption
from headway.core.config.run import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    resolve_accumulation,
    resolve_loading,
    resolve_project,
)
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
        resolve_accumulation(None, 4, None, "")


def test_object_of_another_library_is_named():
    with pytest.raises(ConfigError, match=r"dataloader_config is of type types.SimpleNamespace; .* from headway"):
        resolve_loading(SimpleNamespace(split_batches=True), False)


def test_right_class_is_accepted():
    config = DataLoaderConfiguration(even_batches=False)
    assert resolve_loading(config, False) == config


def test_one_folder_can_be_written_in_two_ways():
    assert resolve_project("runs/", ProjectConfiguration(project_dir=Path("runs"))).logging_dir == Path("runs")
    with pytest.raises(ConfigError, match=r"project_dir='runs' contradicts project_config\.project_dir='other'"):
        resolve_project("runs", ProjectConfiguration(project_dir="other"))


def test_one_name_can_be_given_without_a_tuple():
    assert ActivationCheckpointing(blocks="Block").blocks == ("Block",)
    assert ActivationCheckpointing(blocks=SimpleNamespace).blocks == (SimpleNamespace,)
    assert Preemption(signals="SIGTERM") == Preemption(signals=("SIGTERM",))


def test_launchers_number_of_micro_batches_meets_the_plugin(monkeypatch):
    settings = {"gradient_accumulation_steps": SettingValue(8, f"{COMMAND_LINE}: --gradient_accumulation_steps")}
    monkeypatch.setenv("HEADWAY_RUN", encode_payload(merge_layers([settings]), 1))
    for plugin in (GradientAccumulationPlugin(num_steps=4), GradientAccumulationPlugin(sync_each_batch=True)):
        with pytest.raises(
            ConfigError,
            match=rf"num_steps={plugin.num_steps}\) of train.py:1 against --gradient_accumulation_steps 8 on the",
        ):
            resolve_accumulation(None, plugin, None, "train.py:1")
    found = resolve_accumulation(None, GradientAccumulationPlugin(8, sync_each_batch=True), None, "train.py:1")
    assert (found.num_steps, found.sync_each_batch) == (8, True)
    with pytest.raises(ConfigError, match=r"global_batch_size=16 .* gradient_accumulation_steps=8 \(command line"):
        resolve_accumulation(None, None, 16, "train.py:1")
