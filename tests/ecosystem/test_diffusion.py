"""diffusers with both libraries: a training loop like in public scripts, and pipelines offloaded in each way."""

import pytest

from tests.accelerator.runs import needs_compiler
from tests.accelerator.toy import build
from tests.ecosystem.both import Both

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return Both(tmp_path_factory.mktemp("diffusion"))


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_diffusion_model_trains_equally(both, mixed_precision):
    differences = both.run("diffusion_training", mixed_precision).differences()
    assert {"loss", "norm", "lr", "averaged", "loaded", "images"} <= set(differences)
    assert set(differences.values()) == {0.0}, differences


def test_diffusion_model_trains_equally_on_two_processes(both):
    sides = both.run("diffusion_training", "no", world_size=2)
    differences = sides.differences()
    assert max(differences.values()) < 1e-6, differences


@pytest.mark.parametrize("way", ["model", "group", "mapped"])
def test_offloaded_pipeline_draws_the_same_images(both, way):
    sides = both.run("diffusion_pipelines", way, "cpu")
    differences = sides.differences()
    assert set(differences.values()) == {0.0}, differences
    assert sides.headway[0]["as without"] == [1.0, 1.0]


def test_only_headway_offloads_layers_with_the_cpu_as_device(both):
    (found,) = both.run_on("headway", "diffusion_pipelines", "sequential", "cpu")
    assert found["as without"] == [1.0, 1.0]
    assert found["without hooks"] * 2 == found["images"]


@needs_compiler
@pytest.mark.parametrize("way", ["model", "sequential"])
def test_offloaded_pipeline_draws_the_same_images_on_the_toy_accelerator(both, way):
    build.build()
    sides = both.run("diffusion_pipelines", way, "toy:0")
    differences = sides.differences()
    assert set(differences.values()) == {0.0}, differences
    assert len(set(sides.headway[0]["runs on"])) <= 2
