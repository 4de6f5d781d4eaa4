"""Test command lines that name a config file of Accelerate, and `accelerate to-fsdp2`."""

import json

import pytest
import yaml
from accelerate.commands import to_fsdp2
from hypothesis import given
from hypothesis import strategies as st

from headway.compat.accelerate.launching import commands
from headway.compat.accelerate.launching.commands import translate_config_file
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


def test_config_file_of_accelerate_is_translated(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(THEIRS)
    path, more = translate_config_file(str(file), tmp_path)
    assert read_settings(path).items() >= {"num_processes": 4, "strategy": "fsdp"}.items()
    assert more == {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}


def test_config_file_of_headway_is_kept(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("num_processes: 2\n")
    assert translate_config_file(str(file), tmp_path) == (str(file), {})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--config_file theirs.yaml --cpu train.py", "4 processes on cpu"),
        ("--config-file=theirs.yaml --cpu train", "4 processes on cpu"),
        ("--cpu train", "1 process on cpu"),
        ("--cpu --no_python ./run.sh", "1 process on cpu"),
    ],
)
def test_config_file_after_the_script_belongs_to_the_script(tmp_path, monkeypatch, capfd, words, told):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "train", "run.sh"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "theirs.yaml").write_text(THEIRS)
    line = ["accelerate", "launch", "--dry-run", *words.split(), "--config_file", "model.yaml"]
    monkeypatch.setattr("sys.argv", line)
    code = commands.main()
    out, err = capfd.readouterr()
    assert code == 0, err
    assert told in out
    assert "model.yaml" in out


def test_invalid_config_file_ends_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr("sys.argv", ["accelerate", "launch", "--config_file", "missing.yaml", "train.py"])
    assert commands.main() == 2
    assert "missing.yaml" in capfd.readouterr().err


def test_file_for_one_process_starts_one(tmp_path):
    file = tmp_path / "single.yaml"
    file.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 8\n")
    assert read_settings(translate_config_file(str(file), tmp_path)[0])["num_processes"] == 1


def test_dropped_key_is_reported(tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text("distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n")
    translate_config_file(str(file), tmp_path)
    assert "megatron_lm_config" in capsys.readouterr().err


def test_unknown_key_is_refused(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text("num_proceses: 2\n")
    with pytest.raises(ConfigError, match="num_proceses"):
        translate_config_file(str(file), tmp_path)


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
    expected = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": False, "fsdp_version": 2}}
    assert yaml.safe_load(made.read_text()) == expected
    monkeypatch.setattr("sys.argv", [*line, "--overwrite"])
    assert commands.main() == 0
    assert yaml.safe_load(source.read_text()) == expected


def test_origins_name_the_users_file_and_not_its_translation(tmp_path):
    file = tmp_path / "my accelerate.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n")
    layer = read_file_layer(translate_config_file(str(file), tmp_path)[0], {})
    assert {value.origin for value in layer.values()} == {f"file: {file} (translated) key {key}" for key in layer}
    assert layer["mixed_precision"].value == "bf16"
    own = tmp_path / "own.yaml"
    own.write_text("num_processes: 2\n")
    assert read_file_layer(str(own), {})["num_processes"].origin == f"file: {own} key num_processes"
