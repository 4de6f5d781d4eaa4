"""Tests of pickling functions and objects that refer to Accelerate's modules, which are not files under Headway."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

import headway.utils
from headway.launch.stand_in import make_variables

SCRIPT = Path(__file__).with_name("pickled_functions.py")


def get_function_name():
    """Return the name of a function of `headway.utils`."""
    return headway.utils.send_to_device.__name__


def test_module_is_pickled_by_name():
    """cloudpickle, used by launchers and `datasets`, pickles plain modules by name. Plain pickle refuses modules."""
    assert cloudpickle.loads(cloudpickle.dumps({"library": headway.utils}))["library"] is headway.utils


def test_function_that_uses_a_module_is_pickled_by_value():
    register = cloudpickle.register_pickle_by_value
    register(sys.modules[__name__])
    try:
        assert pickle.loads(cloudpickle.dumps(get_function_name))() == "send_to_device"
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
def test_script_pickles_functions_and_uses_the_notebook_launcher(tmp_path):
    given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    fingerprints = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        result = subprocess.run(
            [sys.executable, SCRIPT], cwd=folder, env={**given, **make_variables(given)}, capture_output=True, text=True, timeout=200
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-4000:]
        assert [(folder / f"rank{rank}").read_text() for rank in range(2)] == ["21", "21"]
        fingerprints.append((folder / "fingerprint").read_text())
    assert fingerprints[0] == fingerprints[1]
