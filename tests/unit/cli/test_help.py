"""Test the help of all commands: its length, consistent option names, and shell completion."""

import pytest

from headway.cli import main
from headway.trainer.arguments import TrainingArguments

COMMANDS = main.group.list_commands(main.click.Context(main.group))


@pytest.fixture
def show(capsys, monkeypatch):
    """Return a function that runs `headway` in a terminal of 100 columns and returns its output."""
    monkeypatch.setenv("COLUMNS", "100")

    def run_command(*args):
        with pytest.raises(SystemExit) as exc_info:
            main.main([*args])
        assert exc_info.value.code == 0
        return capsys.readouterr().out

    return run_command


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_on_a_screen(show, command):
    lines = show(*command.split(), "--help").splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("command", ["launch", "test", "doctor", "estimate"])
def test_help_all_shows_more_flags(show, command):
    usual, every = show(command, "--help"), show(command, "--help_all")
    assert "--help-all" in usual
    assert "Options:\n" in usual
    assert max(map(len, every.splitlines())) <= 100
    flags = [{word for word in text.split() if word.startswith("--")} for text in (usual, every)]
    assert flags[0] < flags[1]
    assert every.index("Examples:") > every.index("--help")


def test_launch_estimate_and_plan_share_option_names_and_help():
    params = {
        name: {each.name: each for each in main.group.get_command(None, name).params}
        for name in ("launch", "estimate", "plan")
    }
    common = ("mixed_precision", "activation_checkpointing", "strategy")
    for name in common:
        kinds = {getattr(found[name], "is_flag", None) for found in params.values()}
        assert len(kinds) == 1, name
    for name in ("batch_size", "budget", "sequence", "optimizer", "ranks", "machine_ranks"):
        assert params["estimate"][name].help.split("[")[0].strip() in params["plan"][name].help or name in (
            "ranks",
            "budget",
        )
    assert "[default: no]" in params["launch"]["mixed_precision"].help
    assert params["plan"]["mixed_precision"].help == params["estimate"]["mixed_precision"].help
    assert params["plan"]["mixed_precision"].default == "no"


def test_training_arguments_accept_the_option_names_of_the_commands(tmp_path):
    made = TrainingArguments(
        str(tmp_path),
        batch_size=4,
        mixed_precision="bf16",
        activation_checkpointing=True,
        gradient_accumulation_steps=2,
    )
    assert (made.per_device_train_batch_size, made.mixed_precision, made.gradient_checkpointing) == (4, "bf16", True)
    assert TrainingArguments(str(tmp_path), mixed_precision="no").mixed_precision is None
    with pytest.raises(main.ConfigError, match="give no, bf16 or fp16"):
        TrainingArguments(str(tmp_path), mixed_precision="bf17")
    with pytest.raises(main.ConfigError, match="alone"):
        TrainingArguments(str(tmp_path), mixed_precision="bf16", fp16=True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_its_shell(show, shell):
    assert f"_HEADWAY_COMPLETE={shell}_complete" in show("completion", shell)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("headway la", ["plain,launch"]),
        ("headway launch --mixed", ["plain,--mixed_precision"]),
        ("headway launch --mixed_precision b", ["plain,bf16"]),
        ("headway launch train", ["file,train"]),
        ("headway launch train.py --data tr", ["file,tr"]),
    ],
)
def test_shell_completes_commands_flags_values_and_files(show, monkeypatch, words, found):
    monkeypatch.setenv("_HEADWAY_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert show().split() == found
