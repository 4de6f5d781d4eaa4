"""TRL's trainers give the same numbers on Headway as on Accelerate, to the last bit."""

import pytest

pytestmark = pytest.mark.slow


def unequal(differences):
    return {name: value for name, value in differences.items() if value}


@pytest.mark.parametrize("way", ["text", "packed", "chat", "prompts", "lora"])
def test_supervised_fine_tuning(language, way):
    differences = language.run("sft", way).differences()
    assert differences.keys() >= {
        "loss",
        "grad_norm",
        "mean_token_accuracy",
        "entropy",
        "eval_loss",
        "parameters",
        "random",
    }
    assert unequal(differences) == {}


def test_supervised_fine_tuning_on_two_processes(language):
    assert unequal(language.run("sft", "text", world_size=2).differences()) == {}


@pytest.mark.parametrize("way", ["reference", "lora", "ahead", "defaults"])
def test_preferences(language, way):
    differences = language.run("dpo", way).differences()
    assert differences.keys() >= {
        "loss",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "eval_rewards/margins",
    }
    # What is computed ahead is read through tqdm.auto, which opens a loader twice; Headway's draws each time, as torch's does.
    assert unequal(differences).keys() <= ({"random"} if way == "ahead" else set())


def test_preferences_on_two_processes(language):
    assert unequal(language.run("dpo", "reference", world_size=2).differences()) == {}


def test_a_reward_model(language):
    differences = language.run("reward").differences()
    assert differences.keys() >= {"loss", "accuracy", "margin", "eval_mean_reward"}
    assert unequal(differences) == {}


@pytest.mark.parametrize("world_size", [1, 2])
def test_reinforcement(language, world_size):
    # Of 8 prompts for evaluation: Accelerate cuts the last batch by the prompts' number, which the sampler repeats.
    differences = language.run("grpo", world_size=world_size).differences()
    assert differences.keys() >= {"loss", "reward", "kl", "completions/mean_length", "eval_loss"}
    assert unequal(differences) == {}
