"""Small things around a script, a bar on one process among them."""

import os
import socket

import pytest

import headway
from headway.common import optional
from headway.compat.accelerate.launching import environment
from headway.core.config.files import read_file_layer
from headway.errors import ConfigError, OptionalDependencyMissing


def test_variables_are_set_for_a_block(monkeypatch):
    monkeypatch.setenv("FAMILIAR_KEPT", "before")
    with environment.patch_environment(familiar_kept=1, FAMILIAR_NEW="x"):
        assert (os.environ["FAMILIAR_KEPT"], os.environ["FAMILIAR_NEW"]) == ("1", "x")
    assert os.environ["FAMILIAR_KEPT"] == "before"
    assert "FAMILIAR_NEW" not in os.environ


def test_no_variable_in_a_block(monkeypatch):
    monkeypatch.setenv("FAMILIAR_KEPT", "before")
    with environment.clear_environment():
        assert dict(os.environ) == {}
        os.environ["FAMILIAR_NEW"] = "x"
    assert os.environ["FAMILIAR_KEPT"] == "before"
    assert "FAMILIAR_NEW" not in os.environ


def test_what_a_function_sets_is_gone_after_it(monkeypatch):
    monkeypatch.setenv("ACCELERATE_KEPT", "before")

    @environment.purge_accelerate_environment
    def run(answer):
        os.environ["ACCELERATE_KEPT"] = "after"
        os.environ["HEADWAY_FAMILIAR"] = "x"
        os.environ["FAMILIAR_OTHER"] = "stays"
        return answer

    monkeypatch.delenv("FAMILIAR_OTHER", raising=False)
    assert run(3) == 3
    assert os.environ["ACCELERATE_KEPT"] == "before"
    assert "HEADWAY_FAMILIAR" not in os.environ
    assert os.environ.pop("FAMILIAR_OTHER") == "stays"


def test_reading_variables(monkeypatch):
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


def test_a_config_file_that_launch_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    path = environment.write_basic_config("BF16")
    assert path == tmp_path / "default_config.yaml"
    assert read_file_layer(None, os.environ)["mixed_precision"].value == "bf16"
    assert environment.write_basic_config() is False
    assert "already exists" in capsys.readouterr().out
    assert environment.write_basic_config(save_location=tmp_path / "inner" / "other.yaml").exists()
    with pytest.raises(ConfigError, match="mixed_precision='fp9'"):
        environment.write_basic_config("fp9", tmp_path / "new.yaml")


def test_the_rest(monkeypatch):
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


def test_it_iterates_and_takes_tqdms_options(capsys):
    pytest.importorskip("tqdm", reason="tqdm is an optional package")
    bar = headway.tqdm(range(3), desc="steps")
    assert list(bar) == [0, 1, 2]
    assert "steps" in capsys.readouterr().err
    assert headway.tqdm(range(3), disable=True).disable
    assert headway.tqdm(total=2, main_process_only=False).total == 2


def test_the_old_spelling_is_named():
    with pytest.raises(ConfigError, match="write main_process_only=True"):
        headway.tqdm(True, range(3))


def test_a_missing_tqdm_is_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(OptionalDependencyMissing, match="pip install 'tqdm'"):
        headway.tqdm(range(3))
