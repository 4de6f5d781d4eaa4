"""The help fits on a screen, flags have one spelling, and shells complete them."""

import pytest

from headway.cli import main
from headway.trainer.arguments import TrainingArguments

COMMANDS = main.group.list_commands(main.click.Context(main.group))


@pytest.fixture
def shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def go(*args):
        with pytest.raises(SystemExit) as ended:
            main.main([*args])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return go


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_help_fits_a_screen(shown, command):
    lines = shown(*command.split(), "--help").splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("command", ["launch", "test", "doctor", "estimate"])
def test_the_rest_is_behind_another_flag(shown, command):
    usual, every = shown(command, "--help"), shown(command, "--help_all")
    assert "--help-all" in usual
    assert "Options:\n" in usual
    assert max(map(len, every.splitlines())) <= 100
    flags = [{word for word in text.split() if word.startswith("--")} for text in (usual, every)]
    assert flags[0] < flags[1]
    assert every.index("Examples:") > every.index("--help")


def test_one_language_of_flags():
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


def test_training_arguments_by_the_words_of_the_commands(tmp_path):
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
def test_a_shells_completion(shown, shell):
    assert f"_HEADWAY_COMPLETE={shell}_complete" in shown("completion", shell)


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
def test_what_a_shell_completes(shown, monkeypatch, words, found):
    monkeypatch.setenv("_HEADWAY_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert shown().split() == found
