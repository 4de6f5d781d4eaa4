"""Test the settings of torch.compile from arguments, plugins, the launcher and the environment."""

import json

import pytest

from headway import Accelerator
from headway.compat.accelerate.launching.config_file import translate_config
from headway.core.config.compilation import TorchDynamoPlugin
from headway.core.config.string_enums import DynamoBackend
from headway.errors import ConfigError


def set_launched_settings(monkeypatch, origin="command line", force=False, **settings):
    content = {
        "version": 1,
        "settings": {name: {"value": value, "origin": f"{origin}: --{name}"} for name, value in settings.items()},
        "num_processes": 1,
        "force": force,
    }
    monkeypatch.setenv("HEADWAY_RUN", json.dumps(content))


def test_backend_by_name_and_plugin():
    assert Accelerator(cpu=True).state.dynamo_plugin.backend is DynamoBackend.NO
    assert not TorchDynamoPlugin().compiles
    plugin = Accelerator(cpu=True, dynamo_backend="Inductor").state.dynamo_plugin
    assert (plugin.backend, plugin.mode, plugin.fullgraph, plugin.dynamic) == ("INDUCTOR", "default", False, None)
    assert plugin.compiles
    assert plugin.to_kwargs() == {
        "backend": "inductor", "mode": "default", "fullgraph": False, "dynamic": None, "disable": False,
    }  # fmt: skip
    given = TorchDynamoPlugin(DynamoBackend.INDUCTOR, options={"max_autotune": True}, use_regional_compilation=True)
    assert given.to_kwargs()["options"] == {"max_autotune": True}
    assert "mode" not in given.to_kwargs()
    assert given.to_dict()["use_regional_compilation"] is True
    assert not TorchDynamoPlugin("inductor", disable=True).compiles
    own = TorchDynamoPlugin(backend=set_launched_settings)
    assert (own.name, own.to_kwargs()["backend"]) == ("set_launched_settings", set_launched_settings)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "fast"}, "dynamo_backend='fast' is unknown; allowed: AOT_EAGER"),
        (
            {"backend": "inductor", "mode": "fast"},
            "mode='fast' of torch.compile is unknown; allowed: default, reduce-overhead",
        ),
        ({"backend": "eager", "mode": "max-autotune"}, "only works with the backend inductor; leave it out with eager"),
        ({"backend": "inductor", "mode": "max-autotune", "options": {"a": 1}}, "not both"),
    ],
)
def test_contradicting_options_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        TorchDynamoPlugin(**arguments)


def test_two_arguments_or_another_type_are_refused():
    with pytest.raises(ConfigError, match="not both"):
        Accelerator(cpu=True, dynamo_backend="no", dynamo_plugin=TorchDynamoPlugin())
    with pytest.raises(ConfigError, match="dynamo_plugin is a dict; give a headway"):
        Accelerator(cpu=True, dynamo_plugin={"backend": "inductor"})


def test_launcher_sets_the_options_that_the_script_did_not_set(monkeypatch):
    set_launched_settings(
        monkeypatch, dynamo_backend="aot_eager", dynamo_use_regional_compilation=True, dynamo_use_dynamic=False,
        dynamo_use_fullgraph=True,
    )  # fmt: skip
    plugin = Accelerator(cpu=True).state.dynamo_plugin
    assert (plugin.name, plugin.use_regional_compilation, plugin.dynamic, plugin.fullgraph) == (
        "aot_eager",
        True,
        False,
        True,
    )
    assert TorchDynamoPlugin(backend=DynamoBackend.AOT_EAGER).name == "aot_eager"  # the same backend in another case
    with pytest.raises(ConfigError, match="against --dynamo_backend aot_eager on the command line"):
        Accelerator(cpu=True, dynamo_backend="inductor")
    set_launched_settings(monkeypatch, force=True, dynamo_backend="aot_eager")
    assert Accelerator(cpu=True, dynamo_backend="inductor").state.dynamo_plugin.name == "aot_eager"


def test_variables_set_the_options(monkeypatch):
    monkeypatch.delenv("HEADWAY_RUN", raising=False)
    monkeypatch.setenv("HEADWAY_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("HEADWAY_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    plugin = TorchDynamoPlugin()
    assert (plugin.backend, plugin.use_regional_compilation) == (DynamoBackend.EAGER, True)
    monkeypatch.setenv("HEADWAY_DYNAMO_MODE", "quick")
    with pytest.raises(
        ConfigError, match=r"dynamo_mode='quick' \(environment: HEADWAY_DYNAMO_MODE\) must be one of default"
    ):
        TorchDynamoPlugin()


def test_dynamo_config_of_accelerate_is_translated():
    made = translate_config(
        {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": True,
                           "dynamo_use_fullgraph": False, "dynamo_use_regional_compilation": True}},
        "default_config.yaml",
    )  # fmt: skip
    config = made.config
    assert made.num_lost == 0
    assert (config.dynamo_backend, config.dynamo_mode, config.dynamo_use_dynamic) == ("inductor", "default", True)
    assert (config.dynamo_use_fullgraph, config.dynamo_use_regional_compilation) == (False, True)
