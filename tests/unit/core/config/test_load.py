"""Test layers of settings: precedence, origins, and the payload for workers."""

import json

import pytest

from headway.common import env
from headway.core.config.files import read_settings
from headway.core.config.launch import SETTINGS, UNSET, LaunchConfig
from headway.core.config.load import (
    SettingValue,
    encode_payload,
    merge_layers,
    read_environment_layer,
    read_requested_num_processes,
    resolve_run_setting,
)
from headway.errors import ConfigError


def test_table_and_dataclass_name_the_same_settings():
    assert list(SETTINGS) == list(LaunchConfig.__dataclass_fields__)


def test_strongest_layer_wins_with_its_origin():
    told = {"num_processes": SettingValue(2, "command line: --num_processes")}
    variables = read_environment_layer({"HEADWAY_NUM_PROCESSES": "4", "HEADWAY_CPU": "yes"})
    file = {
        "num_processes": SettingValue(8, "file: f key num_processes"),
        "mixed_precision": SettingValue("bf16", "file: f key mixed_precision"),
    }
    resolved = merge_layers([told, variables, file])
    assert resolved.config == LaunchConfig(num_processes=2, cpu=True, mixed_precision="bf16")
    assert resolved.get_origin("num_processes") == "command line: --num_processes"
    assert resolved.get_origin("cpu") == "environment: HEADWAY_CPU"
    assert resolved.get_origin("mixed_precision") == "file: f key mixed_precision"
    assert resolved.get_origin("machine_rank") == "default"
    assert resolved.config.machine_rank is UNSET
    assert resolved.get("machine_rank", 0) == 0


def test_false_overrides_weaker_layers():
    resolved = merge_layers(
        [{"cpu": SettingValue(False, "environment: HEADWAY_CPU")}, {"cpu": SettingValue(True, "file")}]
    )
    assert resolved.get("cpu", None) is False


def test_unknown_setting_is_refused():
    with pytest.raises(ConfigError, match=r"num_procs.*did you mean num_processes"):
        merge_layers([{"num_procs": SettingValue(1, "here")}])


def test_empty_variable_sets_nothing():
    assert read_environment_layer({"HEADWAY_NUM_PROCESSES": " "}) == {}


def test_other_variables_are_ignored():
    assert (
        read_environment_layer({"HEADWAY_HOME": "/x", "HEADWAY_RUN": "{}", "PATH": "/bin", "HEADWAY_DEVICE": "cpu"})
        == {}
    )


@pytest.mark.parametrize(("earlier", "current", "name"), [
    ("HEADWAY_PATIENCE", "HEADWAY_TIMEOUT", "timeout"),
    ("HEADWAY_MACHINE_PATIENCE", "HEADWAY_MACHINE_TIMEOUT", "machine_timeout"),
])  # fmt: skip
def test_current_variable_overrides_its_earlier_name(earlier, current, name):
    assert read_environment_layer({earlier: "6", current: "7"})[name].value == 7.0


def test_current_variable_overrides_an_earlier_name_that_sorts_after_it():
    environment = {"HEADWAY_FSDP_ACTIVATION_CHECKPOINTING": "true", "HEADWAY_ACTIVATION_CHECKPOINTING": "false"}
    setting = read_environment_layer(environment)["activation_checkpointing"]
    assert (setting.value, setting.origin) == (False, "environment: HEADWAY_ACTIVATION_CHECKPOINTING")


def test_abbreviated_variable_gets_all_completions():
    with pytest.raises(
        ConfigError,
        match="did you mean HEADWAY_MAIN_PROCESS_IP or HEADWAY_MAIN_PROCESS_PORT",
    ):
        read_environment_layer({"HEADWAY_MAIN": "10.0.0.1"})


