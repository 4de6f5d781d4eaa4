"""PEFT's adapters train bit for bit the same with Headway and Accelerate, and can be saved and loaded."""

import pytest

pytestmark = pytest.mark.slow


def check_equal(sides):
    differences = sides.differences()
    assert differences.keys() >= {"loss", "grad_norm", "learning_rate", "parameters", "again", "logits", "random"}
    assert {name: value for name, value in differences.items() if value} == {}
    for rank in sides.headway:
        # The loaded adapter gives the same outputs. The adapter that was prepared for bfloat16 computes them in bfloat16.
        assert rank["again"][0] < 1e-2


@pytest.mark.parametrize("kind", ["lora", "dora", "adalora"])
def test_adapter_trained_by_the_trainer_equals_accelerates(language, kind):
    check_equal(language.run("lora", "trainer", kind))


@pytest.mark.parametrize("arguments", [["lora"], ["ia3", "bf16"]], ids=" ".join)
def test_adapter_trained_in_a_loop_equals_accelerates(language, arguments):
    check_equal(language.run("lora", "loop", *arguments))


@pytest.mark.parametrize("way", ["trainer", "loop"])
def test_adapter_trained_on_two_processes_equals_accelerates(language, way):
    check_equal(language.run("lora", way, "lora", world_size=2))
