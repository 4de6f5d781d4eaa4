"""Tests that TRL's trainers give bit-identical numbers with Headway and with Accelerate."""

import pytest

pytestmark = pytest.mark.slow


def keep_nonzero(differences):
    return {name: value for name, value in differences.items() if value}


@pytest.mark.parametrize("way", ["text", "packed", "chat", "prompts", "lora"])
def test_supervised_fine_tuning_equals_accelerates(language, way):
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
    assert keep_nonzero(differences) == {}


def test_supervised_fine_tuning_on_two_processes_equals_accelerates(language):
    assert keep_nonzero(language.run("sft", "text", world_size=2).differences()) == {}


@pytest.mark.parametrize("way", ["reference", "lora", "ahead", "defaults"])
def test_preference_optimization_equals_accelerates(language, way):
    differences = language.run("dpo", way).differences()
    assert differences.keys() >= {
        "loss",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "eval_rewards/margins",
    }
    # Precomputation reads through tqdm.auto, which calls iter() twice. Headway's loader draws each time, like torch's.
    assert keep_nonzero(differences).keys() <= ({"random"} if way == "ahead" else set())


def test_preference_optimization_on_two_processes_equals_accelerates(language):
    assert keep_nonzero(language.run("dpo", "reference", world_size=2).differences()) == {}


def test_reward_model_equals_accelerates(language):
    differences = language.run("reward").differences()
    assert differences.keys() >= {"loss", "accuracy", "margin", "eval_mean_reward"}
    assert keep_nonzero(differences) == {}


@pytest.mark.parametrize("world_size", [1, 2])
def test_reinforcement_learning_equals_accelerates(language, world_size):
    # With 8 evaluation prompts: the sampler repeats prompts, and Accelerate cuts the last batch by the number of prompts.
    differences = language.run("grpo", world_size=world_size).differences()
    assert differences.keys() >= {"loss", "reward", "kl", "completions/mean_length", "eval_loss"}
    assert keep_nonzero(differences) == {}
