"""Functions and objects that refer to Accelerate's modules are pickled, as with modules that are files."""

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


def tell_name():
    return headway.utils.send_to_device.__name__


def test_a_plain_module_is_pickled_by_its_name():
    """cloudpickle, which launchers and `datasets` use, sends plain modules by name. pickle itself sends no module."""
    assert cloudpickle.loads(cloudpickle.dumps({"library": headway.utils}))["library"] is headway.utils


def test_a_function_that_uses_such_a_module_is_sent_by_value():
    register = cloudpickle.register_pickle_by_value
    register(sys.modules[__name__])
    try:
        assert pickle.loads(cloudpickle.dumps(tell_name))() == "send_to_device"
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
def test_a_script_pickles_its_functions_and_starts_them_from_a_notebook(tmp_path):
    given = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    fingerprints = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        ended = subprocess.run(
            [sys.executable, SCRIPT], cwd=folder, env={**given, **make_variables(given)}, capture_output=True, text=True, timeout=200
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert [(folder / f"rank{rank}").read_text() for rank in range(2)] == ["21", "21"]
        fingerprints.append((folder / "fingerprint").read_text())
    assert fingerprints[0] == fingerprints[1]
