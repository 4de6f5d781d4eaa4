"""What libraries touch of Accelerate is served under its name, or names_used.md says why not."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from headway.launch.stand_in import make_variables

pytestmark = pytest.mark.slow
LIBRARIES = ("transformers", "peft", "trl", "diffusers", "sentence_transformers")
ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "tests" / "ecosystem" / "names_used.md").read_text()
ROWS = {name: rest.split(" | ") for name, rest in re.findall(r"^\| `(\S+)` \| (.*) \|$", TABLE, re.MULTILINE)}
"""name -> [by, how it is served, a test of it]."""


@pytest.fixture(scope="module")
def found():
    """Each name that the libraries touch, from a process that has Headway under Accelerate's name: [how it is served, by whom]."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **make_variables(os.environ)}
    told = subprocess.run(
        [sys.executable, "-m", "tests.ecosystem.names_used", *LIBRARIES],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    return json.loads(told.stdout.splitlines()[-1])


def test_what_they_touch_is_there_or_has_a_reason(found):
    assert {name: how for name, (how, _) in found.items() if how.strip() == "no:"} == {}
    assert {name for name, (how, _) in found.items() if how.startswith("no")} <= {
        "Accelerator.deepspeed_ulysses_dl_adapter", "Accelerator.type", "DeepSpeedPlugin.set_deepspeed_weakref",
        "DeepSpeedPlugin.set_mixed_precision", "FullyShardedDataParallelPlugin.get_module_class_from_name",
    }  # fmt: skip


def test_the_table_has_all_of_it(found):
    """A library that is of another version than the table may touch other names; what the table says of a name holds."""
    told = {name: [", ".join(by), how] for name, (how, by) in found.items()}
    assert {name: row[1] for name, row in ROWS.items() if name in found} == {
        name: how for name, (_, how) in told.items() if name in ROWS
    }
    if all(f"{library} {version(library)}" in TABLE for library in LIBRARIES):
        others = {"skorch", "pytorch_accelerated", "lm_eval", "setfit", "smolagents"}
        known = {
            name: [", ".join(each for each in row[0].split(", ") if each not in others), row[1]]
            for name, row in ROWS.items()
        }
        assert {name: row for name, row in known.items() if row[0]} == told


def test_each_library_was_read(found):
    assert len(ROWS) > 180
    for library in LIBRARIES:
        assert sum(library in by for _, by in found.values()) > 4, library
    assert {"accelerate.utils.memory.should_reduce_batch_size", "accelerate.hooks.AlignDevicesHook", "PartialState.device",
            "GradientState.end_of_dataloader", "FullyShardedDataParallelPlugin.state_dict_type"} <= found.keys()  # fmt: skip
