"""Test Accelerate's utilities for environment variables, basic config files, small conversions and progress bars."""

import os
import socket

import pytest
from accelerate.utils import environment as their_environment

import headway
from headway.common import optional
from headway.compat.accelerate.constants import DistributedType
from headway.compat.accelerate.launching import environment
from headway.core.config.files import read_file_layer
from headway.errors import ConfigError, OptionalDependencyMissing


def test_patch_environment_lasts_for_the_block(monkeypatch):
    monkeypatch.setenv("FAMILIAR_KEPT", "before")
    with environment.patch_environment(familiar_kept=1, FAMILIAR_NEW="x"):
        assert (os.environ["FAMILIAR_KEPT"], os.environ["FAMILIAR_NEW"]) == ("1", "x")
    assert os.environ["FAMILIAR_KEPT"] == "before"
    assert "FAMILIAR_NEW" not in os.environ


def test_clear_environment_lasts_for_the_block(monkeypatch):
    monkeypatch.setenv("FAMILIAR_KEPT", "before")
    with environment.clear_environment():
        assert dict(os.environ) == {}
        os.environ["FAMILIAR_NEW"] = "x"
    assert os.environ["FAMILIAR_KEPT"] == "before"
    assert "FAMILIAR_NEW" not in os.environ


def test_variables_set_in_a_function_are_removed_after_it(monkeypatch):
    monkeypatch.setenv("ACCELERATE_KEPT", "before")

    @environment.purge_accelerate_environment
    def set_variables(answer):
        os.environ["ACCELERATE_KEPT"] = "after"
        os.environ["HEADWAY_FAMILIAR"] = "x"
        os.environ["FAMILIAR_OTHER"] = "stays"
        return answer

    monkeypatch.delenv("FAMILIAR_OTHER", raising=False)
    assert set_variables(3) == 3
    assert os.environ["ACCELERATE_KEPT"] == "before"
    assert "HEADWAY_FAMILIAR" not in os.environ
    assert os.environ.pop("FAMILIAR_OTHER") == "stays"


def test_variables_are_parsed(monkeypatch):
    monkeypatch.setenv("FAMILIAR", "yes")
    monkeypatch.setenv("FAMILIAR_COUNT", "3")
    assert environment.parse_flag_from_env("FAMILIAR") is True
    assert environment.parse_flag_from_env("FAMILIAR_MISSING", True) is True
    assert environment.parse_choice_from_env("FAMILIAR") == "yes"
    assert environment.parse_choice_from_env("FAMILIAR_MISSING") == "no"
    assert environment.get_int_from_env(["FAMILIAR_MISSING", "FAMILIAR_COUNT"], 1) == 3
    assert environment.get_int_from_env(["FAMILIAR_MISSING"], 1) == 1
    assert [environment.str_to_bool(text) for text in ("Yes", "off")] == [1, 0]
    assert environment.str_to_bool("on", to_bool=True) is True
    with pytest.raises(ConfigError):
        environment.str_to_bool("perhaps")


def test_basic_config_is_read_by_launch(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    path = environment.write_basic_config("BF16")
    assert path == tmp_path / "default_config.yaml"
    assert read_file_layer(None, os.environ)["mixed_precision"].value == "bf16"
    assert environment.write_basic_config() is False
    assert "already exists" in capsys.readouterr().out
    assert environment.write_basic_config(save_location=tmp_path / "inner" / "other.yaml").exists()
    with pytest.raises(ConfigError, match="mixed_precision='fp9'"):
        environment.write_basic_config("fp9", tmp_path / "new.yaml")


def test_small_utilities_return_the_documented_values(monkeypatch):
    assert environment.convert_bytes(1536) == "1.5 KB"
    assert environment.convert_file_size_to_int("5GB") == 5 * 10**9
    assert environment.are_libraries_initialized("os", "no_such_library") == ["os"]
    assert environment.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert environment.recursive_getattr(os, "path.sep") == "/"
    assert environment.get_pretty_name(environment.get_pretty_name) == "get_pretty_name"
    assert environment.get_pretty_name(3) == "int"
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        listening.listen()
        assert environment.is_port_in_use(listening.getsockname()[1])


def test_tqdm_iterates_and_accepts_options(capsys):
    pytest.importorskip("tqdm", reason="tqdm is an optional package")
    bar = headway.tqdm(range(3), desc="steps")
    assert list(bar) == [0, 1, 2]
    assert "steps" in capsys.readouterr().err
    assert headway.tqdm(range(3), disable=True).disable
    assert headway.tqdm(total=2, main_process_only=False).total == 2


def test_earlier_signature_of_tqdm_is_explained():
    with pytest.raises(ConfigError, match="write main_process_only=True"):
        headway.tqdm(True, range(3))


def test_missing_tqdm_is_named(monkeypatch):
    def raise_import_error(name):
        raise ImportError(name)

    monkeypatch.setattr(optional.importlib, "import_module", raise_import_error)
    with pytest.raises(OptionalDependencyMissing, match="pip install 'tqdm'"):
        headway.tqdm(range(3))


def test_fsdp_variables_are_set_and_unsafe_environment_lines_are_dropped(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "old")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    environment.enable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("True", "True")
    environment.disable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("True", "False")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    given = {"A": "1", "B": "<x", "C": "", "D": "two words", "E": "2"}
    assert environment.convert_dict_to_env_variables(given) == ["A=1\n", "E=2\n"]
    assert their_environment.convert_dict_to_env_variables({"A": "1"}) == ["A=1\n"]


class State:
    """State with an active DeepSpeed plugin."""

    distributed_type = DistributedType.DEEPSPEED
    deepspeed_plugin = "the plugin"


def test_active_deepspeed_plugin_is_returned():
    assert environment.get_active_deepspeed_plugin(State()) == "the plugin"
    made = headway.Accelerator(cpu=True)
    with pytest.raises(ValueError, match="not DEEPSPEED"):
        environment.get_active_deepspeed_plugin(made.state)