def test_misspelled_variable_is_named():
    with pytest.raises(ConfigError, match="HEADWAY_NUM_PROCESES is not a setting; did you mean HEADWAY_NUM_PROCESSES"):
        read_environment_layer({"HEADWAY_NUM_PROCESES": "2"})


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "HEADWAY_NUM_PROCESSES",
            "two",
            "num_processes='two'.*environment: HEADWAY_NUM_PROCESSES.*whole number, 1 or more",
        ),
        ("HEADWAY_NUM_PROCESSES", "0", "num_processes=0.*1 or more"),
        ("HEADWAY_MIXED_PRECISION", "fb16", "mixed_precision='fb16'.*one of no, bf16, fp16"),
        ("HEADWAY_CPU", "maybe", "cpu.*HEADWAY_CPU.*'maybe' must be a truth value"),
        ("HEADWAY_MONITOR_INTERVAL", "nan", "monitor_interval=nan.*a number, 0 or more"),
    ],
)
def test_invalid_text_is_named_with_its_origin(variable, text, message):
    with pytest.raises(ConfigError, match=message):
        read_environment_layer({variable: text})


def _set_payload(*layers, num_processes=2, force=False):
    return env.patch_variables({env.PAYLOAD: encode_payload(merge_layers(layers, force=force), num_processes)})


def test_payload_contains_what_workers_read():
    layer = {
        "mixed_precision": SettingValue("bf16", "command line: --mixed_precision"),
        "max_restarts": SettingValue(3, "x"),
    }
    content = json.loads(encode_payload(merge_layers([layer]), 4))
    assert content == {
        "version": 1, "num_processes": 4, "force": False,
        "settings": {"mixed_precision": {"value": "bf16", "origin": "command line: --mixed_precision"}},
    }  # fmt: skip
    with _set_payload(layer, num_processes=4):
        assert read_requested_num_processes() == range(4, 5)


def test_without_a_launcher_no_number_of_processes_is_requested():
    with env.patch_variables({env.PAYLOAD: None}):
        assert read_requested_num_processes() is None


GOOD = {"version": 1, "settings": {}, "num_processes": 1, "force": False}


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"version": 99}', "null", '"x"', '{"version": 1}', "[" * 100_000, '{"version": ' + "9" * 5000 + "}",
        *(json.dumps({**GOOD, **wrong}) for wrong in (
            {"settings": 3}, {"settings": {"cpu": 3}}, {"settings": {"cpu": {"value": True}}}, {"force": 1},
            {"settings": {"cpu": {"origin": "o"}}}, {"settings": {"cpu": {"value": True, "origin": 3}}},
            {"num_processes": "x"}, {"num_processes": []}, {"num_processes": 0}, {"num_processes": float("inf")},
            {"min_processes": "1"}, {"ranks_per_machine": "x"}, {"device": 3},
        )),
    ],
)  # fmt: skip
def test_invalid_payload_is_refused(text):
    with env.patch_variables({env.PAYLOAD: text}), pytest.raises(ConfigError, match="HEADWAY_RUN"):
        read_requested_num_processes()


@pytest.mark.parametrize(("name", "value"), [
    ("timeout", "x"), ("gradient_accumulation_steps", 0), ("strategy", 3.5), ("mixed_precision", ["bf16"]), ("cpu", 1),
])  # fmt: skip
def test_invalid_value_in_the_payload_is_refused_with_its_name(name, value):
    content = {**GOOD, "settings": {name: {"value": value, "origin": "command line"}}}
    with (
        env.patch_variables({env.PAYLOAD: json.dumps(content)}),
        pytest.raises(ConfigError, match=f"{name}=.* must be"),
    ):
        resolve_run_setting(name, None, None)


TOLD = {"mixed_precision": SettingValue("bf16", "command line: --mixed_precision")}
FILED = {"mixed_precision": SettingValue("bf16", "file: f key mixed_precision")}


