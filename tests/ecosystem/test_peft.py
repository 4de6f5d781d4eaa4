"""PEFT's adapters learn the same on Headway as on Accelerate, to the last bit, and are saved and read again."""

import pytest

pytestmark = pytest.mark.slow


def compare(sides):
    differences = sides.differences()
    assert differences.keys() >= {"loss", "grad_norm", "learning_rate", "parameters", "again", "logits", "random"}
    assert {name: value for name, value in differences.items() if value} == {}
    for rank in sides.headway:
        # Read from its files the adapter says the same; the one that was prepared for bfloat16 says it in bfloat16.
        assert rank["again"][0] < 1e-2


@pytest.mark.parametrize("kind", ["lora", "dora", "adalora"])
def test_with_the_trainer(language, kind):
    compare(language.run("lora", "trainer", kind))


@pytest.mark.parametrize("arguments", [["lora"], ["ia3", "bf16"]], ids=" ".join)
def test_in_a_loop(language, arguments):
    compare(language.run("lora", "loop", *arguments))


@pytest.mark.parametrize("way", ["trainer", "loop"])
def test_on_two_processes(language, way):
    compare(language.run("lora", way, "lora", world_size=2))
