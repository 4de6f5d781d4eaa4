"""Test `headway compat`: the list of served names, the names that a script needs, and the folder for PYTHONPATH."""

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from headway.cli.compat import command
from headway.cli.main import group
from headway.compat.accelerate.provided_names.surface import list_used_names
from headway.errors import ConfigError

SCRIPT = '''
import accelerate
import accelerate.utils as au
import accelerate.state
from accelerate import Accelerator, DistributedType as Kinds, utils
from accelerate.utils import *
from accelerate.logging import get_logger
from accelerate.utils.dataclasses import DeepSpeedPlugin
from accelerate.utils.tqdm import tqdm
from torch import nn

try:
    from accelerate.utils import merge_fsdp_weights
except ImportError:
    pass


def train():
    accelerator = Accelerator(cpu=True)
    other: object = accelerate.Accelerator()
    print(accelerator.lomo_backward, accelerator.device, other.lomo_backward, nn.lomo_backward)
    utils.prepare_data_loader(slice_fn_for_dispatch=None)
    other.prepare_data_loader(1, slice_fn_for_dispatch=au)
    au.set_seed(3)
    accelerate.utils.gather_object([1])
    accelerate.state.PartialState()
    utils.broadcast(1)
    print(accelerate.__version__, au.moonshine)


class Holder:
    def __init__(self):
        self.accelerator = Accelerator()
        print(self.accelerator.deepspeed_ulysses_dl_adapter)
'''  # fmt: skip


def run_compat(*args):
    return CliRunner().invoke(command, [str(each) for each in args])


def test_names_of_accelerate_in_a_script_are_listed_with_lines():
    found = {use.name: use.line for use in list_used_names(SCRIPT)}
    assert set(found) == {
        "Accelerator", "Accelerator.deepspeed_ulysses_dl_adapter", "Accelerator.lomo_backward", "DeepSpeedPlugin",
        "DistributedType", "PartialState", "broadcast", "gather_object", "get_logger", "merge_fsdp_weights", "moonshine",
        "prepare_data_loader", "set_seed", "slice_fn_for_dispatch=", "state", "tqdm", "utils",
    }  # fmt: skip
    assert (found["Accelerator"], found["DeepSpeedPlugin"], found["slice_fn_for_dispatch="]) == (5, 8, 23)


def test_script_without_accelerate_uses_nothing(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("from headway import Accelerator\nfrom .accelerate import x\nimport accelerated\n")
    ran = run_compat(script)
    assert (ran.exit_code, ran.output) == (0, f"{script}: uses nothing of Accelerate\n")


def test_script_with_served_names_exits_with_0(tmp_path):
    script = tmp_path / "good.py"
    script.write_text("from accelerate import Accelerator\nfrom accelerate.utils import set_seed\n")
    ran = run_compat(script)
    assert ran.exit_code == 0
    assert ran.output.splitlines()[0] == f"{script}: 2 names of Accelerate: 2 served (1 with a difference)"
    assert "  line 1     Accelerator  differs: " in ran.output
    assert "  line 2     set_seed     served\n" in ran.output


def test_script_with_unserved_names_exits_with_1(tmp_path):
    script = tmp_path / "bad.py"
    script.write_text(SCRIPT)
    ran = run_compat(script)
    assert ran.exit_code == 1
    assert "4 not served, 1 unknown" in ran.output
    assert "Accelerator.lomo_backward" in ran.output
    assert "NOT SERVED: dispatched batches are split by rows" in ran.output
    assert re.search(r"moonshine +unknown: not a public name of Accelerate 1\.15\.0", ran.output)
    told = json.loads(run_compat("--json", script).output)[str(script)]
    assert {"name": "set_seed", "status": "served", "note": "", "line": 24} in told
    assert {each["status"] for each in told} == {"served", "differs", "not served", "unknown"}


def test_without_arguments_all_names_are_listed():
    ran = run_compat()
    assert ran.exit_code == 0
    assert ran.output.startswith("Accelerate 1.15.0: ")
    assert "\naccelerate.utils.dataclasses\n" in ran.output
    told = json.loads(run_compat("--json").output)
    names = {each["name"]: each for rows in told.values() for each in rows}
    assert len(names) > 450
    assert names["BatchSamplerShard"] == {"name": "BatchSamplerShard", "status": "served", "note": ""}
    assert names["Accelerator"]["status"] == "differs"
    assert names["MegatronEngine"]["status"] == "not served"


@pytest.mark.parametrize("source", [b"\xff\xfe\x00", b"def f(:\n", b"x = '\0'\n", b"(" * 4000])
def test_source_that_cannot_be_parsed_is_refused(tmp_path, source):
    script = tmp_path / "odd.py"
    script.write_bytes(source)
    ran = run_compat(script)
    assert isinstance(ran.exception, ConfigError)
    assert str(script) in str(ran.exception)


def test_missing_script_and_contradicting_flags_are_refused(tmp_path):
    ran = run_compat(tmp_path / "none.py")
    assert isinstance(ran.exception, ConfigError)
    assert str(ran.exception).endswith("none.py cannot be read: No such file or directory")
    assert isinstance(run_compat("--path", "--json").exception, ConfigError)


def test_pipe_and_device_are_refused_without_reading(tmp_path):
    os.mkfifo(tmp_path / "pipe.py")  # a reader would wait forever
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    for name, said in (("pipe.py", "is a pipe"), ("zero.py", "is a device")):
        ran = run_compat(tmp_path / name)
        assert isinstance(ran.exception, ConfigError)
        assert f"{name} {said}, not a regular file" in str(ran.exception)


def test_help_names_pythonpath():
    ran = CliRunner().invoke(group, ["compat", "--help"])
    assert ran.exit_code == 0
    assert "PYTHONPATH=$(headway compat --path) python train.py" in ran.output
    assert "compat " in CliRunner().invoke(group, ["--help"]).output


@pytest.mark.slow
def test_script_runs_with_the_printed_path(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import accelerate, importlib.metadata as metadata\n"
        "from accelerate.utils import BatchSamplerShard, TERecipeKwargs\n"
        "from accelerate.test_utils import RegressionModel\n"
        "from accelerate.tracking import GeneralTracker, WandBTracker\n"
        "print(accelerate.Accelerator(cpu=True).num_processes, metadata.version('accelerate'), accelerate.__headway_version__)\n"
    )
    line = f"PYTHONPATH=$({sys.executable} -m headway compat --path):$PYTHONPATH {sys.executable} {script}"
    result = subprocess.run(line, shell=True, capture_output=True, text=True, env=dict(os.environ), timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("1 1.15.0 ")


@pytest.mark.parametrize(
    "written",
    [
        b"# -*- coding: latin-1 -*-\n# \xe9\nfrom accelerate import Accelerator\n",
        b"\xef\xbb\xbffrom accelerate import Accelerator\n",
    ],
    ids=["latin-1", "byte order mark"],
)
def test_script_is_read_in_any_encoding_that_python_accepts(written, tmp_path):
    script = tmp_path / "train.py"
    script.write_bytes(written)
    ran = CliRunner().invoke(command, [str(script)])
    assert ran.exit_code == 0
    assert "Accelerator" in ran.output


def test_notebook_is_refused_with_a_hint_to_nbconvert(tmp_path):
    notebook = tmp_path / "train.ipynb"
    notebook.write_text('{"cells": [{"cell_type": "code", "source": ["import accelerate"]}]}')
    ran = CliRunner().invoke(command, [str(notebook)])
    assert isinstance(ran.exception, ConfigError)
    assert "nbconvert" in str(ran.exception)
