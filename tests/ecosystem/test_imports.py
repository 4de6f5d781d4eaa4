"""Every name of Accelerate's that transformers, PEFT, TRL, diffusers and sentence-transformers take is there under the switch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.launch.stand_in import variables

pytestmark = pytest.mark.slow
LIBRARIES = ["transformers", "peft", "trl", "diffusers", "sentence_transformers"]
NOT_SERVED = {
    "member deepspeed_ulysses_dl_adapter",  # DeepSpeed's sequence parallelism, which Headway does not have
    "member type",  # of torch.accelerator, which transformers keeps in a variable of that name
}


@pytest.fixture(scope="module")
def found():
    """What the libraries use, from a process that has Headway under Accelerate's name."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables(os.environ)}
    told = subprocess.run(
        [sys.executable, "-m", "tests.ecosystem.names_used", *LIBRARIES],
        env=environment, cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    return json.loads(told.stdout.splitlines()[-1])


def test_what_they_import_is_there(found):
    assert found["is_headway"]
    assert found["missing"].keys() <= NOT_SERVED, found["missing"]


def test_each_library_was_read(found):
    for library, counts in found["counts"].items():
        assert counts["files"] > 2, library
        assert counts["import"] > 1, library
    assert sum(name.startswith("import ") for name in found["names"]) > 70
    assert "import accelerate.utils.memory:should_reduce_batch_size" in found["names"]
    assert "attribute accelerate.hooks.AlignDevicesHook" in found["names"]
    assert "member gradient_state.end_of_dataloader" in found["names"]
