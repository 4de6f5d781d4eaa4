"""Names of Accelerate that libraries use are served under its name, or names_used.md gives a reason."""

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
"""{name: [libraries, how it is served, test file]}."""


@pytest.fixture(scope="module")
def found():
    """Return {name: [how it is served, libraries]}, from a process that has Headway under Accelerate's name."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **make_variables(os.environ)}
    result = subprocess.run(
        [sys.executable, "-m", "tests.ecosystem.names_used", *LIBRARIES],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_used_names_are_served_or_have_a_reason(found):
    assert {name: how for name, (how, _) in found.items() if how.strip() == "no:"} == {}
    assert {name for name, (how, _) in found.items() if how.startswith("no")} <= {
        "Accelerator.deepspeed_ulysses_dl_adapter", "Accelerator.type", "DeepSpeedPlugin.set_deepspeed_weakref",
        "DeepSpeedPlugin.set_mixed_precision", "FullyShardedDataParallelPlugin.get_module_class_from_name",
    }  # fmt: skip


def test_table_is_complete_and_correct(found):
    """Compare the table with the installed libraries.

    Other versions of a library may use other names. The table's entries for known names must still be correct.
    """
    expected = {name: [", ".join(by), how] for name, (how, by) in found.items()}
    assert {name: row[1] for name, row in ROWS.items() if name in found} == {
        name: how for name, (_, how) in expected.items() if name in ROWS
    }
    if all(f"{library} {version(library)}" in TABLE for library in LIBRARIES):
        others = {"skorch", "pytorch_accelerated", "lm_eval", "setfit", "smolagents"}
        known = {
            name: [", ".join(each for each in row[0].split(", ") if each not in others), row[1]]
            for name, row in ROWS.items()
        }
        assert {name: row for name, row in known.items() if row[0]} == expected


def test_each_library_was_read(found):
    assert len(ROWS) > 180
    for library in LIBRARIES:
        assert sum(library in by for _, by in found.values()) > 4, library
    assert {"accelerate.utils.memory.should_reduce_batch_size", "accelerate.hooks.AlignDevicesHook", "PartialState.device",
            "GradientState.end_of_dataloader", "FullyShardedDataParallelPlugin.state_dict_type"} <= found.keys()  # fmt: skip
