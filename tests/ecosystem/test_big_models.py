"""transformers' `device_map=` and PEFT on dispatched models, with Accelerate and with Headway, including the hooks that
libraries read.
"""

import pytest

from tests.accelerator.runs import needs_compiler
from tests.accelerator.toy import build
from tests.ecosystem.both import Both

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return Both(tmp_path_factory.mktemp("big_models"))


@pytest.mark.parametrize(("family", "places"), [
    ("llama", "cpu"), ("llama", "word"), ("llama", "auto"), ("llama", "disk"), ("gpt2", "auto"), ("gpt2", "disk"),
    ("t5", "auto"), ("t5", "disk"),
])  # fmt: skip
def test_models_loaded_by_a_device_map_generate_as_with_accelerate(both, family, places):
    sides = both.run("big_models", family, places)
    differences = sides.differences()
    assert set(differences.values()) == {0.0}, differences
    assert ("hooks" in differences) == (places in ("auto", "disk"))
    noted = sides.headway[0]
    assert noted["as the reference"] == [1.0]
    assert set(noted["of the reference"]) == {1.0}


@needs_compiler
def test_weights_stream_to_the_toy_accelerator(both):
    build.build()
    sides = both.run("big_models", "llama", "toy")
    differences = sides.differences()
    assert set(differences.values()) == {0.0}, differences
    assert sides.headway[0]["hooks"]
    assert set(sides.headway[0]["of the reference"]) == {1.0}


def test_lora_on_a_dispatched_model_trains_as_with_accelerate(both):
    differences = both.run("big_model_adapters", "cpu").differences()
    assert set(differences.values()) == {0.0}, differences


def test_only_headway_trains_and_merges_lora_on_a_model_on_disk(both):
    in_memory = both.run("big_model_adapters", "cpu").headway
    on_disk = both.run_on("headway", "big_model_adapters", "disk")
    names = ("loss", "gradients", "trained", "loaded", "tokens", "merged", "resized", "parameters")
    assert {name: on_disk[0][name] for name in names} == {name: in_memory[0][name] for name in names}


def test_device_maps_equal_those_of_accelerate(both):
    sides = both.run("device_maps")
    assert set(sides.differences().values()) == {0.0}, sides.differences()
    for kind in ("host alone", "accelerators"):
        for fault in ("over budget", "blocks apart"):
            assert set(sides.headway[0][f"{kind}: {fault}"]) == {0.0}, fault
