"""Test config files: exact round trips, and valid settings or a clear error for any bytes."""

import os
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.core.config.files import (
    KEYS,
    find_default_file,
    format_config,
    parse_config,
    read_file_layer,
    write_config,
)
from headway.core.config.launch import SETTINGS, LaunchConfig
from headway.core.config.load import merge_layers
from headway.errors import ConfigError

# For more examples: `HEADWAY_EXAMPLES=10000 pytest tests/unit/core/config`.
EXAMPLES = settings(
    max_examples=int(os.environ.get("HEADWAY_EXAMPLES", "300")), deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


def make_values(setting):
    """Return a strategy for the valid values of a setting."""
    if setting.kind == "integer":
        return st.integers(setting.minimum, setting.maximum)
    if setting.kind == "number":
        return st.floats(setting.minimum or 0, 1e6, allow_nan=False)
    if setting.kind in ("switch", "truth"):
        return st.booleans()
    if setting.name == "strategy":
        return st.sampled_from(["ddp", "fsdp", "hsdp=2", "fsdp+tp=2", "pp=2+fsdp"])
    if setting.kind == "choice":
        return st.sampled_from(setting.choices)
    return st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1).filter(lambda text: text.strip())


configs = st.fixed_dictionaries({}, optional={name: make_values(SETTINGS[name]) for name in KEYS}).map(
    lambda decided: LaunchConfig(**decided)
)


@pytest.mark.slow
@given(configs)
@EXAMPLES
def test_config_round_trips_exactly(config):
    assert merge_layers([parse_config(format_config(config).encode(), "f")]).config == config


def _format_line(key, value):
    return f"{key}: {value}\n"


lines = st.one_of(
    st.builds(_format_line, st.sampled_from(KEYS), st.text(string.printable, max_size=12)),
    st.builds(_format_line, st.text(string.ascii_lowercase + "_", min_size=1), st.integers()),
    st.builds(_format_line, st.sampled_from(KEYS), st.one_of(st.integers(), st.floats(), st.booleans(), st.none())),
    st.text(string.printable, max_size=30),
)


@given(st.one_of(st.binary(max_size=200), st.lists(lines, max_size=5).map("".join).map(str.encode)))
@EXAMPLES
def test_any_bytes_give_settings_or_a_clear_error(content):
    try:
        config = merge_layers([parse_config(content, "some file")]).config
    except ConfigError as error:
        message = str(error)
    else:
        message = "some file"
        assert merge_layers([parse_config(format_config(config).encode(), "f")]).config == config
    assert "some file" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_procs: 2", r"num_procs \(file: f key num_procs\) is not a setting; did you mean num_processes\?"),
        ("compute_environment: LOCAL_MACHINE", "is not a setting; there are num_processes"),
        ("fsdp_config: {}", "is not a setting"),
        ("xyzzy: 1", "xyzzy .* is not a setting; there are num_processes, "),
        ("num_processes: '2'", r"num_processes='2' \(file: f key num_processes\) must be a whole number, 1 or more"),
        ("num_processes: true", "num_processes=True"),
        ("num_processes: 2.5", "num_processes=2.5"),
        ("cpu: 1", "cpu=1 .* must be true or false"),
        ("mixed_precision: yes", "mixed_precision=True .* one of no, bf16, fp16"),
        ("- 1", "one setting a line"),
        ("a: [", "not valid YAML"),
        ("module: true", "module .* is not a setting"),
    ],
)
def test_invalid_file_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(text.encode(), "f")


def test_common_yaml_spellings_are_accepted():
    layer = parse_config(b"mixed_precision: no\ngpu_ids: 0\ntee: 3\nnum_processes:\n", "f")
    assert {name: entry.value for name, entry in layer.items()} == {"mixed_precision": "no", "gpu_ids": "0", "tee": "3"}


def test_json_is_accepted():
    assert parse_config(b'{"num_processes": 4, "cpu": true}', "f")["num_processes"].value == 4


def test_default_file_is_found():
    assert str(find_default_file({"HEADWAY_HOME": "/h", "XDG_CONFIG_HOME": "/x"})) == "/h/default_config.yaml"
    assert str(find_default_file({"XDG_CONFIG_HOME": "/x"})) == "/x/headway/default_config.yaml"
    assert str(find_default_file({"HOME": "/u"})) == "/u/.config/headway/default_config.yaml"


def test_default_file_may_be_missing_but_a_named_one_may_not(tmp_path):
    home = {"HEADWAY_HOME": str(tmp_path)}
    assert read_file_layer(None, home) == {}
    with pytest.raises(ConfigError, match=r"nothing.yaml cannot be read: No such file"):
        read_file_layer(str(tmp_path / "nothing.yaml"), home)
    write_config(LaunchConfig(num_processes=3), find_default_file(home))
    assert read_file_layer(None, home)["num_processes"].value == 3


def test_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_config(LaunchConfig(), tmp_path / "file" / "default_config.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 50_000, "nest(ed more than 16 levels deep|ing depth)"),
        (b"a: " + b"{b: " * 50_000, "nest(ed more than 16 levels deep|ing depth)"),
        (b"num_processes: &n [*n]", "uses the alias \\*n; write the value out"),
        (b"a: &a [x]\nb: &b [*a, *a]\n", "uses the alias \\*a"),
        (b"cpu: !!bool maybe", "is not valid YAML: 'maybe' is not a value of its kind"),
        (b"num_processes: !!int two", "is not valid YAML: "),
        (b"num_processes: 0x" + b"f" * 900, "num_processes=[0-9]+... .* must be a whole number"),
        (
            b"num_processes: 0x" + b"f" * 5000,
            r"contains a number or word that no setting accepts: '0xf+\.\.\. \(5004 char",
        ),
        (b"gpu_ids: 0x" + b"f" * 5000, "contains a number or word that no setting accepts"),
        (b"tee: 0x" + b"f" * 900, "tee=[0-9]+... .* must be one of 0, 1, 2, 3"),
        (b"num_processes: " + b"9" * 5000, "contains a number or word that no setting accepts"),
        (b"role: [" + b"x, " * 500 + b"]", r"role=.*\.\.\. \(2500 characters\) .* must be text"),
        (b"monitor_interval: " + b"9" * 400, r"monitor_interval=9+\.\.\. \(400 characters\) .* must be a number"),
        (b"log_dir: 2024-01-02", r"log_dir=datetime.date\(2024, 1, 2\) .* must be text"),
    ],
    ids=[
        "brackets",
        "braces",
        "itself",
        "anchors",
        "bool",
        "int",
        "hex",
        "long hex",
        "hex for text",
        "hex for a choice",
        "digits",
        "long",
        "beyond floats",
        "date",
    ],
)
def test_hostile_file_causes_one_error(content, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(content, "c.yaml")


def test_device_pipe_and_long_file_are_refused(tmp_path):
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")  # a reader would wait forever
    (tmp_path / "long").write_bytes(b"#" * (2**20 + 1))
    for name, said in (
        ("zero", "is a device"),
        ("pipe", "is a pipe"),
        ("long", "is too long: 1,048,577 bytes, where 1,0"),
    ):
        with pytest.raises(ConfigError, match=f"the config file .*{name} {said}"):
            read_file_layer(str(tmp_path / name), {})


@pytest.mark.parametrize("content", [b"timeout: 7\npatience: 6\n", b"patience: 6\ntimeout: 7\n"])
def test_current_key_overrides_its_earlier_name(content):
    setting = parse_config(content, "f")["timeout"]
    assert (setting.value, setting.origin) == (7.0, "file: f key timeout")
