"""The ten kinds of public scripts in `tests/scripts`, unchanged, under Accelerate's name: equal numbers.

Unlike with a changed import (`tests/distributed/test_public_scripts.py`), this includes Accelerate's behavior for short
windows and for the ends of epochs.
"""

import pytest

from tests.ecosystem.both import SCRIPTS, Both

pytestmark = pytest.mark.slow

PUBLIC = SCRIPTS.parents[1] / "scripts"
TOLERANCE = 1e-6
"""Tolerance with two processes, relative to the largest number of its kind. One process must be equal bit for bit."""

CASES = {
    "text_classification": "",
    "cross_validation": "",
    "text_to_image": "--use_ema --snr_gamma 5 --seed 1 --checkpoints_total_limit 2 --mixed_precision bf16",
    "dreambooth": "--with_prior_preservation --train_text_encoder --class_data_dir class_images",
    "denoising_diffusion": "",
    "causal_lm": "--seed 1 --checkpointing_steps 4 --output_dir out --with_tracking --report_to tensorboard",
    "lora": "",
    "schedule_free": "",
    "local_sgd": "--gradient_accumulation_steps 2",
    "autoregressive_accumulation": "",
}


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Both:
    return Both(tmp_path_factory.mktemp("public"), PUBLIC)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("script", CASES)
def test_numbers_are_equal(script, world_size, both):
    args = [*CASES[script].split(), "--evidence", "evidence"]
    found = both.run(script, *args, world_size=world_size).differences()
    assert {"loss", "gradients", "parameters"} <= found.keys()
    assert max(found.values()) <= (0.0 if world_size == 1 else TOLERANCE), found