class TestRunSetting:
    """Test how a worker resolves one setting from code, launcher, file and environment."""

    line = "Accelerator(mixed_precision='fp16') at train.py:12"

    def test_default_applies_if_nothing_is_set(self):
        with env.patch_variables({env.PAYLOAD: None, "HEADWAY_MIXED_PRECISION": None}):
            assert resolve_run_setting("mixed_precision", UNSET, "no") == ("no", "default")
            assert resolve_run_setting("mixed_precision", None, "no") == ("no", "default")

    def test_variable_applies_without_a_launcher(self):
        with env.patch_variables({env.PAYLOAD: None, "HEADWAY_MIXED_PRECISION": "bf16"}):
            assert resolve_run_setting("mixed_precision", UNSET, "no") == (
                "bf16",
                "environment: HEADWAY_MIXED_PRECISION",
            )
            assert resolve_run_setting("mixed_precision", "fp16", "no", code_origin=self.line)[0] == "fp16"

    def test_launcher_overrides_the_variable_it_has_read(self):
        with env.patch_variables({"HEADWAY_MIXED_PRECISION": "fp16"}), _set_payload(TOLD):
            assert resolve_run_setting("mixed_precision", UNSET, "no")[0] == "bf16"
        with env.patch_variables({"HEADWAY_MIXED_PRECISION": "fp16"}), _set_payload():
            assert resolve_run_setting("mixed_precision", UNSET, "no") == ("no", "default")

    def test_command_line_reaches_the_worker(self):
        with _set_payload(TOLD):
            assert resolve_run_setting("mixed_precision", UNSET, "no") == ("bf16", "command line: --mixed_precision")

    def test_agreement_is_no_conflict(self):
        with _set_payload(TOLD):
            assert resolve_run_setting("mixed_precision", "bf16", "no", code_origin=self.line) == (
                "bf16",
                f"code: {self.line}",
            )

    def test_code_against_the_command_line_names_both(self):
        with _set_payload(TOLD), pytest.raises(ConfigError) as exc_info:
            resolve_run_setting("mixed_precision", "fp16", "no", code_origin=self.line)
        assert f"{self.line} against --mixed_precision bf16 on the command line" in str(exc_info.value)
        assert "--force" in str(exc_info.value)

    def test_force_lets_the_command_line_win(self):
        with _set_payload(TOLD, force=True):
            assert resolve_run_setting("mixed_precision", "fp16", "no")[0] == "bf16"

    def test_code_wins_over_a_file_silently(self):
        with _set_payload(FILED):
            assert resolve_run_setting("mixed_precision", "fp16", "no", code_origin=self.line)[0] == "fp16"

    def test_switch_is_named_without_a_value(self):
        layer = {"cpu": SettingValue(True, "command line: --cpu")}
        with _set_payload(layer), pytest.raises(ConfigError, match="against --cpu on the command line"):
            resolve_run_setting("cpu", False, False)

    def test_setting_that_only_workers_read(self):
        with env.patch_variables({env.PAYLOAD: None, "HEADWAY_LOOKAHEAD": "12"}):
            assert resolve_run_setting("lookahead", UNSET, 5, parse=int) == (12, "environment: HEADWAY_LOOKAHEAD")
        with (
            env.patch_variables({env.PAYLOAD: None, "HEADWAY_LOOKAHEAD": "x"}),
            pytest.raises(ConfigError, match="HEADWAY_LOOKAHEAD='x'"),
        ):
            resolve_run_setting("lookahead", UNSET, 5, parse=int)


def test_earlier_names_are_accepted_for_one_release(monkeypatch, tmp_path):
    assert read_environment_layer({"HEADWAY_PATIENCE": "7", "HEADWAY_MACHINE_PATIENCE": "8"}) == {
        "timeout": SettingValue(7.0, "environment: HEADWAY_PATIENCE"),
        "machine_timeout": SettingValue(8.0, "environment: HEADWAY_MACHINE_PATIENCE"),
    }
    both = read_environment_layer({"HEADWAY_TIMEOUT": "9", "HEADWAY_PATIENCE": "7"})
    assert both == {"timeout": SettingValue(9.0, "environment: HEADWAY_TIMEOUT")}
    assert read_settings({"patience": 5}, "f")["timeout"].value == 5.0
    monkeypatch.setenv("HEADWAY_PATIENCE", "6")
    assert resolve_run_setting("timeout", None, 600.0) == (6.0, "environment: HEADWAY_PATIENCE")
