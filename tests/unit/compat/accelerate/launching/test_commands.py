"""Test command lines that name a config file of Accelerate, and `accelerate to-fsdp2`."""

import json

import pytest
import yaml
from accelerate.commands import to_fsdp2
from hypothesis import given
from hypothesis import strategies as st

from headway.compat.accelerate.launching import commands
from headway.compat.accelerate.launching.commands import replace_config_file
from headway.core.config.files import parse_config, read_file_layer
from headway.errors import ConfigError

THEIRS = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 4
fsdp_config:
  fsdp_state_dict_type: FULL_STATE_DICT
"""


def read_settings(path):
    return {name: value.value for name, value in parse_config(open(path, "rb").read(), str(path)).items()}


@pytest.mark.parametrize("joined", [False, True])
def test_config_file_of_accelerate_is_translated(tmp_path, joined):
    file = tmp_path / "theirs.yaml"
    file.write_text(THEIRS)
    told = [f"--config-file={file}"] if joined else ["--config_file", str(file)]
    line, more = replace_config_file(["--cpu", *told, "--debug", "train.py", "--config_file", "the script's"], tmp_path)
    assert line[:2] == ["--cpu", "--config_file"]
    assert line[3:] == ["--debug", "train.py", "--config_file", "the script's"]
    assert read_settings(line[2]).items() >= {"num_processes": 4, "strategy": "fsdp"}.items()
    assert more == {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}


def test_config_file_of_headway_is_kept(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("num_processes: 2\n")
    line = ["--config_file", str(file), "train.py"]
    assert replace_config_file(line, tmp_path) == (line, {})


def test_script_arguments_are_kept(tmp_path):
    for line in (["train.py", "--config_file", "missing.yaml"], ["-m", "train", "--config_file", "missing.yaml"]):
        assert replace_config_file(line, tmp_path) == (line, {})


def test_file_for_one_process_starts_one(tmp_path):
    file = tmp_path / "single.yaml"
    file.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 8\n")
    line, _ = replace_config_file(["--config_file", str(file), "train.py"], tmp_path)
    assert read_settings(line[1])["num_processes"] == 1


def test_dropped_key_is_reported(tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text("distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n")
    replace_config_file(["--config_file", str(file), "train.py"], tmp_path)
    assert "megatron_lm_config" in capsys.readouterr().err


def test_unknown_key_is_refused(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text("num_proceses: 2\n")
    with pytest.raises(ConfigError, match="num_proceses"):
        replace_config_file(["--config_file", str(file), "train.py"], tmp_path)


SECTIONS = st.dictionaries(
    st.sampled_from([*to_fsdp2.ARGUMENT_KEY_MAPPING, "fsdp_own"]),
    st.sampled_from([1, True, "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "other"]),
)


@given(section=SECTIONS)
def test_fsdp2_keys_equal_accelerates(section):
    for config in ({"fsdp_config": section}, {}):
        texts = [json.dumps(config)] * 2
        theirs, ours = to_fsdp2.convert_config_to_fsdp2, commands.convert_config_to_fsdp2
        assert ours(json.loads(texts[0])) == theirs(json.loads(texts[1]))


def test_to_fsdp2_rewrites_a_file(tmp_path, monkeypatch, capsys):
    source, made = tmp_path / "one.yaml", tmp_path / "two.yaml"
    source.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n")
    line = ["accelerate", "to-fsdp2", "--config_file", str(source)]
    monkeypatch.setattr("sys.argv", line)
    assert commands.main() == 2
    assert f"{source} would be written over" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*line, "--output_file", str(made)])
    assert commands.main() == 0
    wanted = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": False, "fsdp_version": 2}}
    assert yaml.safe_load(made.read_text()) == wanted
    monkeypatch.setattr("sys.argv", [*line, "--overwrite"])
    assert commands.main() == 0
    assert yaml.safe_load(source.read_text()) == wanted


def test_origins_name_the_users_file_and_not_its_translation(tmp_path):
    file = tmp_path / "my accelerate.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n")
    line, _ = replace_config_file(["--config_file", str(file), "train.py"], tmp_path)
    layer = read_file_layer(line[1], {})
    assert {value.origin for value in layer.values()} == {f"file: {file} (translated) key {key}" for key in layer}
    assert layer["mixed_precision"].value == "bf16"
    own = tmp_path / "own.yaml"
    own.write_text("num_processes: 2\n")
    assert read_file_layer(str(own), {})["num_processes"].origin == f"file: {own} key num_processes"
